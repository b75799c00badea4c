"""The pool: where keys and values live, page by page.

One flat array per kind for all layers, so that a scan over layers carries it
whole and updates it in place; a pool stacked by layer and sliced in the loop would
be copied out and back::

    k_pages  [ layer 0: page 0 .. N-1 | layer 1: page 0 .. N-1 | ... ]
             page p of layer l is row l * N + p;  NULL (= N) becomes L * N

The pool knows nothing of slots: the page table says which page is whose.

Pages of int8 or float8_e4m3fn hold each token and head as a scale and D small numbers:
half the bytes of bfloat16, and the rounding error of a token depends on no other::

    x[D]  ->  scale = max |x| / 127 (float8: 448),   page = round(x / scale)
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax import _page_ops as ops
from pagedjax._page_table import CopyPlan, PageTable, translate
from pallas_kernels import tpu_chips

# Largest value that a quantised dtype is used for: what a scale of 1 stands for.
_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
_DTYPES = ("float32", "bfloat16", "float16", *_LARGEST)
_COPY_BLOCK = 8  # pages copied per turn of the loop in `copy_pages`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVPool:
    """Keys and values of every page and layer. Donate it to each step.

    Attributes:
      k_pages: [L * N, page_size, K, D]; keys.
      v_pages: same shape; values.
      k_scales: float32[L * N, page_size, K] for quantised pages, else None.
      v_scales: likewise.
      num_layers: `L` (static).
    """

    k_pages: jax.Array
    v_pages: jax.Array
    k_scales: jax.Array | None = None
    v_scales: jax.Array | None = None
    num_layers: int = dataclasses.field(default=1, metadata={"static": True})

    @property
    def num_pages(self) -> int:
        """Pages of one layer, `N`; also the value of the NULL page."""
        return self.k_pages.shape[0] // self.num_layers

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.k_pages.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads, `K`."""
        return self.k_pages.shape[2]

    @property
    def head_dim(self) -> int:
        """Width of a head, `D`."""
        return self.k_pages.shape[3]


def init_kv_pool(
    *,
    num_layers: int,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: Any = jnp.float32,
) -> KVPool:
    """Makes a pool of zeros.

    Args:
      num_layers: layers that share the page table, `L`.
      num_pages: pages of each layer, `N`; that of the page table.
      page_size: tokens in a page.
      num_kv_heads: key-value heads, `K`.
      head_dim: width of a head, `D`.
      dtype: float32, bfloat16 or float16; or int8 or float8_e4m3fn, quantised with
        one float32 scale per token and kv head.

    Raises:
      ValueError: a size is below 1, the pool has more rows than int32 can index,
        or the dtype is not one of these.

    Example:
      >>> import pagedjax as pj
      >>> pool = pj.init_kv_pool(
      ...     num_layers=2, num_pages=8, page_size=4, num_kv_heads=1, head_dim=64
      ... )
      >>> pool.k_pages.shape
      (16, 4, 1, 64)
    """
    num_layers = ops.as_size("num_layers", num_layers)
    num_pages = ops.as_size("num_pages", num_pages)
    page_size = ops.as_size("page_size", page_size)
    num_kv_heads = ops.as_size("num_kv_heads", num_kv_heads)
    head_dim = ops.as_size("head_dim", head_dim)
    if num_layers * num_pages >= ops.INT32_MAX:
        raise ValueError(
            f"num_layers * num_pages = {num_layers * num_pages} does not fit int32"
        )
    if jnp.dtype(dtype).name not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype}")
    shape = (num_layers * num_pages, page_size, num_kv_heads, head_dim)
    quantised = jnp.dtype(dtype).name in _LARGEST
    # A call for each: arguments that share a buffer cannot be donated.
    return KVPool(
        k_pages=jnp.zeros(shape, dtype),
        v_pages=jnp.zeros(shape, dtype),
        k_scales=jnp.zeros(shape[:3], jnp.float32) if quantised else None,
        v_scales=jnp.zeros(shape[:3], jnp.float32) if quantised else None,
        num_layers=num_layers,
    )


