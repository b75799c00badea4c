"""What the TPU attention kernels share: a stream of pages, and a running softmax.

A kernel works through *items*: a run of queries of one slot, and the range of that
slot's tokens that any of them sees. Tokens come in blocks of several pages. While one
block is computed the next is on its way, also across items::

    item      |      0      |   1   |        2         |
    block     |  0   1   2  |   0   |   0    1    2    |
    computes  |  a   b   a  |   b   |   a    b    a    |   buffer a or b
    arrives   b  a   b   a  b   a   b        ...           the other one

Pages lie in HBM as [page_size, K, D]. A page is copied whole to rows of a buffer
[tokens, K, D]: its first axis is not tiled, so a page of any size may start at any
row. A head is then a strided read of the buffer.

The softmax is that of FlashAttention (https://arxiv.org/abs/2205.14135), section 3.1.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

BUFFERS = 2
_LANES = 128


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Sizes and options of a kernel; all static.

    Attributes:
        page_size: tokens in a page.
        pages_per_slot: columns of the page table.
        pages_per_block: pages that are computed together.
        num_kv_heads: K.
        group_size: query heads per kv head, G.
        head_dim: D.
        kv_dtype: dtype of the pages.
        quantised: whether scales come with the pages.
        scale: factor of the scores.
        window: keys a query sees, itself included; None for all.
        soft_cap: cap of the scores; None for none.
        cores: TensorCores that share one call.
    """

    page_size: int
    pages_per_slot: int
    pages_per_block: int
    num_kv_heads: int
    group_size: int
    head_dim: int
    kv_dtype: Any
    quantised: bool
    scale: float
    window: int | None
    soft_cap: float | None
    cores: int

    @property
    def block_tokens(self) -> int:
        """Tokens in a block."""
        return self.pages_per_block * self.page_size

    @property
    def buffer_tokens(self) -> int:
        """Rows of a buffer: the tokens of a block, filled up to whole vectors."""
        return -(-self.block_tokens // _LANES) * _LANES

    def scratch(self) -> list[Any]:
        """Return the buffers of `Stream`, in the order of its fields."""
        shape = (BUFFERS, self.buffer_tokens, self.num_kv_heads, self.head_dim)
        pages = pltpu.VMEM(shape, self.kv_dtype)
        scratch = [pages, pages, pltpu.SemaphoreType.DMA((BUFFERS,))]
        if self.quantised:
            shape = (BUFFERS, self.pages_per_block, self.page_size, self.num_kv_heads)
            scratch += [pltpu.VMEM(shape, jnp.float32)] * 2
        return scratch


@dataclasses.dataclass(frozen=True)
class Stream:
    """Copies of pages from HBM to the buffers; all fields but one are references.

    Attributes:
        geometry: the sizes.
        table: int32[S * P] in SMEM, the ids of the pages.
        slots: int32[items] in SMEM, the slot of each item.
        lows: int32[items] in SMEM, the first token that any query of the item sees.
        highs: int32[items] in SMEM, one past the last such token; 0 for no item.
        hbm: the pages: keys, values, and the scales of both if quantised.
        buffers: the same in VMEM, BUFFERS times a block.
        arrived: one semaphore per buffer.
    """

    geometry: Geometry
    table: Any
    slots: Any
    lows: Any
    highs: Any
    hbm: tuple[Any, ...]
    buffers: tuple[Any, ...]
    arrived: Any

    def blocks(self, item: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the first block of an item and one past its last."""
        size = self.geometry.block_tokens
        return lax.div(self.lows[item], size), _ceil_div(self.highs[item], size)

    def start(self, item: jax.Array, block: jax.Array, buffer: jax.Array) -> None:
        """Start the copies of the pages of a block that some query sees."""
        self._each_page(item, block, buffer, lambda copy: copy.start())

    def wait(self, item: jax.Array, block: jax.Array, buffer: jax.Array) -> None:
        """Wait until what `start` started has arrived."""
        self._each_page(item, block, buffer, lambda copy: copy.wait())

    def _each_page(
        self, item: jax.Array, block: jax.Array, buffer: jax.Array, act: Any
    ) -> None:
        geometry = self.geometry
        first_of_block = block * geometry.pages_per_block
        row = self.slots[item] * geometry.pages_per_slot
        first = jnp.maximum(
            lax.div(self.lows[item], geometry.page_size), first_of_block
        )
        end = jnp.minimum(
            _ceil_div(self.highs[item], geometry.page_size),
            first_of_block + geometry.pages_per_block,
        )

        @pl.loop(first, end)
        def _(logical: jax.Array) -> None:
            page = self.table[row + logical]
            nth = logical - first_of_block
            rows = pl.ds(nth * geometry.page_size, geometry.page_size)
            for i, (held, room) in enumerate(zip(self.hbm, self.buffers, strict=True)):
                # Scales have their tokens on a tiled axis: whole pages there.
                place = room.at[buffer, rows] if i < 2 else room.at[buffer, nth]
                sent = self.arrived.at[buffer]
                act(pltpu.make_async_copy(held.at[page], place, sent))

    def head(self, which: int, buffer: jax.Array, head: int) -> jax.Array:
        """Return keys (0) or values (1) of a head, [tokens, D]; scaled if quantised."""
        x = self.buffers[which][buffer, :, head, :]
        if not self.geometry.quantised:
            return x
        scales = self.buffers[2 + which][buffer, :, :, head : head + 1]
        return x.astype(jnp.float32) * scales.reshape(x.shape[0], 1)

    def seen(self, item: jax.Array, block: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the range of rows of a block that some query of the item sees."""
        start = block * self.geometry.block_tokens
        low = self.lows[item] - start
        high = jnp.minimum(self.highs[item] - start, self.geometry.block_tokens)
        return low, high


def open_stream(
    stream: Stream,
    turn: Any,
    step: jax.Array,
    item: jax.Array,
    begin: Callable[[jax.Array, jax.Array], None] | None = None,
) -> None:
    """Start the first block of a core's first item; call it on every item.

    Args:
        stream: the pages.
        turn: int32[1] in SMEM, kept from item to item: the buffer of the first block.
        step: which item of this core this is.
        item: the item.
        begin: called with (item, step) as the first block of an item is started.
    """
    first, end = stream.blocks(item)

    @pl.when(step == 0)
    def _() -> None:
        turn[0] = 0

        @pl.when(end > first)
        def _() -> None:
            stream.start(item, first, jnp.int32(0))
            if begin is not None:
                begin(item, step)


def stream_blocks(
    stream: Stream,
    turn: Any,
    step: jax.Array,
    item: jax.Array,
    num_items: int,
    compute: Callable[[jax.Array, jax.Array], None],
    begin: Callable[[jax.Array, jax.Array], None] | None = None,
) -> None:
    """Call `compute(block, buffer)` for each block of an item, copies running ahead.

    Args:
        stream: the pages.
        turn: as in `open_stream`; so are the next two.
        step: see there.
        item: see there.
        num_items: items of all cores; a core does each `cores`-th.
        compute: what is done with a block in a buffer.
        begin: as in `open_stream`.
    """
    first, end = stream.blocks(item)
    start_turn = turn[0]
    following = item + stream.geometry.cores
    next_item = jnp.minimum(following, num_items - 1)
    next_first, next_end = stream.blocks(next_item)
    more = (following < num_items) & (next_end > next_first)

    @pl.loop(first, end)
    def _(block: jax.Array) -> None:
        buffer = (start_turn + block - first) & 1
        last = block + 1 == end

        @pl.when(jnp.logical_not(last))
        def _() -> None:
            stream.start(item, block + 1, 1 - buffer)

        @pl.when(last & more)
        def _() -> None:
            stream.start(next_item, next_first, 1 - buffer)
            if begin is not None:
                begin(next_item, step + 1)

        stream.wait(item, block, buffer)
        compute(block, buffer)

    turn[0] = (start_turn + end - first) & 1


def cap_scores(geometry: Geometry, products: jax.Array) -> jax.Array:
    """Return scores of the products q k^T: scaled, then capped."""
    scores = products * geometry.scale
    if geometry.soft_cap is not None:
        scores = geometry.soft_cap * jnp.tanh(scores / geometry.soft_cap)
    return scores


def reset(peak: Any, total: Any, summed: Any) -> None:
    """Begin a softmax: nothing seen."""
    peak[...] = jnp.full(peak.shape, -jnp.inf, jnp.float32)
    total[...] = jnp.zeros(total.shape, jnp.float32)
    summed[...] = jnp.zeros(summed.shape, jnp.float32)


def accumulate(
    peak: Any, total: Any, summed: Any, scores: jax.Array, values: jax.Array
) -> None:
    """Add a block of keys to a softmax.

    Args:
        peak: float32[R, 1], the largest score so far; a reference, as the next two.
        total: float32[R, 1], the sum of exp(score - peak).
        summed: float32[R, D], the same with each value as a factor.
        scores: float32[R, T], -inf where the row may not see the key.
        values: [T, D], 0 where no row sees the key: 0 times garbage may be NaN.
    """
    old = peak[...]
    new = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
    # A row that has seen nothing has no peak: exp(-inf - 0) is the 0 it needs.
    base = jnp.where(new == -jnp.inf, 0.0, new)
    rescale = jnp.exp(old - base)
    weights = jnp.exp(scores - base)
    peak[...] = new
    total[...] = rescale * total[...] + jnp.sum(weights, axis=1, keepdims=True)
    summed[...] = rescale * summed[...] + exact_dot(weights, values, transpose=False)


def finish(peak: Any, total: Any, summed: Any) -> tuple[jax.Array, jax.Array]:
    """Return (out[R, D], lse[R, 1]), float32; 0 and -inf for rows that saw no key."""
    blind = peak[...] == -jnp.inf
    sum_of = jnp.where(blind, 1.0, total[...])
    lse = jnp.where(blind, -jnp.inf, peak[...] + jnp.log(sum_of))
    return summed[...] / sum_of, lse


def exact_dot(left: jax.Array, right: jax.Array, *, transpose: bool) -> jax.Array:
    """Multiply two matrices with products and sums as exact as float32.

    The matrix unit multiplies bfloat16. Where `right` is bfloat16, a float32 `left`
    goes through in three parts of 8 bits each, half the passes of two float32s.

    Args:
        left: [R, C].
        right: [C, N], or [N, C] with `transpose`.
        transpose: multiply by the transpose of `right`.

    Returns:
        float32[R, N].
    """
    if left.dtype == right.dtype == jnp.bfloat16:
        return _dot(left, right, transpose, None)
    if right.dtype != jnp.bfloat16:
        left, right = left.astype(jnp.float32), right.astype(jnp.float32)
        return _dot(left, right, transpose, lax.Precision.HIGHEST)
    high, rest = _split(left)
    middle, low = _split(rest)
    parts = [
        _dot(part.astype(jnp.bfloat16), right, transpose, None)
        for part in (low, middle, high)
    ]
    return parts[0] + parts[1] + parts[2]


def _dot(
    left: jax.Array, right: jax.Array, transpose: bool, precision: lax.Precision | None
) -> jax.Array:
    return lax.dot_general(
        left,
        right,
        (((1,), (1 if transpose else 0,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the leading 8 bits of each float32, and the rest, both float32.

    By a mask, not by a cast: a compiler may take a cast there and back for nothing.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-65536)
    high = lax.bitcast_convert_type(bits, jnp.float32)
    return high, x - high


def item_of(core: jax.Array, step: jax.Array, cores: int, items: int) -> jax.Array:
    """Return the item of a core's step: dealt in turn, a core's last one repeated."""
    item = step * cores + core
    return jnp.where(item < items, item, item - cores)


def _ceil_div(x: jax.Array, y: int) -> jax.Array:
    return lax.div(x + (y - 1), y)
