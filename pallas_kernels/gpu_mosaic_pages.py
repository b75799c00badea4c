"""Writing and copying pages on Hopper through Mosaic GPU, in place: TMA and no more.

What is moved goes from global to shared memory and back, as it is, in any dtype: pages,
or the scales of quantised ones. The pools are handed over as references, so that a
donated one is changed where it lies.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mesh_axes

_MOST = 256  # elements of a copy along any axis
_PART_BYTES = 32 * 1024  # of a page, keys and values each, that one program copies


def supports(width: int, dtype: Any) -> tuple[bool, str]:
    """Return whether rows can be moved, and the reason if they cannot.

    Args:
        width: elements of a row: of a token's keys, K * D, or of a whole page.
        dtype: of the pages.

    Returns:
        (able, reason).

    Example:
        >>> from pallas_kernels import gpu_mosaic_pages
        >>> gpu_mosaic_pages.supports(10, "int8")
        (False, 'a row takes 10 bytes, TMA moves multiples of 16')
    """
    size = width * jnp.dtype(dtype).itemsize
    if size % 16:
        return False, f"a row takes {size} bytes, TMA moves multiples of 16"
    return True, ""


def write_kv(
    k_pages: jax.Array,
    v_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: jax.Array,
    offsets: jax.Array,
    *,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Store the keys and values of some tokens.

    Args:
        k_pages: [pages, page_size, K, D], or scales [pages, page_size, K]; donate it.
        v_pages: as `k_pages`.
        k: [T, K, D] or [T, K], in the dtype of the pages.
        v: as `k`.
        pages: int32[T]; a token whose page or offset is out of range is not stored.
        offsets: int32[T].
        interpret: `plgpu.InterpretGPUParams` to run on CPU, for tests.

    Returns:
        The pages of keys and of values.

    Raises:
        NotImplementedError: a token's row is no multiple of 16 bytes.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from pallas_kernels import gpu_mosaic_pages
        >>> pages, one = jnp.zeros((2, 2, 1, 8)), jnp.ones((1, 1, 8))
        >>> ids = jnp.zeros(1, "int32")
        >>> call = jax.eval_shape(
        ...     gpu_mosaic_pages.write_kv, pages, pages, one, one, ids, ids
        ... )
        >>> call[0].shape
        (2, 2, 1, 8)
    """
    num_pages, page_size = k_pages.shape[:2]
    row = _cut(math.prod(k_pages.shape[2:]), k_pages.dtype)
    flat = (num_pages, page_size, *row)
    new = tuple(x.reshape(x.shape[0], *row) for x in (k, v))

    def body(*refs: Any) -> None:
        k_ref, v_ref, pages_ref, offsets_ref, *pool_refs = refs
        token = lax.axis_index("token")
        page, offset = pages_ref[token], offsets_ref[token]
        valid = (page >= 0) & (page < num_pages)
        valid &= (offset >= 0) & (offset < page_size)
        sources = [ref.at[token] for ref in (k_ref, v_ref)]
        targets = [ref.at[page, offset] for ref in pool_refs]
        pl.when(valid)(lambda: _move(sources, targets, row))

    return _change(
        body,
        (k_pages, v_pages),
        flat,
        (*new, pages, offsets),
        {"token": k.shape[0]},
        "write_kv",
        interpret,
    )