def write_kv(
    pool: KVPool,
    layer: int | jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: jax.Array,
    offsets: jax.Array,
) -> KVPool:
    """Stores the keys and values of some tokens in one layer.

    Args:
      pool: the pool; donate it.
      layer: which layer; may be traced.
      k: [T, K, D]; keys, cast or quantised to the pool's dtype.
      v: [T, K, D]; values.
      pages: int32[T]; page of each token, as `translate` gives it; a token on the
        NULL page is not stored.
      offsets: int32[T]; place inside the page.

    Returns:
      The new pool. No two tokens may have the same place.

    Raises:
      ValueError, TypeError: an array has the wrong shape or dtype.

    Example:
      >>> import jax.numpy as jnp, pagedjax as pj
      >>> pool = pj.init_kv_pool(
      ...     num_layers=2, num_pages=8, page_size=4, num_kv_heads=1, head_dim=64
      ... )
      >>> kv = jnp.ones((2, 1, 64))  # two tokens, the second on the NULL page
      >>> pool = pj.write_kv(pool, 1, kv, kv, jnp.array([3, 8]), jnp.array([2, 0]))
      >>> float(pool.k_pages.sum()), float(pool.k_pages[8 + 3, 2].sum())
      (64.0, 64.0)
    """
    pages = ops.as_int32("pages", pages, (None,))
    offsets = ops.as_int32("offsets", offsets, pages.shape)
    want = (*pages.shape, pool.num_kv_heads, pool.head_dim)
    for name, array in (("k", k), ("v", v)):
        if array.shape != want:
            raise ValueError(f"{name} must have shape {want}, got {array.shape}")
    rows = layer_rows(pool, pages, layer)
    # A negative offset would wrap to the end of the page.
    offsets = jnp.where(offsets >= 0, offsets, pool.page_size)

    k, k_scales = _quantise(k, pool.k_pages.dtype)
    v, v_scales = _quantise(v, pool.v_pages.dtype)
    k_pages, v_pages = _store_rows(pool, k, v, rows, offsets)
    k_scales, v_scales = jax.tree.map(
        lambda held, new: _scatter(held, new, rows, offsets),
        (pool.k_scales, pool.v_scales),
        (k_scales, v_scales),
    )
    return KVPool(k_pages, v_pages, k_scales, v_scales, num_layers=pool.num_layers)


