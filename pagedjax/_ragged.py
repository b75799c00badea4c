"""One step's tokens, packed: prefill chunks and decode tokens side by side.

A batch is what a model's layers need to know of the page table for one step: where
each token's key and value go, and what each token may see. It is computed once and
read by every layer::

    slots      0        1   2
    q_lens     3        0   2            cu_q_lens [0 3 3 5]
    tokens    [a5 a6 a7     c0 c1 . .]   padding at the end, on the NULL page
    positions  5  6  7      0  1  0 0
"""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp

from pagedjax import _page_ops as ops
from pagedjax._attention import paged_attention, ragged_paged_attention
from pagedjax._kv_pool import KVPool, layer_rows, write_kv
from pagedjax._page_table import PageTable, translate


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RaggedBatch:
    """The tokens of one step, in slot order, without gaps.

    `T` is the static number of token places, `S` = `max_slots`.

    Attributes:
      page_indices: int32[S, P]; the table's cells.
      seq_lens: int32[S]; tokens each slot holds, this batch's included; 0 for a
        slot that takes no part.
      positions: int32[T]; absolute position of each token; 0 on padding.
      pages: int32[T]; page each token's key and value go to; NULL on padding.
      offsets: int32[T]; place inside that page.
      cu_q_lens: int32[S + 1]; tokens `cu_q_lens[s] .. cu_q_lens[s + 1] - 1` belong
        to slot `s`. None for a decode batch, where `T` = `S` and token `s` belongs
        to slot `s`.
    """

    page_indices: jax.Array
    seq_lens: jax.Array
    positions: jax.Array
    pages: jax.Array
    offsets: jax.Array
    cu_q_lens: jax.Array | None = None

    @property
    def last_rows(self) -> jax.Array:
        """int32[S]; where each slot's last token is; meaningless without tokens."""
        if self.cu_q_lens is None:
            return jnp.arange(self.seq_lens.shape[0], dtype=jnp.int32)
        return jnp.maximum(self.cu_q_lens[1:] - 1, 0)


def pack_ragged(
    table: PageTable,
    q_lens: jax.Array,
    *,
    num_tokens: int,
    seq_lens: jax.Array | None = None,
) -> RaggedBatch:
    """Lays out the last tokens of each slot for one step, e.g. a prefill chunk.

    Args:
      table: the table, in which the tokens already have room (`append`).
      q_lens: int32[S]; tokens of each slot in this step; 0 leaves the slot out.
      num_tokens: static number of token places, `T`, at least the sum of `q_lens`
        (`checkify` reports it otherwise).
      seq_lens: int32[S]; tokens of each slot up to and including this step's.
        Default: all it holds. A prompt that got its pages at once is prefilled in
        chunks by raising this from chunk to chunk.

    Returns:
      The batch.

    Raises:
      ValueError, TypeError: an array has the wrong shape or dtype.

    Example:
      >>> import jax.numpy as jnp, pagedjax as pj
      >>> table = pj.init_page_table(
      ...     num_pages=8, page_size=4, max_slots=2, pages_per_slot=4
      ... )
      >>> table, _, _ = pj.append(table, jnp.array([5, 2]))
      >>> batch = pj.pack_ragged(table, jnp.array([3, 2]), num_tokens=6)
      >>> batch.positions.tolist(), batch.cu_q_lens.tolist()
      ([2, 3, 4, 0, 1, 0], [0, 3, 5])
      >>> batch.pages.tolist()
      [0, 0, 1, 2, 2, 8]
    """
    slots = table.max_slots
    q_lens = ops.as_int32("q_lens", q_lens, (slots,))
    seq_lens = ops.as_int32(
        "seq_lens", table.seq_lens if seq_lens is None else seq_lens, (slots,)
    )
    num_tokens = ops.as_size("num_tokens", num_tokens)
    ops.check_each(
        (q_lens >= 0) & (q_lens <= seq_lens),
        "pack_ragged: slot {i} does not hold its q_len of {v}",
        q_lens,
    )
    # A caller's bug in one slot must not shift the tokens of the others.
    q_lens = jnp.clip(q_lens, 0, seq_lens)
    ends = jnp.cumsum(q_lens)
    ops.check_each(
        seq_lens <= table.seq_lens,
        "pack_ragged: slot {i} does not hold its seq_len of {v}",
        seq_lens,
    )
    ops.check_each(
        ends <= num_tokens,
        f"pack_ragged: up to slot {{i}} there are {{v}} tokens, over {num_tokens}",
        ends,
    )
    # Nor may too many tokens: what has no place is left out of its own slot.
    cut = jnp.clip(ends - num_tokens, 0, q_lens)
    q_lens, seq_lens, ends = q_lens - cut, seq_lens - cut, jnp.minimum(ends, num_tokens)
    cu_q_lens = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends])
    # A step up at the start of each slot but the first; several where slots are
    # empty. The running sum is the slot of each token.
    steps = jnp.zeros((num_tokens,), jnp.int32).at[ends[:-1]].add(1, mode="drop")
    slot = jnp.cumsum(steps)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    real = token < ends[-1]
    position = seq_lens[slot] - (cu_q_lens[slot + 1] - token)
    pages, offsets = translate(table, jnp.where(real, slot, slots), position)
    return RaggedBatch(
        page_indices=jnp.copy(table.page_indices),
        seq_lens=jnp.where(q_lens > 0, seq_lens, 0),
        positions=jnp.where(real, position, 0),
        pages=pages,
        offsets=jnp.where(real, offsets, 0),
        cu_q_lens=cu_q_lens,
    )


