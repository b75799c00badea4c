"""Changing pages in place on TPU: rows of new tokens, copies of whole pages.

Both kernels are copies by DMA and nothing else. A token's row [K, D] is whole tiles of
a page, so it is written alone: nobody else's tokens are read or written, and two
tokens of one page cannot undo each other.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.layout import Format, Layout
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Sharding

from pallas_kernels import mesh_axes
from pallas_kernels import tpu_chips as chips

_TOKENS = 32  # rows on their way at once
_MAX_TOKENS = 32768  # of one call: page and offset of each are in SMEM


def write_kv(
    k_pages: jax.Array,
    v_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: jax.Array,
    offsets: jax.Array,
    *,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Store the keys and values of some tokens, in place when the pages are donated.

    Args:
        k_pages: [pages, page_size, K, D].
        v_pages: likewise.
        k: [T, K, D], cast to the dtype of `k_pages`.
        v: likewise.
        pages: int32[T], the page of each token; one outside 0 .. pages - 1, as NULL is,
            stores nothing.
        offsets: int32[T], the place inside the page; one outside it stores nothing. No
            two tokens may have the same place.
        interpret: as in `pl.pallas_call`.

    Returns:
        The new `(k_pages, v_pages)`.

    Raises:
        ValueError: a shape is wrong.
        NotImplementedError: the chip has no such dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_kernels import tpu_pages
        >>> pages, kv = jnp.zeros((2, 2, 1, 4)), jnp.ones((2, 1, 4))
        >>> keys, _ = tpu_pages.write_kv(
        ...     pages, pages, kv, kv, jnp.array([1, 2]), jnp.array([0, 0]),
        ...     interpret=True,
        ... )
        >>> keys.sum(axis=(1, 2, 3)).tolist()  # the second token had no page
        [0.0, 4.0]
    """
    chips.require_pages(k_pages, v_pages)
    num_pages, page_size, *row = k_pages.shape
    tokens = pages.shape
    for name, new in (("k", k), ("v", v)):
        if new.shape != (*tokens, *row):
            want = (*tokens, *row)
            raise ValueError(f"{name} must have shape {want}, got {new.shape}")
    if offsets.shape != tokens:
        raise ValueError(f"offsets must have shape {tokens}, got {offsets.shape}")
    held = (pages >= 0) & (pages < num_pages) & (offsets >= 0) & (offsets < page_size)
    pages = jnp.where(held, pages, -1).astype(jnp.int32)
    offsets = offsets.astype(jnp.int32)
    k, v = k.astype(k_pages.dtype), v.astype(v_pages.dtype)
    for start in range(0, tokens[0], _MAX_TOKENS):
        part = slice(start, start + _MAX_TOKENS)
        k_pages, v_pages = _write(
            k_pages, v_pages, k[part], v[part], pages[part], offsets[part], interpret
        )
    return k_pages, v_pages


def copy_pages(
    arrays: tuple[jax.Array, ...],
    src_pages: jax.Array,
    dst_pages: jax.Array,
    *,
    num_layers: int = 1,
    interpret: Any = False,
) -> tuple[jax.Array, ...]:
    """Copy whole pages in every layer, in place when the arrays are donated.

    Costs what is really copied; with nothing to copy, nothing is read.

    Args:
        arrays: keys, values and what else has a page per id, each
            [num_layers * pages, ...].
        src_pages: int32[M], pages of one layer to copy from.
        dst_pages: int32[M], where to; a pair with a page outside 0 .. pages - 1 copies
            nothing. No page may be both a source and a destination.
        num_layers: layers in the arrays.
        interpret: as in `pl.pallas_call`.

    Returns:
        The new arrays.

    Raises:
        ValueError: a shape is wrong.

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_kernels import tpu_pages
        >>> pages = jnp.arange(4.0).reshape(4, 1, 1, 1)  # 2 layers of 2 pages
        >>> (keys,) = tpu_pages.copy_pages(
        ...     (pages,), jnp.array([0]), jnp.array([1]), num_layers=2, interpret=True
        ... )
        >>> keys.ravel().tolist()
        [0.0, 0.0, 2.0, 2.0]
    """
    rows = {x.shape[0] for x in arrays}
    if len(rows) != 1 or num_layers < 1 or min(rows) % num_layers:
        raise ValueError(
            f"arrays must have one number of pages, a multiple of num_layers="
            f"{num_layers}; they have {sorted(rows)}"
        )
    if src_pages.ndim != 1 or src_pages.shape != dst_pages.shape:
        raise ValueError(
            f"src_pages {src_pages.shape} and dst_pages {dst_pages.shape} must be "
            "vectors of one length"
        )
    if not src_pages.shape[0]:
        return arrays
    num_pages = min(rows) // num_layers
    real = (src_pages >= 0) & (src_pages < num_pages)
    real &= (dst_pages >= 0) & (dst_pages < num_pages)
    order = jnp.argsort(~real, stable=True)
    count = jnp.sum(real, dtype=jnp.int32).reshape(1)
    src, dst = (x.astype(jnp.int32)[order] for x in (src_pages, dst_pages))
    count, src, dst, *varied = mesh_axes.vary_alike((count, src, dst, *arrays))
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    return tuple(
        pl.pallas_call(
            functools.partial(_copy_kernel, num_layers, num_pages),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=3,
                grid=(1,),
                in_specs=[hbm] * len(varied),
                out_specs=[hbm] * len(varied),
                scratch_shapes=[pltpu.SemaphoreType.DMA],
            ),
            out_shape=[mesh_axes.result(x.shape, x.dtype, x) for x in varied],
            input_output_aliases={3 + i: i for i in range(len(varied))},
            interpret=interpret,
            name="copy_pages",
        )(count, src, dst, *varied)
    )


