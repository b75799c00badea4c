"""Writing and copying pages on GPU through Triton, in place.

XLA's scatter does the same in place; these are for programs that want the writes next
to the attention in one stream of kernels, and to copy without an intermediate array.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import mesh_axes

_CHUNK = 1024  # elements of a page that one program copies


def write_kv(
    k_pages: jax.Array,
    v_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: jax.Array,
    offsets: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Store the keys and values of some tokens.

    Args:
        k_pages: [pages, page_size, K, D]; donate it.
        v_pages: as `k_pages`.
        k: [T, K, D], in the dtype of the pages.
        v: as `k`.
        pages: int32[T]; a token whose page or offset is out of range is not stored.
        offsets: int32[T].
        interpret: run on CPU, for tests.

    Returns:
        The pages of keys and of values.

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_kernels import gpu_triton_pages
        >>> pages, one = jnp.zeros((2, 2, 1, 1)), jnp.ones((1, 1, 1))
        >>> k_pages, _ = gpu_triton_pages.write_kv(
        ...     pages, pages, one, one, jnp.array([1]), jnp.array([0]), interpret=True
        ... )
        >>> k_pages.ravel().tolist()
        [0.0, 0.0, 1.0, 0.0]
    """
    num_pages, page_size, kv_heads, head_dim = k_pages.shape
    sizes = (num_pages, page_size, kv_heads * head_dim)
    flat, rows = (num_pages, page_size, -1), (k.shape[0], -1)
    operands = mesh_axes.vary_alike(
        (
            *(x.reshape(flat) for x in (k_pages, v_pages)),
            *(x.reshape(rows) for x in (k, v)),
            *(pages, offsets),
        )
    )
    call = pl.pallas_call(
        functools.partial(_write_kernel, sizes),
        grid=(k.shape[0],),
        out_shape=tuple(mesh_axes.result(x.shape, x.dtype, x) for x in operands[:2]),
        input_output_aliases={0: 0, 1: 1},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="write_kv",
    )
    return tuple(x.reshape(k_pages.shape) for x in call(*operands))


def copy_pages(
    k_pages: jax.Array,
    v_pages: jax.Array,
    src_pages: jax.Array,
    dst_pages: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Copy whole pages: the copies that copy-on-write asks for.

    Args:
        k_pages: [pages, page_size, K, D]; donate it.
        v_pages: as `k_pages`.
        src_pages: int32[M]; no page may be both a source and a destination.
        dst_pages: int32[M]; a pair with an id out of range does nothing.
        interpret: run on CPU, for tests.

    Returns:
        The pages of keys and of values.

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_kernels import gpu_triton_pages
        >>> pages = jnp.arange(4.0).reshape(4, 1, 1, 1)
        >>> k_pages, _ = gpu_triton_pages.copy_pages(
        ...     pages, pages, jnp.array([3, 4]), jnp.array([0, 1]), interpret=True
        ... )
        >>> k_pages.ravel().tolist()
        [3.0, 1.0, 2.0, 3.0]
    """
    flat = (k_pages.shape[0], -1)
    held = (k_pages.reshape(flat), v_pages.reshape(flat))
    operands = mesh_axes.vary_alike((*held, src_pages, dst_pages))
    size = held[0].shape[1]
    call = pl.pallas_call(
        functools.partial(_copy_kernel, (k_pages.shape[0], size)),
        grid=(src_pages.shape[0], pl.cdiv(size, _CHUNK)),
        out_shape=tuple(mesh_axes.result(x.shape, x.dtype, x) for x in operands[:2]),
        input_output_aliases={0: 0, 1: 1},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="copy_pages",
    )
    return tuple(x.reshape(k_pages.shape) for x in call(*operands))


def _write_kernel(sizes: tuple[int, int, int], *refs: Any) -> None:
    """Store one token."""
    num_pages, page_size, width = sizes
    _, _, k_ref, v_ref, pages_ref, offsets_ref, *out_refs = refs
    token = pl.program_id(0)
    page, offset = (plt.load(ref.at[token]) for ref in (pages_ref, offsets_ref))
    valid = (page >= 0) & (page < num_pages) & (offset >= 0) & (offset < page_size)
    lane = jnp.arange(pl.next_power_of_2(width), dtype=jnp.int32)
    # The address of a masked lane is not followed, but keep it inside all the same.
    page, offset = jnp.where(valid, page, 0), jnp.where(valid, offset, 0)
    for new_ref, out_ref in zip((k_ref, v_ref), out_refs, strict=True):
        values = plt.load(new_ref.at[token, lane], mask=lane < width)
        mask = (lane < width) & valid
        plt.store(out_ref.at[page, offset, lane], values, mask=mask)


def _copy_kernel(shape: tuple[int, int], *refs: Any) -> None:
    """Copy one part of one page."""
    num_pages, width = shape
    *in_refs, src_ref, dst_ref, k_out, v_out = refs
    pair = pl.program_id(0)
    src, dst = (plt.load(ref.at[pair]) for ref in (src_ref, dst_ref))
    valid = (src >= 0) & (src < num_pages) & (dst >= 0) & (dst < num_pages)
    lane = pl.program_id(1) * _CHUNK + jnp.arange(_CHUNK, dtype=jnp.int32)
    mask = (lane < width) & valid
    src, dst = jnp.where(valid, src, 0), jnp.where(valid, dst, 0)
    for in_ref, out_ref in zip(in_refs, (k_out, v_out), strict=True):
        values = plt.load(in_ref.at[src, lane], mask=mask)
        plt.store(out_ref.at[dst, lane], values, mask=mask)