def pack_decode(table: PageTable, active: jax.Array) -> RaggedBatch:
    """Lays out the last token of each active slot: one decode step.

    Args:
      table: the table, in which the tokens already have room (`append`).
      active: bool[S]; slots that take part.

    Returns:
      The batch, `T` = `S`.

    Example:
      >>> import jax.numpy as jnp, pagedjax as pj
      >>> table = pj.init_page_table(
      ...     num_pages=8, page_size=4, max_slots=2, pages_per_slot=4
      ... )
      >>> table, _, _ = pj.append(table, jnp.array([5, 2]))
      >>> batch = pj.pack_decode(table, jnp.array([True, False]))
      >>> batch.positions.tolist(), batch.pages.tolist()
      ([4, 0], [1, 8])
    """
    active = jnp.asarray(active)
    if active.dtype != bool or active.shape != (table.max_slots,):
        raise ValueError(
            f"active must be bool[{table.max_slots}], got {active.dtype}{active.shape}"
        )
    slots = jnp.arange(table.max_slots, dtype=jnp.int32)
    seq_lens = jnp.where(active, table.seq_lens, 0)
    pages, offsets = translate(table, slots, seq_lens - 1)
    real = seq_lens > 0
    return RaggedBatch(
        page_indices=jnp.copy(table.page_indices),
        seq_lens=seq_lens,
        positions=jnp.where(real, seq_lens - 1, 0),
        pages=pages,
        offsets=jnp.where(real, offsets, 0),
    )


def attend(
    pool: KVPool,
    layer: int | jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    batch: RaggedBatch,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    implementation: str | None = None,
) -> tuple[KVPool, jax.Array]:
    """Stores this step's keys and values in one layer, then attends to all.

    What every attention layer does, in the one order that keeps the pool in place.

    Args:
      pool: the pool; donate it.
      layer: which layer; may be traced, as in a scan over layers.
      q: [T, H, D]; queries.
      k: [T, K, D]; keys of the same tokens.
      v: [T, K, D]; values.
      batch: where they go and what they see.
      scale: factor of the scores, as in `paged_attention`; so are the others.
      window: see there.
      soft_cap: see there.
      implementation: see there.

    Returns:
      `(pool, out)`; out is [T, H, D] in q's dtype, zeros on padding.

    Example:
      >>> import jax.numpy as jnp, pagedjax as pj
      >>> table = pj.init_page_table(
      ...     num_pages=8, page_size=4, max_slots=1, pages_per_slot=4
      ... )
      >>> pool = pj.init_kv_pool(
      ...     num_layers=1, num_pages=8, page_size=4, num_kv_heads=1, head_dim=8
      ... )
      >>> table, _, _ = pj.append(table, jnp.array([3]))
      >>> batch = pj.pack_ragged(table, jnp.array([3]), num_tokens=3)
      >>> qkv = jnp.ones((3, 1, 8))
      >>> pool, out = pj.attend(pool, 0, qkv, qkv, qkv, batch)
      >>> out.shape
      (3, 1, 8)
    """
    pool = write_kv(pool, layer, k, v, batch.pages, batch.offsets)
    page_indices = layer_rows(pool, batch.page_indices, layer)
    pages = (pool.k_pages, pool.v_pages, page_indices, batch.seq_lens)
    options: dict[str, Any] = dict(
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        k_scales=pool.k_scales,
        v_scales=pool.v_scales,
        implementation=implementation,
    )
    if batch.cu_q_lens is None:
        out = paged_attention(q, *pages, **options)
    else:
        out = ragged_paged_attention(q, *pages, batch.cu_q_lens, **options)
    return pool, cast(jax.Array, out)
