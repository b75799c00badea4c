"""Who gets a row and pages of a rollout, and who has to give them back.

`admit_next` looks at the head of the queue: the waiting request of the lowest rank.
First come, first served: one that is turned away is tried again when a row has ended
or has all its tokens in the cache, and nobody passes it. It shares what it can::

    the prompt's other samples   fork a live one at prompt_len - 1 tokens
    other prompts, equal starts  attach the pages that the prefix index finds

and takes the pages for all that it has to feed at once. A row never shares pages
that are not written yet: while a row that is still feeding will have more to share
than there is now, the head waits for it.

`make_room` finds a page for each row that needs one to go on: first from prefixes
that nobody uses, then by preempting the row admitted last. The oldest row can
always go on, so every request ends.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax import _page_ops as ops
from pagedjax._kv_pool import copy_pages
from pagedjax._page_table import PageTable, append, attach, fork, free
from pagedjax._prefix_index import (
    PrefixIndex,
    count_evictable,
    evict_prefixes,
    lookup_prefix,
)
from pagedjax._rollout_state import Requests, RolloutState


def admit_all(work: Requests, state: RolloutState) -> RolloutState:
    """Admits requests until there is none, no row, or one does not fit."""
    return lax.while_loop(
        lambda state: state.may_admit, lambda state: admit_next(work, state), state
    )


def admit_next(work: Requests, state: RolloutState) -> RolloutState:
    """Gives the head of the queue a row, or leaves all as it was."""
    size, slots = state.table.page_size, state.table.max_slots
    n = work.num_samples
    last = state.waiting.shape[0]  # behind any that waits
    ranks = jnp.where(state.waiting, work.ranks, last)
    request = jnp.argmin(ranks).astype(jnp.int32)
    slot = jnp.argmin(state.live).astype(jnp.int32)
    prompt = request // n
    tokens, prompt_len = work.prompts[prompt], work.prompt_lens[prompt]
    total = prompt_len + state.lengths[request]

    # What there is to share: all but the prompt's last token, or full pages of it.
    feeding = state.feeding
    settled = state.live & ~feeding
    is_sibling = state.requests // n == prompt
    source = jnp.argmax(settled & is_sibling).astype(jnp.int32)
    forks = jnp.any(settled & is_sibling)
    num_found = jnp.zeros_like(prompt_len)
    index, table = state.index, state.table
    pages = jnp.full((table.pages_per_slot,), table.num_pages, jnp.int32)
    if index is not None:
        index, pages, num_found = lookup_prefix(index, table, tokens, prompt_len)
    shared = jnp.where(forks, prompt_len - 1, num_found)
    coming = jnp.where(is_sibling, prompt_len - 1, 0)
    if index is not None:
        alike = _common_prefix(work, state.requests // n, prompt)
        alike = jnp.minimum(alike, prompt_len - 1) // size * size
        coming = jnp.maximum(coming, alike)
    blocked = jnp.any(feeding & (coming > shared))

    # Share first: what is shared can no longer be evicted.
    forks &= ~blocked
    attaches = ~blocked & ~forks
    table = attach(table, slot, pages, jnp.where(attaches, num_found, 0))
    table = fork(
        table,
        jnp.where(forks, source, slots)[None],
        jnp.where(forks, slot, slots)[None],
        (prompt_len - 1)[None],
    )
    need = ops.num_pages_of(total, size) - shared // size
    spare = _pages_to_keep(work, state, prompt, total)
    ok = ~blocked & (need + spare <= _available(index, table))
    index, table = _evict(index, table, jnp.where(ok, need - table.num_free, 0))
    is_new = (jnp.arange(slots, dtype=jnp.int32) == slot) & ok
    table, plan, _ = append(table, jnp.where(is_new, total - shared, 0))
    turned_away = (jnp.arange(slots, dtype=jnp.int32) == slot) & ~ok
    copied = jnp.sum((plan.dst_pages < table.num_pages).astype(jnp.int32))
    once = ok.astype(jnp.int32)
    stats = state.stats
    stats = dataclasses.replace(
        stats,
        tokens_forked=stats.tokens_forked + once * jnp.where(forks, shared, 0),
        tokens_found=stats.tokens_found + once * jnp.where(forks, 0, shared),
        pages_copied=stats.pages_copied + copied,
        admitted_at=stats.admitted_at.at[request].set(
            jnp.where(ok, stats.num_steps, stats.admitted_at[request])
        ),
    )
    return dataclasses.replace(
        state,
        table=free(table, turned_away),
        pool=copy_pages(state.pool, plan),
        index=index,
        requests=jnp.where(is_new, request, state.requests),
        fed=jnp.where(is_new, shared, state.fed),
        order=jnp.where(is_new, state.num_admissions, state.order),
        waiting=state.waiting.at[request].set(~ok),
        retry=ok,
        num_admissions=state.num_admissions + once,
        stats=stats,
    )


def make_room(state: RolloutState) -> RolloutState:
    """Makes sure of a page for each settled row that needs one for its next token."""
    slots, size = state.table.max_slots, state.table.page_size
    own = jnp.arange(slots, dtype=jnp.int32)

    def shortage(state: RolloutState) -> jax.Array:
        # No settled row shares its last page: admission has copied it.
        wants = state.live & ~state.feeding & (state.table.seq_lens % size == 0)
        return jnp.sum(wants.astype(jnp.int32)) - state.table.num_free

    def give_way(state: RolloutState) -> RolloutState:
        index, table = _evict(state.index, state.table, shortage(state))
        state = dataclasses.replace(state, index=index, table=table)
        youngest = jnp.argmax(jnp.where(state.live, state.order, -1))
        victim = (own == youngest) & (shortage(state) > 0)
        request = jnp.where(victim, state.requests, state.status.shape[0])
        taken = jnp.any(victim)
        stats = state.stats
        stats = dataclasses.replace(
            stats,
            num_preemptions=stats.num_preemptions + taken.astype(jnp.int32),
            preemptions=stats.preemptions.at[request].add(1, mode="drop"),
        )
        state = dataclasses.replace(
            state,
            waiting=state.waiting.at[request].set(True, mode="drop"),
            # Or it would come back at once, to be taken back again.
            retry=state.retry & ~taken,
            stats=stats,
        )
        return release_rows(state, victim)

    # The pool stays outside: nothing here touches it.
    pool = state.pool
    state = dataclasses.replace(state, pool=None)  # type: ignore[arg-type]
    state = lax.while_loop(lambda state: shortage(state) > 0, give_way, state)
    return dataclasses.replace(state, pool=pool)


def release_rows(state: RolloutState, mask: jax.Array) -> RolloutState:
    """Empties rows."""
    return dataclasses.replace(
        state,
        table=free(state.table, mask),
        requests=jnp.where(mask, state.status.shape[0], state.requests),
        fed=jnp.where(mask, 0, state.fed),
        order=jnp.where(mask, -1, state.order),
    )


def _pages_to_keep(
    work: Requests, state: RolloutState, prompt: jax.Array, total: jax.Array
) -> jax.Array:
    """Counts the pages that an admission must leave for what comes later.

    With `reserve`, all that the rows and the new one can still need; otherwise one
    for each of them that can need any, and none where there is no other row.
    """
    size = state.table.page_size
    prompts = jnp.minimum(state.requests // work.num_samples, work.limits.shape[0] - 1)
    ends = _longest(work, prompts)
    more = ops.num_pages_of(ends, size) - ops.num_pages_of(state.table.seq_lens, size)
    more = jnp.where(state.live, more, 0)
    own = ops.num_pages_of(_longest(work, prompt), size) - ops.num_pages_of(total, size)
    one_each = jnp.sum(jnp.minimum(more, 1)) + jnp.minimum(own, 1)
    one_each = jnp.where(jnp.any(state.live), one_each, 0)
    return jnp.where(work.reserve, jnp.sum(more) + own, one_each)


def _longest(work: Requests, prompts: jax.Array) -> jax.Array:
    """Counts the tokens a sample has in the cache at most: its last is not fed."""
    return work.prompt_lens[prompts] + work.limits[prompts] - 1


def _common_prefix(work: Requests, prompts: jax.Array, prompt: jax.Array) -> jax.Array:
    """Counts the tokens in which each of some prompts and another start alike."""
    prompts = jnp.minimum(prompts, work.prompt_lens.shape[0] - 1)
    both = jnp.minimum(work.prompt_lens[prompts], work.prompt_lens[prompt])
    place = jnp.arange(work.prompts.shape[1], dtype=jnp.int32)[None, :]
    equal = work.prompts[prompts] == work.prompts[prompt][None, :]
    alike = lax.cummin((equal & (place < both[:, None])).astype(jnp.int32), axis=1)
    return jnp.sum(alike, axis=1)


def _available(index: PrefixIndex | None, table: PageTable) -> jax.Array:
    if index is None:
        return table.num_free
    return table.num_free + count_evictable(index, table)


def _evict(
    index: PrefixIndex | None, table: PageTable, num_pages: jax.Array
) -> tuple[PrefixIndex | None, PageTable]:
    if index is None:
        return None, table
    return evict_prefixes(index, table, num_pages)
