"""Paged attention on XLA: loops over blocks of pages with an online softmax.

One step takes a block of query rows of one slot and walks over that slot's keys,
`block_tokens` at a time, from the first key any row can see to the last:

    keys      0        T       2T       3T   length
    row 0     [ block 0 | block 1 | bl.              each row keeps a running maximum,
    row 1     [ block 0 | block 1 | bloc             a sum and a weighted sum of values
    row 2     [ block 0 | block 1 | block

so memory depends on the block, never on the width of the page table, and a slot
costs its own length. The running softmax is that of https://arxiv.org/abs/1805.02867,
its use by blocks that of https://arxiv.org/abs/2205.14135.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax import _page_ops as ops
from pagedjax._attention_call import AttentionCall

Pair = tuple[jax.Array, jax.Array]
Triple = tuple[jax.Array, jax.Array, jax.Array]
# Pages [pages, page_size, K, D], and the scales of quantised ones or None.
Stored = tuple[jax.Array, jax.Array | None]

_BLOCK_BYTES = 512 * 1024  # of float32 keys in a block: they stay in a core's cache
_MIN_BLOCK_TOKENS = 64
_MAX_BLOCK_TOKENS = 128
_FEW_ROWS = 16
_MANY_ROWS = 128


def supports(call: AttentionCall) -> tuple[bool, str]:
    """Return whether the call can be done, and the reason if it cannot."""
    del call
    return True, ""


def usable() -> tuple[bool, str]:
    """Return that it can run in every installation."""
    return True, "runs on every platform"


def attend(
    call: AttentionCall,
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_indices: jax.Array,
    seq_lens: jax.Array,
    cu_q_lens: jax.Array | None,
    k_scales: jax.Array | None,
    v_scales: jax.Array | None,
) -> Pair:
    """Attend with every row.

    Args:
        call: the description of the arguments.
        q: [T, H, D].
        k_pages: [pages, page_size, K, D].
        v_pages: as `k_pages`.
        page_indices: int32[S, P].
        seq_lens: int32[S].
        cu_q_lens: int32[S + 1], or None for one row per slot.
        k_scales: float32[pages, page_size, K] of quantised pages, or None.
        v_scales: as `k_scales`.

    Returns:
        The output [T, H, D] in the dtype of `q`, and the log-sum-exp, float32[T, H].
    """
    keys, values = (k_pages, k_scales), (v_pages, v_scales)
    if cu_q_lens is None:
        return attend_one_row_each(call, q, keys, values, page_indices, seq_lens)
    return _attend_ragged(call, q, keys, values, page_indices, seq_lens, cu_q_lens)


def attend_one_row_each(
    call: AttentionCall,
    q: jax.Array,
    keys: Stored,
    values: Stored,
    page_indices: jax.Array,
    seq_lens: jax.Array,
    *,
    together: bool | None = None,
) -> Pair:
    """Attend with the last token of each slot: q is [S, H, D].

    Args:
        call: the description.
        q: [S, H, D].
        keys: the pages of keys, and their scales.
        values: likewise.
        page_indices: int32[S, P].
        seq_lens: int32[S]; 0 for a slot without a row.
        together: whether the slots run as one batch, which keeps a wide device busy
            but lasts as long as the longest; or a few at a time, each few for their
            own length, whose keys stay in the cache, which is faster on CPU. None
            for the choice of the platform.

    Returns:
        The output [S, H, D], and the log-sum-exp [S, H].
    """

    def attend_slots(q: jax.Array, table: jax.Array, lengths: jax.Array) -> Pair:
        num_rows = (lengths > 0).astype(jnp.int32)
        out, lse = attend_blocks(
            call, q[:, None], keys, values, table, lengths - 1, num_rows
        )
        return out[:, 0], lse[:, 0]

    def in_turn(*args: jax.Array) -> Pair:
        size = slots_in_turn(call)
        groups = [x.reshape(-1, size, *x.shape[1:]) for x in args]
        out, lse = lax.map(lambda group: attend_slots(*group), groups)
        return out.reshape(q.shape), lse.reshape(q.shape[:2])

    args = (q, page_indices, seq_lens)
    if together is None:
        return lax.platform_dependent(*args, cpu=in_turn, default=attend_slots)
    return attend_slots(*args) if together else in_turn(*args)


def _attend_ragged(
    call: AttentionCall,
    q: jax.Array,
    keys: Stored,
    values: Stored,
    page_indices: jax.Array,
    seq_lens: jax.Array,
    cu_q_lens: jax.Array,
) -> Pair:
    """Attend with ragged rows: single rows as in decode, the others block by block."""
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    single = q_lens == 1
    single_rows = jnp.where(single, cu_q_lens[:-1], call.num_tokens)
    single_out, single_lse = attend_one_row_each(
        call,
        q.at[single_rows].get(mode="fill", fill_value=0),
        keys,
        values,
        page_indices,
        jnp.where(single, seq_lens, 0),
    )
    rows = block_rows(call)
    q = pad_rows(q, rows)
    blocks = RowBlocks(jnp.where(single, 0, q_lens), rows)

    def body(i: jax.Array, carry: Pair) -> Pair:
        out, lse = carry
        slot, offset, num_rows = blocks.locate(i)
        start = cu_q_lens[slot] + offset
        first_position = seq_lens[slot] - q_lens[slot] + offset
        block_out, block_lse = attend_blocks(
            call,
            lax.dynamic_slice_in_dim(q, start, rows)[None],
            keys,
            values,
            page_indices[slot][None],
            first_position[None],
            num_rows[None],
        )
        # A block's surplus rows fall on the rows of later blocks, which come later.
        return (
            lax.dynamic_update_slice_in_dim(out, block_out[0], start, 0),
            lax.dynamic_update_slice_in_dim(lse, block_lse[0], start, 0),
        )

    carry: Pair = ops.vary_together(
        (jnp.zeros(q.shape, q.dtype), jnp.full(q.shape[:2], -jnp.inf)),
        (q, keys, values, page_indices, seq_lens, cu_q_lens),
    )
    out, lse = lax.fori_loop(0, blocks.total, body, carry)
    out = out[: call.num_tokens].at[single_rows].set(single_out, mode="drop")
    lse = lse[: call.num_tokens].at[single_rows].set(single_lse, mode="drop")
    return out, lse


def attend_blocks(
    call: AttentionCall,
    q: jax.Array,
    keys: Stored,
    values: Stored,
    table_rows: jax.Array,
    first_positions: jax.Array,
    num_rows: jax.Array,
) -> Pair:
    """Attend with X blocks of up to B consecutive rows of one slot each.

    The blocks share one loop, as long as the longest needs: a step past the end of
    a block's keys changes none of its bits. (A `vmap` of a loop per block would do
    the same, but `checkify` refuses it.)

    Args:
        call: the description.
        q: [X, B, H, D].
        keys: the pages of keys, and their scales.
        values: likewise.
        table_rows: int32[X, P], the pages of each block's slot.
        first_positions: int32[X], position of row 0 of each block.
        num_rows: int32[X], how many rows of each block are real.

    Returns:
        The output [X, B, H, D] and the log-sum-exp [X, B, H]; 0 and -inf in surplus
        rows.
    """
    num_blocks, num_places = q.shape[:2]

    def walk_of(first_position: jax.Array, rows: jax.Array) -> KeyWalk:
        return KeyWalk(call, num_places, first_position, rows)

    def step(i: jax.Array, carry: Triple, *block: jax.Array) -> Triple:
        q_rows, table_row, *place = block
        seen = walk_of(*place).block(i, table_row)
        return _online_softmax(call, carry, q_rows, keys, values, *seen)

    def body(i: jax.Array, carry: Triple) -> Triple:
        return jax.vmap(step, in_axes=(None, 0, 0, 0, 0, 0))(
            i, carry, q_heads, table_rows, first_positions, num_rows
        )

    q_heads = jax.vmap(lambda rows: split_heads(call, rows))(q)
    q_heads *= jnp.float32(call.scale)
    lengths = jax.vmap(lambda *place: walk_of(*place).num_blocks)(
        first_positions, num_rows
    )
    shape = (num_blocks, call.num_kv_heads, num_places * call.group_size)
    carry: Triple = ops.vary_together(
        (
            jnp.full(shape, -jnp.inf),
            jnp.zeros(shape),
            jnp.zeros((*shape, call.head_dim)),
        ),
        (q, keys, values, table_rows, first_positions, num_rows),
    )
    if call.pages_per_slot <= block_pages(call):
        # The whole table is one block: a loop would cost more than it saves.
        peak, total, acc = body(jnp.int32(0), carry)
    else:
        peak, total, acc = lax.fori_loop(0, jnp.max(lengths), body, carry)
    some = total != 0  # also where it is NaN, which must not look like nothing
    total = jnp.where(some, total, 1.0)
    out = jnp.where(some[..., None], acc / total[..., None], 0.0)
    lse = jnp.where(some, peak + jnp.log(total), -jnp.inf)
    out, lse = jax.vmap(lambda *pair: [join_heads(call, x) for x in pair])(out, lse)
    return out.astype(q.dtype), lse


def _online_softmax(
    call: AttentionCall,
    carry: Triple,
    q_heads: jax.Array,
    keys: Stored,
    values: Stored,
    ids: jax.Array,
    visible: jax.Array,
    live: jax.Array,
) -> Triple:
    """Take T more keys into the running maximum, sum and weighted sum of the rows."""
    peak, total, acc = carry
    k = read_block(call, keys, ids)
    # Values that no row sees may be NaN, which a weight of 0 does not silence.
    v = jnp.where(live[None, :, None], read_block(call, values, ids), 0.0)
    scores = cap_scores(call, dot(q_heads, k, "krd,ktd->krt"))
    scores = jnp.where(visible[None], scores, -jnp.inf)
    new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
    # A row that has seen nothing yet: exp(-inf - 0) is 0, exp(-inf + inf) is not.
    shift = jnp.where(new_peak > -jnp.inf, new_peak, 0.0)
    weights = jnp.exp(scores - shift[..., None])
    decay = jnp.exp(peak - shift)
    total = total * decay + jnp.sum(weights, axis=-1)
    acc = acc * decay[..., None] + dot(weights, v, "krt,ktd->krd")
    return new_peak, total, acc


# --- the parts, shared with the backward pass ----------------------------------------


def block_rows(call: AttentionCall) -> int:
    """Return how many query rows a block of the ragged loop has.

    Many rows read their keys once for all of them, but a slot with few rows pays for
    the whole block: few on average (drafts, short suffixes) take small blocks.
    """
    few = max(_FEW_ROWS, _FEW_ROWS // 2 * call.num_slots)
    return _FEW_ROWS if call.num_tokens <= few else _MANY_ROWS


def block_pages(call: AttentionCall) -> int:
    """Return how many pages a block of keys has."""
    token_bytes = 4 * call.num_kv_heads * call.head_dim
    tokens = _BLOCK_BYTES // token_bytes
    tokens = min(max(tokens, _MIN_BLOCK_TOKENS), _MAX_BLOCK_TOKENS)
    return min(max(1, tokens // call.page_size), call.pages_per_slot)


def slots_in_turn(call: AttentionCall) -> int:
    """Return how many slots take a turn together: their blocks of keys fit a cache."""
    slot_bytes = 4 * call.num_kv_heads * call.head_dim
    slot_bytes *= block_pages(call) * call.page_size
    most = min(max(1, _BLOCK_BYTES // slot_bytes), call.num_slots)
    return next(size for size in range(most, 0, -1) if call.num_slots % size == 0)


class RowBlocks:
    """The query rows of all slots, cut into blocks that each belong to one slot.

    Attributes:
        total: int32[], the number of blocks.
    """

    def __init__(self, q_lens: jax.Array, rows: int) -> None:
        """Cut q_lens[s] rows of each slot s into blocks of at most `rows`."""
        self._q_lens = q_lens
        self._rows = rows
        counts = lax.div(q_lens + (rows - 1), rows)
        self._ends = jnp.cumsum(counts)
        self._starts = self._ends - counts
        self.total = self._ends[-1]

    def locate(self, i: jax.Array) -> Triple:
        """Return the slot of block i, its first row in the slot, and its rows."""
        slot = jnp.sum(self._ends <= i).astype(jnp.int32)
        offset = (i - self._starts[slot]) * self._rows
        return slot, offset, jnp.minimum(self._q_lens[slot] - offset, self._rows)


class KeyWalk:
    """The blocks of keys that a block of query rows walks over.

    Attributes:
        num_blocks: int32[], the number of blocks of keys.
    """

    def __init__(
        self,
        call: AttentionCall,
        num_places: int,
        first_position: jax.Array,
        num_rows: jax.Array,
    ) -> None:
        """Take rows at first_position, ...; the first `num_rows` places are real."""
        self._call = call
        capacity = call.pages_per_slot * call.page_size
        self._tokens = block_pages(call) * call.page_size
        index = jnp.arange(num_places, dtype=jnp.int32)
        positions = jnp.where(index < num_rows, first_position + index, -1)
        self._positions = jnp.repeat(positions, call.group_size)
        self._end = jnp.clip(first_position + num_rows, 0, capacity)
        self._oldest = jnp.zeros_like(first_position)
        if call.window is not None:
            self._oldest = jnp.maximum(first_position - (call.window - 1), 0)
        # lax.div: nothing here is negative, and // pays for the sign.
        self._first_page = lax.div(self._oldest, call.page_size)
        span = self._end - self._first_page * call.page_size
        blocks = lax.div(jnp.maximum(span + self._tokens - 1, 0), self._tokens)
        self.num_blocks = jnp.where(num_rows > 0, blocks, 0)

    def block(self, i: jax.Array, table_row: jax.Array) -> Triple:
        """Return the physical pages of block i and what is seen of its T tokens.

        Returns:
            Pages, int32[T / page_size], any valid id where nothing is seen; what
            each row sees, bool[B * G, T]; and what any row may see, bool[T].
        """
        call = self._call
        pages = block_pages(call)
        column = self._first_page + i * pages
        columns = column + jnp.arange(pages, dtype=jnp.int32)
        # Past the row's width, and where a cell is garbage, read some page: masked.
        columns = jnp.minimum(columns, call.pages_per_slot - 1)
        ids = jnp.clip(table_row[columns], 0, call.num_pages - 1)
        start = column * call.page_size
        tokens = start + jnp.arange(self._tokens, dtype=jnp.int32)
        live = (tokens >= self._oldest) & (tokens < self._end)
        visible = live[None] & (tokens[None] <= self._positions[:, None])
        if call.window is not None:
            visible &= tokens[None] > self._positions[:, None] - call.window
        return ids, visible, live


def read_block(call: AttentionCall, stored: Stored, ids: jax.Array) -> jax.Array:
    """Return float32[K, T, D]: the tokens of some pages, kv heads first."""
    pages, scales = stored
    tokens = pages.at[ids].get(mode="promise_in_bounds")
    tokens = tokens.reshape(-1, call.num_kv_heads, call.head_dim)
    tokens = tokens.transpose(1, 0, 2).astype(jnp.float32)
    if scales is None:
        return tokens
    factors = scales.at[ids].get(mode="promise_in_bounds")
    return tokens * factors.reshape(-1, call.num_kv_heads).T[..., None]


def cap_scores(call: AttentionCall, scores: jax.Array) -> jax.Array:
    """Return the scores, soft-capped if the call says so."""
    if call.soft_cap is None:
        return scores
    return call.soft_cap * jnp.tanh(scores / call.soft_cap)


def dot(a: jax.Array, b: jax.Array, axes: str) -> jax.Array:
    """Return an einsum in full float32, also where the default is less."""
    return jnp.einsum(axes, a, b, precision=lax.Precision.HIGHEST)


def split_heads(call: AttentionCall, rows: jax.Array) -> jax.Array:
    """Return float32[K, B * G, ...] of [B, H, ...]: kv heads first."""
    num_rows, _, *rest = rows.shape
    rows = rows.astype(jnp.float32)
    rows = rows.reshape(num_rows, call.num_kv_heads, call.group_size, *rest)
    return jnp.swapaxes(rows, 0, 1).reshape(
        call.num_kv_heads, num_rows * call.group_size, *rest
    )


def join_heads(call: AttentionCall, heads: jax.Array) -> jax.Array:
    """Return [B, H, ...] of [K, B * G, ...]."""
    _, grouped_rows, *rest = heads.shape
    num_rows = grouped_rows // call.group_size
    heads = heads.reshape(call.num_kv_heads, num_rows, call.group_size, *rest)
    return jnp.swapaxes(heads, 0, 1).reshape(num_rows, call.num_heads, *rest)


def pad_rows(array: jax.Array, rows: int, value: float = 0.0) -> jax.Array:
    """Return the array with `rows` more rows of `value`."""
    widths = [(0, rows)] + [(0, 0)] * (array.ndim - 1)
    return jnp.pad(array, widths, constant_values=value)