def copy_pages(
    k_pages: jax.Array,
    v_pages: jax.Array,
    src_pages: jax.Array,
    dst_pages: jax.Array,
    *,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Copy whole pages: the copies that copy-on-write asks for.

    Args:
        k_pages: [pages, page_size, K, D], or scales [pages, page_size, K]; donate it.
        v_pages: as `k_pages`.
        src_pages: int32[M]; no page may be both a source and a destination.
        dst_pages: int32[M]; a pair with an id out of range does nothing.
        interpret: see `write_kv`.

    Returns:
        The pages of keys and of values.

    Raises:
        NotImplementedError: a page is no multiple of 16 bytes.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from pallas_kernels import gpu_mosaic_pages
        >>> pages, ids = jnp.zeros((4, 2, 1, 8)), jnp.zeros(2, "int32")
        >>> call = jax.eval_shape(gpu_mosaic_pages.copy_pages, pages, pages, ids, ids)
        >>> call[1].shape
        (4, 2, 1, 8)
    """
    num_pages = k_pages.shape[0]
    lines, lanes = _cut(math.prod(k_pages.shape[1:]), k_pages.dtype)
    most = _PART_BYTES // (lanes * jnp.dtype(k_pages.dtype).itemsize)
    of_part = _largest_divisor(lines, min(_MOST, most))

    def body(*refs: Any) -> None:
        src_ref, dst_ref, *pool_refs = refs
        pair = lax.axis_index("pair")
        src, dst = src_ref[pair], dst_ref[pair]
        valid = (src >= 0) & (src < num_pages) & (dst >= 0) & (dst < num_pages)
        part = pl.ds(lax.axis_index("part") * of_part, of_part)
        sources = [ref.at[src, part] for ref in pool_refs]
        targets = [ref.at[dst, part] for ref in pool_refs]
        pl.when(valid)(lambda: _move(sources, targets, (of_part, lanes)))

    grid = {"pair": src_pages.shape[0], "part": lines // of_part}
    return _change(
        body,
        (k_pages, v_pages),
        (num_pages, lines, lanes),
        (src_pages, dst_pages),
        grid,
        "copy_pages",
        interpret,
    )


def _change(
    body: Any,
    pools: tuple[jax.Array, jax.Array],
    flat: tuple[int, ...],
    arrays: tuple[jax.Array, ...],
    grid: dict[str, int],
    name: str,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Run a kernel that changes pools of another shape; returns them in theirs."""
    shape = pools[0].shape
    flats = (pool.reshape(flat) for pool in pools)
    *operands, k_flat, v_flat = mesh_axes.vary_alike((*arrays, *flats))
    refs = [jax.new_ref(pool) for pool in (k_flat, v_flat)]
    pl.kernel(
        body,
        out_type=(),
        mesh=plgpu.Mesh(grid=tuple(grid.values()), grid_names=tuple(grid)),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        name=name,
        **({} if interpret is None else {"interpret": interpret}),
    )(*operands, *refs)
    k_pages, v_pages = (jax.freeze(ref).reshape(shape) for ref in refs)
    return k_pages, v_pages


def _move(sources: list, targets: list, shape: tuple[int, int]) -> None:
    """Copy keys and values through shared memory."""
    dtype = sources[0].dtype

    def run(*scratch: Any) -> None:
        *smems, here = scratch
        for source, smem in zip(sources, smems, strict=True):
            plgpu.copy_gmem_to_smem(source, smem, here)
        plgpu.barrier_wait(here)
        for smem, target in zip(smems, targets, strict=True):
            plgpu.copy_smem_to_gmem(smem, target)
        plgpu.wait_smem_to_gmem(0)

    smems = [plgpu.SMEM(shape, dtype) for _ in sources]
    pl.run_scoped(run, *smems, plgpu.Barrier(num_arrivals=len(sources)))


def _cut(width: int, dtype: Any) -> tuple[int, int]:
    """Return the shape in which `width` elements are moved: two axes of at most 256."""
    able, reason = supports(width, dtype)
    if not able:
        raise NotImplementedError(reason)
    # The last axis takes a multiple of 16 bytes, as all others step over it.
    unit = 16 // math.gcd(16, jnp.dtype(dtype).itemsize)
    lanes = unit * _largest_divisor(width // unit, _MOST // unit)
    return width // lanes, lanes


def _largest_divisor(number: int, most: int) -> int:
    return max(x for x in range(1, min(number, most) + 1) if number % x == 0)