def _store_rows(
    pool: KVPool, k: jax.Array, v: jax.Array, rows: jax.Array, offsets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    def by_scatter(
        k_pages: jax.Array, v_pages: jax.Array, k: jax.Array, v: jax.Array, *place: Any
    ) -> tuple[jax.Array, jax.Array]:
        return _scatter(k_pages, k, *place), _scatter(v_pages, v, *place)

    arrays = (pool.k_pages, pool.v_pages, k, v, rows, offsets)
    if not _has_tpu_kernels(pool):
        return by_scatter(*arrays)
    from pallas_kernels import tpu_pages

    return lax.platform_dependent(*arrays, tpu=tpu_pages.write_kv, default=by_scatter)


def _scatter(
    held: jax.Array, new: jax.Array, rows: jax.Array, offsets: jax.Array
) -> jax.Array:
    return held.at[rows, offsets].set(new.astype(held.dtype), mode="drop")


def copy_pages(pool: KVPool, plan: CopyPlan) -> KVPool:
    """Runs the page copies that `append` asked for, in every layer.

    Costs what is really copied: with nothing to copy, as in most decode steps, no
    page is read. A loop of that length: under jit it has no reverse-mode derivative.

    Args:
      pool: the pool; donate it.
      plan: the copies; a pair with a NULL page does nothing. No page may be both
        a source and a destination.

    Returns:
      The new pool.

    Example:
      >>> import jax.numpy as jnp, pagedjax as pj
      >>> pool = pj.init_kv_pool(
      ...     num_layers=1, num_pages=4, page_size=2, num_kv_heads=1, head_dim=1
      ... )
      >>> one = jnp.ones((1, 1, 1))
      >>> pool = pj.write_kv(pool, 0, one, one, jnp.array([0]), jnp.array([0]))
      >>> plan = pj.CopyPlan(src_pages=jnp.array([0]), dst_pages=jnp.array([3]))
      >>> pj.copy_pages(pool, plan).k_pages.ravel().tolist()
      [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    """
    src = ops.as_int32("plan.src_pages", plan.src_pages, (None,))
    dst = ops.as_int32("plan.dst_pages", plan.dst_pages, src.shape)
    if not src.shape[0]:
        return pool
    if not _has_tpu_kernels(pool):
        return _copy_by_blocks(pool, src, dst)
    from pallas_kernels import tpu_pages

    def copy_by_kernel(pool: KVPool, src: jax.Array, dst: jax.Array) -> KVPool:
        arrays, tree = jax.tree.flatten(pool)
        copied = tpu_pages.copy_pages(
            tuple(arrays), src, dst, num_layers=pool.num_layers
        )
        return jax.tree.unflatten(tree, copied)

    return lax.platform_dependent(
        pool, src, dst, tpu=copy_by_kernel, default=_copy_by_blocks
    )


def _copy_by_blocks(pool: KVPool, src: jax.Array, dst: jax.Array) -> KVPool:
    null, block = pool.num_pages, min(_COPY_BLOCK, src.shape[0])
    valid = (src >= 0) & (src < null) & (dst >= 0) & (dst < null)
    count = jnp.cumsum(valid.astype(jnp.int32))
    # The real copies first, so that the loop runs over them alone. A conditional
    # would do for "nothing to copy", but it makes XLA copy the pool.
    place = jnp.where(valid, count - 1, src.shape[0] + block)
    room = jnp.full((src.shape[0] + block,), null, jnp.int32)
    src = room.at[place].set(src, mode="drop")
    dst = room.at[place].set(dst, mode="drop")
    layers = jnp.arange(pool.num_layers, dtype=jnp.int32)[:, None]

    def copy_block(i: jax.Array, pool: KVPool) -> KVPool:
        block_of = (
            lax.dynamic_slice(ids, (i * block,), (block,)) for ids in (src, dst)
        )
        from_rows, to_rows = (
            layer_rows(pool, ids[None, :], layers) for ids in block_of
        )
        return jax.tree.map(
            lambda held: held.at[to_rows].set(
                held.at[from_rows].get(mode="clip"), mode="drop"
            ),
            pool,
        )

    pool = ops.vary_together(pool, src, dst)
    return lax.fori_loop(0, -(-count[-1] // block), copy_block, pool)


def gather_kv(
    pool: KVPool, layer: int | jax.Array, table: PageTable, slot: int | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Reads one sequence back as a contiguous array: for tests and inspection.

    Args:
      pool: the pool.
      layer: which layer; may be traced.
      table: the page table.
      slot: which slot; may be traced.

    Returns:
      `(k, v)`, each [P * page_size, K, D]; zeros past the end of the sequence. In
      the pool's dtype; float32 of a quantised pool.

    Raises:
      ValueError, TypeError: the pages are not the pool's, or `slot` is not one slot.

    Example:
      >>> import jax.numpy as jnp, pagedjax as pj
      >>> table = pj.init_page_table(
      ...     num_pages=4, page_size=2, max_slots=1, pages_per_slot=2
      ... )
      >>> pool = pj.init_kv_pool(
      ...     num_layers=1, num_pages=4, page_size=2, num_kv_heads=1, head_dim=1
      ... )
      >>> table, _, _ = pj.append(table, jnp.array([3]))
      >>> k, _ = pj.gather_kv(pool, 0, table, 0)
      >>> k.shape
      (4, 1, 1)
    """
    of_table = (table.num_pages, table.page_size)
    if of_table != (pool.num_pages, pool.page_size):
        raise ValueError(
            f"the table has {of_table[0]} pages of {of_table[1]} tokens, but the pool"
            f" has {pool.num_pages} of {pool.page_size}"
        )
    slot = ops.as_int32("slot", slot, ())
    positions = jnp.arange(table.pages_per_slot * table.page_size, dtype=jnp.int32)
    slots = jnp.full_like(positions, slot)
    pages, offsets = translate(table, slots, positions)
    rows = layer_rows(pool, pages, layer)

    def fetch(held: jax.Array, scales: jax.Array | None) -> jax.Array:
        values = held.at[rows, offsets].get(mode="fill", fill_value=0)
        if scales is None:
            return values
        factors = scales.at[rows, offsets].get(mode="fill", fill_value=0)
        return values.astype(jnp.float32) * factors[..., None]

    return fetch(pool.k_pages, pool.k_scales), fetch(pool.v_pages, pool.v_scales)


def scrub_pages(pool: KVPool, pages: jax.Array) -> KVPool:
    """Overwrites pages with zeros in every layer, so that no tenant's data stays.

    Not needed for correctness: what a sequence does not own is never read.

    Args:
      pool: the pool; donate it.
      pages: int32[M]; page ids, NULL does nothing.

    Returns:
      The new pool.

    Example:
      Scrub what a `free` gives back:

      >>> import jax.numpy as jnp, pagedjax as pj
      >>> table = pj.init_page_table(
      ...     num_pages=4, page_size=2, max_slots=1, pages_per_slot=2
      ... )
      >>> pool = pj.init_kv_pool(
      ...     num_layers=1, num_pages=4, page_size=2, num_kv_heads=1, head_dim=1
      ... )
      >>> table, _, _ = pj.append(table, jnp.array([3]))
      >>> held = table.page_indices.ravel()
      >>> table = pj.free(table, jnp.array([True]))
      >>> owners = table.refcounts.at[held].get(mode="fill", fill_value=1)
      >>> pool = pj.scrub_pages(pool, jnp.where(owners == 0, held, 4))
    """
    pages = ops.as_int32("pages", pages, (None,))
    layers = jnp.arange(pool.num_layers, dtype=jnp.int32)[:, None]
    rows = layer_rows(pool, pages[None, :], layers)
    return jax.tree.map(lambda held: held.at[rows].set(0, mode="drop"), pool)


def resize_kv_pool(pool: KVPool, num_pages: int) -> KVPool:
    """Copies the pool to one with another number of pages; ids do not change.

    The counterpart of `grow` and `shrink`. Not for use inside jit.

    Args:
      pool: the pool.
      num_pages: pages of each layer in the new pool.

    Returns:
      The new pool; pages past the old end are zeros, those past the new are lost.

    Raises:
      ValueError: `num_pages` is below 1, or too many for int32.

    Example:
      >>> import pagedjax as pj
      >>> pool = pj.init_kv_pool(
      ...     num_layers=2, num_pages=4, page_size=2, num_kv_heads=1, head_dim=1
      ... )
      >>> pj.resize_kv_pool(pool, 6).k_pages.shape
      (12, 2, 1, 1)
    """
    num_pages = ops.as_size("num_pages", num_pages)
    if num_pages * pool.num_layers >= ops.INT32_MAX:
        raise ValueError(
            f"num_layers * num_pages = {pool.num_layers * num_pages} does not fit int32"
        )
    kept = min(num_pages, pool.num_pages)

    def resize(held: jax.Array) -> jax.Array:
        layers = held.reshape(pool.num_layers, pool.num_pages, *held.shape[1:])
        room = jnp.zeros((pool.num_layers, num_pages, *held.shape[1:]), held.dtype)
        resized = room.at[:, :kept].set(layers[:, :kept])
        return resized.reshape(-1, *held.shape[1:])

    return jax.tree.map(resize, pool)


def layer_page_indices(
    page_indices: jax.Array,
    layer: int | jax.Array,
    *,
    num_pages: int,
    num_layers: int,
) -> jax.Array:
    """Turns page ids into rows of the flat pool for one layer.

    NULL is derived anew: merely adding the layer's start to it would name page 0
    of the next layer. So is every id out of range, and every page of a traced layer
    that is out of range.

    Args:
      page_indices: int32[...]; page ids of the table.
      layer: the layer, an int or an int32 array that broadcasts; may be traced.
      num_pages: pages of one layer.
      num_layers: layers in the pool.

    Returns:
      int32[...]; `layer * num_pages + page`, or `num_layers * num_pages`.

    Raises:
      ValueError: `layer` is an int out of range, or a number is no size.
      TypeError: an array is not of whole numbers.

    Example:
      >>> import jax.numpy as jnp, pagedjax as pj
      >>> pj.layer_page_indices(
      ...     jnp.array([0, 3, 4]), 1, num_pages=4, num_layers=2
      ... ).tolist()
      [4, 7, 8]
    """
    page_indices = ops.as_int32("page_indices", page_indices, (...,))
    num_pages = ops.as_size("num_pages", num_pages)
    num_layers = ops.as_size("num_layers", num_layers)
    return _rows_of(page_indices, layer, num_pages, num_layers)


def _has_tpu_kernels(pool: KVPool) -> bool:
    """Tell whether a TPU is traced for, and its kernels can change these pages.

    There XLA's scatter wants another layout of the pages than attention does, and
    copies the whole pool to and fro.
    """
    chip, _ = tpu_chips.target_chip()
    return chip is not None and tpu_chips.holds(pool.k_pages.dtype)


def layer_rows(pool: KVPool, pages: jax.Array, layer: int | jax.Array) -> jax.Array:
    """Does `layer_page_indices` with the pool's sizes, which may be symbolic."""
    return _rows_of(pages, layer, pool.num_pages, pool.num_layers)


def _rows_of(
    pages: jax.Array, layer: int | jax.Array, num_pages: int, num_layers: int
) -> jax.Array:
    if not isinstance(layer, jax.Array):
        layer = ops.as_size("layer", layer, low=-ops.INT32_MAX - 1)
        if not 0 <= layer < num_layers:
            raise ValueError(f"layer {layer} is not one of {num_layers} layers")
    elif not jnp.issubdtype(layer.dtype, jnp.integer):
        raise TypeError(f"layer must be a whole number, got {layer.dtype}")
    layer = jnp.asarray(layer, jnp.int32)
    valid = (pages >= 0) & (pages < num_pages)
    valid &= (layer >= 0) & (layer < num_layers)
    return jnp.where(valid, layer * num_pages + pages, num_layers * num_pages)


def _quantise(
    values: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array | None]:
    """Gives what a page of this dtype holds for values[..., D], and their scales.

    Infinity and NaN stay visible: their scale is infinite, and 0 times that NaN.
    """
    largest = _LARGEST.get(dtype.name)
    if largest is None:
        return values, None
    values = values.astype(jnp.float32)
    # NaN counts as infinity: XLA's vectorised maximum on CPU leaves NaN out.
    sizes = jnp.where(jnp.isnan(values), jnp.inf, jnp.abs(values))
    scales = jnp.max(sizes, axis=-1) / largest
    # All zeros, or too small for a scale: stored as zeros.
    scales = jnp.where(scales < jnp.finfo(jnp.float32).tiny, 1.0, scales)
    small = values / scales[..., None]
    if jnp.issubdtype(dtype, jnp.integer):
        small = jnp.round(small)
    # The cast does not saturate: 500 as float8_e4m3fn is NaN.
    return jnp.clip(small, -largest, largest).astype(dtype), scales
