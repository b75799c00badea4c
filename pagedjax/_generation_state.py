"""A generation under way, and what every kind of step does to it."""

import dataclasses
import enum

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax import _page_ops as ops
from pagedjax._beam import Beams
from pagedjax._capacity import num_used_pages
from pagedjax._kv_pool import KVPool
from pagedjax._page_table import CopyPlan, PageTable
from pagedjax._sampling import Sampling
from pagedjax._speculative import Drafts, remember


class Status(enum.IntEnum):
    """How a sample ended; the values of `Generation.status`."""

    RUNNING = 0  # not ended yet
    STOP = 1  # produced an end token, which is its last
    LENGTH = 2  # reached max_new_tokens or the model's context
    OUT_OF_PAGES = 3  # the pool was full; the tokens so far are right
    EMPTY = 4  # there was no prompt: the row is padding
    UNSERVABLE = 5  # `rollout`: would not fit the pool even alone


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

    With beam search it is `R` = prompts * beams, and the rows hold the beams.

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
      beams: the beam searches, if that is what it is.
      drafts: what speculative decoding needs besides, if that is what it is.
      num_samples: samples to give of each prompt (static).
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
    beams: Beams | None
    drafts: Drafts | None
    num_samples: int = dataclasses.field(metadata={"static": True})


def produce(
    state: GenerationState, chosen: jax.Array, logprobs: jax.Array, counts: jax.Array
) -> GenerationState:
    """Adds up to so many of the chosen tokens [R, C] to each row, and ends rows.

    No more than the first end token; `counts` keeps to the limits.
    """
    rows, width = state.tokens.shape
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    nth = jnp.arange(chosen.shape[1], dtype=jnp.int32)[None, :]
    is_end = jnp.any(chosen[:, :, None] == state.eos_ids[None, None, :], axis=-1)
    is_end &= nth < counts[:, None]
    ends = jnp.any(is_end, axis=1)
    counts = jnp.where(ends, jnp.argmax(is_end, axis=1) + 1, counts)
    place = jnp.where(nth < counts[:, None], state.lengths[:, None] + nth, width)
    lengths = state.lengths + counts
    is_full = (counts > 0) & (lengths >= state.limits)
    status = jnp.where(is_full, Status.LENGTH, state.status)
    status = jnp.where(ends, Status.STOP, status).astype(jnp.int32)
    drafts = state.drafts
    if drafts is not None:
        drafts = remember(drafts, state.lengths, chosen, counts)
    return dataclasses.replace(
        state,
        drafts=drafts,
        tokens=state.tokens.at[row, place].set(chosen, mode="drop"),
        logprobs=state.logprobs.at[row, place].set(logprobs, mode="drop"),
        lengths=lengths,
        status=status,
    )


def observe(stats: PageStats, table: PageTable) -> PageStats:
    """Takes the snapshots anew if no fewer pages are used than ever before.

    Owners are counted from the cells. To read the refcounts between the verbs of a
    loop makes XLA keep a copy of all of them, a cost that grows with `num_pages`.
    """
    starts = jnp.arange(table.pages_per_slot, dtype=jnp.int32) * table.page_size
    held = jnp.clip(table.seq_lens[:, None] - starts[None, :], 0, table.page_size)
    # Owners of a page side by side, the one that holds most of its tokens last.
    pages, held = lax.sort((table.page_indices.ravel(), held.ravel()), num_keys=2)
    steps = pages[1:] != pages[:-1]
    is_first, is_last = jnp.append(True, steps), jnp.append(steps, True)
    is_last &= pages < table.num_pages
    used = num_used_pages(table)
    seen = PageStats(
        pages_used=used,
        pages_mapped=jnp.sum(ops.num_pages_of(table.seq_lens, table.page_size)),
        pages_shared=jnp.sum((is_last & ~is_first).astype(jnp.int32)),
        tokens_held=jnp.sum(jnp.where(is_last, held, 0)).astype(jnp.float32),
        pages_copied=stats.pages_copied,
        num_steps=stats.num_steps,
    )
    more = used >= stats.pages_used
    return jax.tree.map(lambda new, old: jnp.where(more, new, old), seen, stats)


def count_step(stats: PageStats, plan: CopyPlan) -> PageStats:
    copies = plan.dst_pages != plan.src_pages  # both NULL where there is none
    return dataclasses.replace(
        stats,
        pages_copied=stats.pages_copied + jnp.sum(copies.astype(jnp.int32)),
        num_steps=stats.num_steps + 1,
    )


def no_stats() -> PageStats:
    zero = jnp.zeros((), jnp.int32)
    return PageStats(zero, zero, zero, jnp.zeros((), jnp.float32), zero, zero)
