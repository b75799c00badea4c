"""The steps of generation: what `generate` jits.

In call order: `start` (prompts to first tokens), `proceed` (decode steps until all
are done). The state between them is one pytree.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pagedjax import _page_ops as ops
from pagedjax._capacity import num_used_pages
from pagedjax._kv_pool import KVPool, copy_pages, init_kv_pool
from pagedjax._page_table import PageTable, append, fork, free, init_page_table
from pagedjax._ragged import pack_decode, pack_ragged
from pagedjax._sampling import Sampling, sample, token_logprobs


class Status(enum.IntEnum):
    """How a sample ended; the values of `Generation.status`."""

    RUNNING = 0  # not ended yet
    STOP = 1  # produced an end token, which is its last
    LENGTH = 2  # reached max_new_tokens or the model's context
    OUT_OF_PAGES = 3  # the pool was full; the tokens so far are right
    EMPTY = 4  # there was no prompt: the row is padding


@dataclasses.dataclass(frozen=True)
class PagedModel:
    """What generation needs to know of a model. Hashable: a static argument.

    Attributes:
      apply: `(params, pool, tokens[T], batch, rows) -> (pool, logits[R, V])`, where
        `rows` is int32[R], the tokens whose logits are wanted, or None for all.
        Equal models must compare equal, or each call compiles anew; `functional`
        in `pagedjax.nnx` and `pagedjax.linen` makes one.
      num_layers: layers with a KV cache.
      num_kv_heads: key-value heads of each.
      head_dim: their width.
      vocab_size: logits per token.
      max_seq_len: the longest sequence the model can take; None = no limit.
      kv_dtype: name of the dtype of the cache.
    """

    apply: Callable[..., tuple[KVPool, jax.Array]]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_seq_len: int | None = None
    kv_dtype: str = "float32"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PageStats:
    """What the pages did. The snapshots are of the last step with most pages used.

    Attributes:
      pages_used: int32[]; most pages that had an owner at one time.
      pages_mapped: int32[]; pages that the same sequences would take unshared.
      pages_shared: int32[]; pages that had several owners.
      tokens_held: float32[]; tokens in the used pages, a shared one once.
      pages_copied: int32[]; copy-on-write copies, in total.
      num_steps: int32[]; decode steps, in total.
    """

    pages_used: jax.Array
    pages_mapped: jax.Array
    pages_shared: jax.Array
    tokens_held: jax.Array
    pages_copied: jax.Array
    num_steps: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GenerationState:
    """A generation under way; donate it. `R` = prompts * samples, a slot each.

    Attributes:
      table: the page table; sample `j` of prompt `b` is slot `b * num_samples + j`.
      pool: keys and values.
      tokens: int32[R, max_new_tokens]; what was produced.
      logprobs: float32[R, max_new_tokens]; their log-probabilities.
      lengths: int32[R]; how many of them there are.
      limits: int32[R]; how many there may be.
      status: int32[R]; see `Status`.
      keys: key[R]; random key of each sample.
      eos_ids: int32[E]; the end tokens.
      sampling: how tokens are chosen.
      stats: page statistics.
      num_samples: samples of each prompt (static).
    """

    table: PageTable
    pool: KVPool
    tokens: jax.Array
    logprobs: jax.Array
    lengths: jax.Array
    limits: jax.Array
    status: jax.Array
    keys: jax.Array
    eos_ids: jax.Array
    sampling: Sampling
    stats: PageStats
    num_samples: int = dataclasses.field(metadata={"static": True})


def start(
    params: Any,
    sampling: Sampling,
    prompts: jax.Array,
    prompt_lens: jax.Array,
    key: jax.Array,
    seeds: jax.Array,
    eos_ids: jax.Array,
    *,
    model: PagedModel,
    max_new_tokens: int,
    num_samples: int,
    page_size: int,
    num_pages: int,
    pages_per_slot: int,
    chunk_size: int,
) -> GenerationState:
    batch = prompts.shape[0]
    rows = batch * num_samples
    slots = jnp.arange(rows, dtype=jnp.int32)
    first = slots[::num_samples]  # the slot each prompt is prefilled in
    table = init_page_table(
        num_pages=num_pages,
        page_size=page_size,
        max_slots=rows,
        pages_per_slot=pages_per_slot,
    )
    pool = init_kv_pool(
        num_layers=model.num_layers,
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=model.kv_dtype,
    )
    wanted = jnp.zeros((rows,), jnp.int32).at[first].set(prompt_lens)
    table, _, ok = append(table, wanted, max_tokens=prompts.shape[1])
    held = table.seq_lens[first]
    pool, logits = _prefill(
        model, params, pool, table, prompts, held, first, chunk_size
    )
    if num_samples > 1:
        others = jnp.asarray(np.flatnonzero(np.arange(rows) % num_samples), jnp.int32)
        table = fork(table, others - others % num_samples, others)

    limit = ops.INT32_MAX if model.max_seq_len is None else model.max_seq_len
    limits = jnp.minimum(max_new_tokens, limit - prompt_lens)
    status = jnp.where(prompt_lens == 0, Status.EMPTY, Status.RUNNING)
    status = jnp.where(ok[first], status, Status.OUT_OF_PAGES)
    # A prompt that fills the context to the last token leaves room for none.
    full = (status == Status.RUNNING) & (limits <= 0)
    status = jnp.where(full, Status.LENGTH, status)

    def per_sample(values: jax.Array) -> jax.Array:
        return jnp.repeat(values, num_samples, axis=0, total_repeat_length=rows)

    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, per_sample(seeds))
    keys = jax.vmap(jax.random.fold_in)(keys, slots % num_samples)
    state = GenerationState(
        table=table,
        pool=pool,
        tokens=jnp.zeros((rows, max_new_tokens), jnp.int32),
        logprobs=jnp.zeros((rows, max_new_tokens), jnp.float32),
        lengths=jnp.zeros((rows,), jnp.int32),
        limits=per_sample(limits),
        status=per_sample(status.astype(jnp.int32)),
        keys=keys,
        eos_ids=eos_ids,
        sampling=sampling,
        stats=_observe(_no_stats(), table),
        num_samples=num_samples,
    )
    return _record(state, per_sample(logits))


def _prefill(
    model: PagedModel,
    params: Any,
    pool: KVPool,
    table: PageTable,
    prompts: jax.Array,
    held: jax.Array,
    first: jax.Array,
    chunk_size: int,
) -> tuple[KVPool, jax.Array]:
    """Runs the prompts through the model, `chunk_size` tokens at a time.

    The prompts lie end to end and are cut without regard to where one ends, so no
    chunk but the last has padding.

    Returns:
      `(pool, logits)`; logits after the last token of each prompt, float32[B, V].
    """
    batch, length = prompts.shape
    ends = jnp.cumsum(held)
    starts = ends - held
    positions = jnp.arange(length, dtype=jnp.int32)[None, :]
    room = batch * length + chunk_size
    places = jnp.where(positions < held[:, None], starts[:, None] + positions, room)
    packed = jnp.zeros((room,), jnp.int32).at[places].set(prompts, mode="drop")
    no_tokens = jnp.zeros((table.max_slots,), jnp.int32)

    def run_chunk(i: jax.Array, carry: tuple[KVPool, jax.Array]) -> Any:
        pool, logits = carry
        low, high = i * chunk_size, (i + 1) * chunk_size
        done = jnp.clip(high - starts, 0, held)  # of each prompt, after this chunk
        count = done - jnp.clip(low - starts, 0, held)
        ragged = pack_ragged(
            table,
            no_tokens.at[first].set(count),
            num_tokens=chunk_size,
            seq_lens=no_tokens.at[first].set(done),
        )
        tokens = lax.dynamic_slice(packed, (low,), (chunk_size,))
        rows = ragged.last_rows[first]
        pool, latest = model.apply(params, pool, tokens, ragged, rows)
        ends_here = (count > 0) & (done == held)
        latest = latest.astype(jnp.float32)
        return pool, jnp.where(ends_here[:, None], latest, logits)

    logits = jnp.zeros((batch, model.vocab_size), jnp.float32)
    num_chunks = -(-ends[-1] // chunk_size)
    return lax.fori_loop(0, num_chunks, run_chunk, (pool, logits))


def proceed(
    params: Any, state: GenerationState, num_steps: jax.Array, *, model: PagedModel
) -> GenerationState:
    done = state.stats.num_steps
    last = done + jnp.minimum(num_steps, ops.INT32_MAX - done)  # must not overflow

    def unfinished(state: GenerationState) -> jax.Array:
        running = jnp.any(state.status == Status.RUNNING)
        return running & (state.stats.num_steps < last)

    return lax.while_loop(
        unfinished, functools.partial(_decode_step, model, params), state
    )


def _decode_step(
    model: PagedModel, params: Any, state: GenerationState
) -> GenerationState:
    """Feeds each running sample its latest token and chooses the next."""
    running = state.status == Status.RUNNING
    table, plan, ok = append(state.table, running.astype(jnp.int32), max_tokens=1)
    status = jnp.where(running & ~ok, Status.OUT_OF_PAGES, state.status)
    pool = copy_pages(state.pool, plan)
    batch = pack_decode(table, running & ok)
    latest = jnp.maximum(state.lengths - 1, 0)[:, None]
    tokens = jnp.take_along_axis(state.tokens, latest, axis=1)[:, 0]
    pool, logits = model.apply(params, pool, tokens, batch, None)
    copied = jnp.sum((plan.dst_pages < table.num_pages).astype(jnp.int32))
    stats = _observe(state.stats, table)
    stats = dataclasses.replace(
        stats,
        pages_copied=stats.pages_copied + copied,
        num_steps=stats.num_steps + 1,
    )
    state = dataclasses.replace(
        state, table=table, pool=pool, status=status.astype(jnp.int32), stats=stats
    )
    return _record(state, logits)


def _record(state: GenerationState, logits: jax.Array) -> GenerationState:
    """Chooses a token for each running sample; ends and frees those that are done."""
    rows, width = state.tokens.shape
    running = state.status == Status.RUNNING
    keys = jax.vmap(jax.random.fold_in)(state.keys, state.lengths)
    chosen = sample(logits, keys, state.sampling)
    row = jnp.arange(rows, dtype=jnp.int32)
    place = jnp.where(running, state.lengths, width)
    lengths = state.lengths + running.astype(jnp.int32)
    is_end = jnp.any(chosen[:, None] == state.eos_ids[None, :], axis=-1)
    status = jnp.where(running & (lengths >= state.limits), Status.LENGTH, state.status)
    status = jnp.where(running & is_end, Status.STOP, status).astype(jnp.int32)
    return dataclasses.replace(
        state,
        table=free(state.table, status != Status.RUNNING),
        tokens=state.tokens.at[row, place].set(chosen, mode="drop"),
        logprobs=state.logprobs.at[row, place].set(
            token_logprobs(logits, chosen), mode="drop"
        ),
        lengths=lengths,
        status=status,
    )


def _observe(stats: PageStats, table: PageTable) -> PageStats:
    """Takes the snapshots anew if no fewer pages are used than ever before."""
    starts = jnp.arange(table.pages_per_slot, dtype=jnp.int32) * table.page_size
    held = jnp.clip(
        table.seq_lens[:, None] - starts[None, :], 0, table.page_size
    ).astype(jnp.float32)
    owners = table.refcounts.at[table.page_indices].get(mode="fill", fill_value=1)
    # A page with r owners is met r times: each counts for 1 / r of it.
    part = 1.0 / jnp.maximum(owners, 1).astype(jnp.float32)
    used = num_used_pages(table)
    seen = PageStats(
        pages_used=used,
        pages_mapped=jnp.sum(ops.num_pages_of(table.seq_lens, table.page_size)),
        pages_shared=jnp.sum(jnp.where(owners > 1, part, 0.0))
        .round()
        .astype(jnp.int32),
        tokens_held=jnp.sum(held * part),
        pages_copied=stats.pages_copied,
        num_steps=stats.num_steps,
    )
    more = used >= stats.pages_used
    return jax.tree.map(lambda new, old: jnp.where(more, new, old), seen, stats)


def _no_stats() -> PageStats:
    zero = jnp.zeros((), jnp.int32)
    return PageStats(zero, zero, zero, jnp.zeros((), jnp.float32), zero, zero)
