"""What a rollout knows: its requests, its rows, and what it has measured.

A request is one sample of one prompt: number `b * num_samples + j`. It waits, or
lives in a row (slot) of the page table, or has ended. What it has produced is stored
by request, so that a row can be taken from it and given back.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pagedjax import _page_ops as ops
from pagedjax._generation_state import Status
from pagedjax._kv_pool import KVPool
from pagedjax._page_table import PageTable
from pagedjax._prefix_index import PrefixIndex
from pagedjax._sampling import Sampling

TRACE_LENGTH = 256  # entries of each curve; even


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Requests:
    """What is asked for; constant while a rollout runs. `R` = `B` * samples.

    Attributes:
      prompts: int32[B, L]; token ids, padded on the right.
      prompt_lens: int32[B]; tokens of each.
      limits: int32[B]; tokens to produce for each sample, at most.
      keys: key[R]; random key of each request.
      eos_ids: int32[E]; the end tokens.
      sampling: how tokens are chosen.
      reserve: bool[]; admit only what fits to its end.
      ranks: int32[R]; the place of each request in the queue, a permutation.
      num_samples: samples of each prompt (static).
    """

    prompts: jax.Array
    prompt_lens: jax.Array
    limits: jax.Array
    keys: jax.Array
    eos_ids: jax.Array
    sampling: Sampling
    reserve: jax.Array
    ranks: jax.Array
    num_samples: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RolloutStats:
    """What a rollout did.

    A step is one forward pass of the model. The curves have `K` entries; entry `i` is
    the mean over steps `i * stride .. (i + 1) * stride - 1`, 0 past the last step.

    Attributes:
      num_steps: int32[]; forward passes, in total.
      num_mixed_steps: int32[]; those that fed prompts too, and not only one token
        per row.
      num_preemptions: int32[]; rows taken back before they had ended.
      tokens_fed: int32[]; tokens of prompts, and of what preempted samples had
        produced, that went through the model.
      tokens_forked: int32[]; prompt tokens shared with a live sample instead.
      tokens_found: int32[]; prompt tokens found in the prefix index instead.
      pages_used: int32[]; most pages that had an owner at one time.
      pages_copied: int32[]; copy-on-write copies.
      admitted_at: int32[B, n]; steps done when the sample last got a row, -1 = never.
      ended_at: int32[B, n]; steps done when it had ended, -1 = never ran.
      preemptions: int32[B, n]; how often its row was taken back.
      live_slots: float32[K]; curve of the rows in use.
      used_pages: float32[K]; curve of the pages that have an owner.
      kv_share: float32[K]; curve of the share of token places in these pages that
        hold a token; a page that only the index owns counts as full.
      stride: int32[]; steps per entry of the curves, a power of two.
    """

    num_steps: jax.Array
    num_mixed_steps: jax.Array
    num_preemptions: jax.Array
    tokens_fed: jax.Array
    tokens_forked: jax.Array
    tokens_found: jax.Array
    pages_used: jax.Array
    pages_copied: jax.Array
    admitted_at: jax.Array
    ended_at: jax.Array
    preemptions: jax.Array
    live_slots: jax.Array
    used_pages: jax.Array
    kv_share: jax.Array
    stride: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RolloutState:
    """A rollout under way. `S` rows, `R` requests.

    Attributes:
      table: the page table.
      pool: keys and values.
      index: the prefix index; None = prefixes are not remembered.
      requests: int32[S]; the request of each row, `R` = the row is empty.
      fed: int32[S]; tokens of each row that are written; the table has room for
        more while a row still feeds.
      order: int32[S]; number of its admission; lower = older.
      waiting: bool[R]; requests to admit, lowest rank first.
      retry: bool[]; something has changed since the last request was turned away.
      tokens: int32[R, M]; what was produced.
      logprobs: float32[R, M]; their log-probabilities.
      lengths: int32[R]; how many of them there are.
      status: int32[R]; see `Status`.
      num_admissions: int32[]; also the next number in `order`.
      stats: what was measured; by request, and sums instead of means, until the end.
    """

    table: PageTable
    pool: KVPool
    index: PrefixIndex | None
    requests: jax.Array
    fed: jax.Array
    order: jax.Array
    waiting: jax.Array
    retry: jax.Array
    tokens: jax.Array
    logprobs: jax.Array
    lengths: jax.Array
    status: jax.Array
    num_admissions: jax.Array
    stats: RolloutStats

    @property
    def live(self) -> jax.Array:
        """bool[S]; rows that have a request."""
        return self.requests < self.status.shape[0]

    @property
    def feeding(self) -> jax.Array:
        """bool[S]; rows whose tokens so far are not all in the cache."""
        return self.live & (self.fed < self.table.seq_lens)

    @property
    def may_admit(self) -> jax.Array:
        """bool[]; there is a request to try, a row for it, and a reason to try."""
        return self.retry & jnp.any(self.waiting) & ~jnp.all(self.live)


def init_rollout_state(
    table: PageTable, pool: KVPool, index: PrefixIndex | None, status: jax.Array, m: int
) -> RolloutState:
    """Starts with every running request waiting; `m` tokens at most for each."""
    slots, requests = table.max_slots, status.shape[0]
    return RolloutState(
        table=table,
        pool=pool,
        index=index,
        requests=jnp.full((slots,), requests, jnp.int32),
        fed=jnp.zeros((slots,), jnp.int32),
        order=jnp.full((slots,), -1, jnp.int32),
        waiting=status == Status.RUNNING,
        retry=jnp.asarray(True),
        tokens=jnp.zeros((requests, m), jnp.int32),
        logprobs=jnp.zeros((requests, m), jnp.float32),
        lengths=jnp.zeros((requests,), jnp.int32),
        status=status,
        num_admissions=jnp.zeros((), jnp.int32),
        stats=_no_stats(requests),
    )


def count_step(state: RolloutState, *, mixed: bool) -> RolloutState:
    """Enters one forward pass into the counts and the curves.

    When the curves are full, neighbours are added up and the stride doubles, so
    that they always span the whole run.
    """
    stats, table = state.stats, state.table
    used = table.num_pages - table.num_free
    # Only a live row's last page, and what it has yet to feed, is not full: no two
    # rows share a page that is.
    room = ops.num_pages_of(table.seq_lens, table.page_size) * table.page_size
    empty = jnp.sum(jnp.where(state.live, room - state.fed, 0)).astype(jnp.float32)
    places = jnp.maximum(used * table.page_size, 1).astype(jnp.float32)
    values = (
        jnp.sum(state.live.astype(jnp.float32)),
        used.astype(jnp.float32),
        1.0 - empty / places,
    )
    is_full = stats.num_steps >= TRACE_LENGTH * stats.stride
    stride = jnp.where(is_full, 2 * stats.stride, stats.stride)
    entry = stats.num_steps // stride

    def enter(curve: jax.Array, value: jax.Array) -> jax.Array:
        halves = curve.reshape(-1, 2).sum(axis=1)
        folded = jnp.concatenate([halves, jnp.zeros_like(halves)])
        return jnp.where(is_full, folded, curve).at[entry].add(value)

    curves = (stats.live_slots, stats.used_pages, stats.kv_share)
    live_slots, used_pages, kv_share = map(enter, curves, values)
    stats = dataclasses.replace(
        stats,
        num_steps=stats.num_steps + 1,
        num_mixed_steps=stats.num_mixed_steps + int(mixed),
        pages_used=jnp.maximum(stats.pages_used, used),
        live_slots=live_slots,
        used_pages=used_pages,
        kv_share=kv_share,
        stride=stride,
    )
    return dataclasses.replace(state, stats=stats)


def finish_stats(stats: RolloutStats, num_samples: int) -> RolloutStats:
    """Turns the sums of the curves into means, and lays requests out by prompt."""
    start = jnp.arange(TRACE_LENGTH, dtype=jnp.int32) * stats.stride
    steps = jnp.clip(stats.num_steps - start, 1, stats.stride).astype(jnp.float32)

    def by_prompt(values: jax.Array) -> jax.Array:
        return values.reshape(-1, num_samples)

    return dataclasses.replace(
        stats,
        admitted_at=by_prompt(stats.admitted_at),
        ended_at=by_prompt(stats.ended_at),
        preemptions=by_prompt(stats.preemptions),
        live_slots=stats.live_slots / steps,
        used_pages=stats.used_pages / steps,
        kv_share=stats.kv_share / steps,
    )


def _no_stats(requests: int) -> RolloutStats:
    def zero() -> jax.Array:
        return jnp.zeros((), jnp.int32)

    def never() -> jax.Array:
        return jnp.full((requests,), -1, jnp.int32)

    def curve() -> jax.Array:
        return jnp.zeros((TRACE_LENGTH,), jnp.float32)

    return RolloutStats(
        num_steps=zero(),
        num_mixed_steps=zero(),
        num_preemptions=zero(),
        tokens_fed=zero(),
        tokens_forked=zero(),
        tokens_found=zero(),
        pages_used=zero(),
        pages_copied=zero(),
        admitted_at=never(),
        ended_at=never(),
        preemptions=jnp.zeros((requests,), jnp.int32),
        live_slots=curve(),
        used_pages=curve(),
        kv_share=curve(),
        stride=jnp.ones((), jnp.int32),
    )