def page_format(sharding: Sharding, ndim: int = 4) -> Format:
    """Return the layout on the device that the kernels read pages in: row-major.

    It is the compiler's own choice where D is a multiple of 128 and K one of 8, or a
    power of 2 that fills a word. Elsewhere the compiler prefers another one, to save
    the padding; a program whose pages come in as arguments must then ask for this one,
    or it copies all pages before each call.

    Args:
        sharding: where the pages lie.
        ndim: axes of the array; 3 for scales.

    Returns:
        What `jax.device_put` and the `in_shardings` of `jax.jit` take.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from pallas_kernels import tpu_pages
        >>> pages = jnp.zeros((4, 16, 3, 64))
        >>> pages = jax.device_put(pages, tpu_pages.page_format(pages.sharding))
        >>> pages.format.layout.major_to_minor
        (0, 1, 2, 3)
    """
    return Format(Layout(tuple(range(ndim))), sharding)


def _write(
    k_pages: jax.Array,
    v_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: jax.Array,
    offsets: jax.Array,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Store tokens whose page and offset fit SMEM; a page of -1 stores nothing."""
    tokens, *row = k.shape
    block = min(_TOKENS, tokens)
    operands = mesh_axes.vary_alike((pages, offsets, k, v, k_pages, v_pages))
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    rows = pl.BlockSpec((block, *row), lambda i, *_: (i, *(0,) * len(row)))
    return tuple(
        pl.pallas_call(
            functools.partial(_write_kernel, tokens, block),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=(math.ceil(tokens / block),),
                in_specs=[rows, rows, hbm, hbm],
                out_specs=[hbm, hbm],
                scratch_shapes=[pltpu.SemaphoreType.DMA],
            ),
            out_shape=[mesh_axes.result(x.shape, x.dtype, x) for x in operands[4:]],
            input_output_aliases={4: 0, 5: 1},
            interpret=interpret,
            name="write_kv",
        )(*operands)
    )


def _write_kernel(
    tokens: int,
    block: int,
    pages: Any,
    offsets: Any,
    k: Any,
    v: Any,
    k_before: Any,
    v_before: Any,
    k_pages: Any,
    v_pages: Any,
    written: Any,
) -> None:
    """Send a block of rows to their places, all at once, and wait for them."""
    del k_before, v_before  # the same arrays as the results
    first = pl.program_id(0) * block

    def each_row(act: Any) -> None:
        @pl.loop(0, jnp.minimum(block, tokens - first))
        def _(i: jax.Array) -> None:
            page, offset = pages[first + i], offsets[first + i]

            @pl.when(page >= 0)
            def _() -> None:
                for new, held in ((k, k_pages), (v, v_pages)):
                    act(
                        pltpu.make_async_copy(new.at[i], held.at[page, offset], written)
                    )

    each_row(lambda copy: copy.start())
    each_row(lambda copy: copy.wait())


def _copy_kernel(num_layers: int, num_pages: int, *refs: Any) -> None:
    """Copy the pages of all pairs, one layer after the other."""
    count, src, dst, *arrays, copied = refs
    arrays = arrays[len(arrays) // 2 :]  # before and after are the same arrays

    @pl.loop(0, num_layers)
    def _(layer: jax.Array) -> None:
        start = layer * num_pages

        def each_pair(act: Any) -> None:
            @pl.loop(0, count[0])
            def _(i: jax.Array) -> None:
                for held in arrays:
                    source, target = held.at[start + src[i]], held.at[start + dst[i]]
                    act(pltpu.make_async_copy(source, target, copied))

        each_pair(lambda copy: copy.start())
        each_pair(lambda copy: copy.wait())
