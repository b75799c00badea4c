"""The program of a rollout: a whole continuous batch in nested loops.

::

    while a request runs:
        while one may be admitted:           admit the head of the queue
        while a row still has to feed:       mixed step: a token of each settled
          and none may be admitted             row, then prompt tokens, oldest first
        while a row lives, none feeds        decode step: a token of each row
          and none may be admitted

Loops that may run no times stand where a conditional would: a `lax.cond` with the
pool in it makes XLA copy the pool. The model is traced twice, once for each kind of
step.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax import _page_ops as ops
from pagedjax._generation_state import Status
from pagedjax._page_table import PageTable, append, init_page_table
from pagedjax._paged_model import PagedModel, init_model_pool
from pagedjax._prefix_index import init_prefix_index, insert_prefix
from pagedjax._ragged import RaggedBatch, pack_decode, pack_ragged
from pagedjax._rollout_admission import admit_all, make_room, release_rows
from pagedjax._rollout_state import (
    Requests,
    RolloutState,
    count_step,
    init_rollout_state,
)
from pagedjax._sampling import Sampling, sample, token_logprobs

Apply = Callable[..., Any]  # a model with its parameters bound


def run_rollout(
    params: Any,
    sampling: Sampling,
    prompts: jax.Array,
    prompt_lens: jax.Array,
    key: jax.Array,
    seeds: jax.Array,
    eos_ids: jax.Array,
    budgets: jax.Array,
    reserve: jax.Array,
    longest_first: jax.Array,
    *,
    model: PagedModel,
    max_new_tokens: int,
    num_samples: int,
    num_slots: int,
    page_size: int,
    num_pages: int,
    pages_per_slot: int,
    chunk_size: int,
    prefix_entries: int,
) -> RolloutState:
    """Runs every request to its end."""
    work = _make_requests(
        sampling,
        prompts,
        prompt_lens,
        key,
        seeds,
        eos_ids,
        budgets,
        reserve,
        longest_first,
        model=model,
        max_new_tokens=max_new_tokens,
        num_samples=num_samples,
    )
    table = init_page_table(
        num_pages=num_pages,
        page_size=page_size,
        max_slots=num_slots,
        pages_per_slot=pages_per_slot,
    )
    pool = init_model_pool(model, num_pages=num_pages, page_size=page_size)
    index = None
    if prefix_entries:
        index = init_prefix_index(num_entries=prefix_entries, page_size=page_size)
    status = _first_status(work, table)
    state = init_rollout_state(table, pool, index, status, max_new_tokens)
    # Under shard_map all of it varies with the prompts, and the pool with the
    # parameters too, which may be split over heads.
    state = ops.vary_together(state, work)
    state = dataclasses.replace(state, pool=ops.vary_together(state.pool, work, params))

    def apply(*args: Any) -> Any:
        return model.apply(params, *args)

    # At least one place is left for a prompt: one row feeds, so fewer decode.
    num_places = max(chunk_size, num_slots)

    def mix(state: RolloutState) -> RolloutState:
        return _mixed_step(apply, work, state, num_places)

    def decode(state: RolloutState) -> RolloutState:
        return _decode_step(apply, work, state)

    def turn(state: RolloutState) -> RolloutState:
        state = admit_all(work, state)
        state = lax.while_loop(_must_feed, mix, state)
        return lax.while_loop(_must_decode, decode, state)

    return lax.while_loop(_is_running, turn, state)


def _is_running(state: RolloutState) -> jax.Array:
    return jnp.any(state.status == Status.RUNNING)


def _must_feed(state: RolloutState) -> jax.Array:
    return jnp.any(state.feeding) & ~state.may_admit


def _must_decode(state: RolloutState) -> jax.Array:
    return jnp.any(state.live) & ~jnp.any(state.feeding) & ~state.may_admit


def _make_requests(
    sampling: Sampling,
    prompts: jax.Array,
    prompt_lens: jax.Array,
    key: jax.Array,
    seeds: jax.Array,
    eos_ids: jax.Array,
    budgets: jax.Array,
    reserve: jax.Array,
    longest_first: jax.Array,
    *,
    model: PagedModel,
    max_new_tokens: int,
    num_samples: int,
) -> Requests:
    limits = jnp.clip(budgets, 0, max_new_tokens)
    if model.max_seq_len is not None:
        limits = jnp.clip(limits, 0, jnp.maximum(model.max_seq_len - prompt_lens, 0))
    # As in `generate`: the prompt's seed, then the sample, then (later) the place.
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, seeds)
    samples = jnp.arange(num_samples, dtype=jnp.int32)
    keys = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(keys, samples)
    return Requests(
        prompts=prompts,
        prompt_lens=prompt_lens,
        limits=limits,
        keys=keys.reshape(-1),
        eos_ids=eos_ids,
        sampling=sampling,
        reserve=reserve,
        ranks=_ranks_of(jnp.where(longest_first, -limits, 0), num_samples),
        num_samples=num_samples,
    )


def _ranks_of(sizes: jax.Array, num_samples: int) -> jax.Array:
    """Ranks requests by their prompts' sizes, int32[R]; equal ones in their order."""
    order = jnp.argsort(sizes, stable=True)
    places = jnp.arange(sizes.shape[0], dtype=jnp.int32)
    ranks = jnp.zeros_like(places).at[order].set(places)
    samples = jnp.arange(num_samples, dtype=jnp.int32)
    return (ranks[:, None] * num_samples + samples[None, :]).ravel()


def _first_status(work: Requests, table: PageTable) -> jax.Array:
    """Tells which requests there is something to do for, int32[R]."""
    longest = work.prompt_lens + work.limits - 1
    status = jnp.full_like(work.limits, Status.RUNNING)
    too_long = ops.num_pages_of(longest, table.page_size) > table.num_free
    status = jnp.where(too_long, Status.UNSERVABLE, status)
    status = jnp.where(work.limits == 0, Status.LENGTH, status)
    status = jnp.where(work.prompt_lens == 0, Status.EMPTY, status)
    n = work.num_samples
    return jnp.repeat(status, n, total_repeat_length=n * status.shape[0])


def _mixed_step(
    apply: Apply, work: Requests, state: RolloutState, num_places: int
) -> RolloutState:
    """Feeds each settled row its latest token, and the others what fits, in order."""
    state = make_room(state)
    feeding = state.feeding
    settled = state.live & ~feeding
    table, _, ok = append(state.table, settled.astype(jnp.int32), max_tokens=1)
    settled &= ok
    left = jnp.where(feeding, table.seq_lens - state.fed, 0)
    older = state.order[None, :] < state.order[:, None]
    before = jnp.sum(jnp.where(older, left[None, :], 0), axis=1)
    budget = num_places - jnp.sum(settled.astype(jnp.int32))
    count = jnp.clip(budget - before, 0, left)
    q_lens = jnp.where(settled, 1, count)
    fed = state.fed + q_lens
    batch = pack_ragged(table, q_lens, num_tokens=num_places, seq_lens=fed)
    tokens = _tokens_of(work, state, batch, num_places)
    pool, logits = apply(state.pool, tokens, batch, batch.last_rows)
    stats = state.stats
    stats = dataclasses.replace(stats, tokens_fed=stats.tokens_fed + jnp.sum(count))
    state = dataclasses.replace(state, table=table, pool=pool, fed=fed, stats=stats)
    done = feeding & ~state.feeding
    state = count_step(_remember_prompts(work, state, done), mixed=True)
    state = dataclasses.replace(state, retry=state.retry | jnp.any(done))
    return _record(work, state, logits, settled | done)


def _decode_step(apply: Apply, work: Requests, state: RolloutState) -> RolloutState:
    """Feeds each row its latest token."""
    state = make_room(state)
    table, _, ok = append(state.table, state.live.astype(jnp.int32), max_tokens=1)
    active = state.live & ok
    batch = pack_decode(table, active)
    request = jnp.minimum(state.requests, state.status.shape[0] - 1)
    latest = jnp.maximum(state.lengths[request] - 1, 0)
    pool, logits = apply(state.pool, state.tokens[request, latest], batch, None)
    fed = state.fed + active.astype(jnp.int32)
    state = dataclasses.replace(state, table=table, pool=pool, fed=fed)
    return _record(work, count_step(state, mixed=False), logits, active)


def _tokens_of(
    work: Requests, state: RolloutState, batch: RaggedBatch, num_places: int
) -> jax.Array:
    """Looks up the tokens of a batch in prompts and in what was produced, int32[T]."""
    assert batch.cu_q_lens is not None
    place = jnp.arange(num_places, dtype=jnp.int32)
    slot = jnp.searchsorted(batch.cu_q_lens[1:], place, side="right")
    slot = jnp.minimum(slot, state.requests.shape[0] - 1)
    request = jnp.minimum(state.requests[slot], state.status.shape[0] - 1)
    prompt = request // work.num_samples
    nth = batch.positions - work.prompt_lens[prompt]
    asked = work.prompts.at[prompt, batch.positions].get(mode="clip")
    produced = state.tokens.at[request, jnp.maximum(nth, 0)].get(mode="clip")
    return jnp.where(nth < 0, asked, produced)


def _remember_prompts(
    work: Requests, state: RolloutState, mask: jax.Array
) -> RolloutState:
    """Enters the prompts of some rows into the prefix index, one after the other."""
    if state.index is None:
        return state

    def remember(carry: Any) -> Any:
        index, table, mask = carry
        slot = jnp.argmax(mask).astype(jnp.int32)
        prompt = state.requests[slot] // work.num_samples
        index, table = insert_prefix(
            index, table, slot, work.prompts[prompt], work.prompt_lens[prompt]
        )
        return index, table, mask.at[slot].set(False)

    index, table, _ = lax.while_loop(
        lambda carry: jnp.any(carry[2]), remember, (state.index, state.table, mask)
    )
    return dataclasses.replace(state, index=index, table=table)


def _record(
    work: Requests, state: RolloutState, logits: jax.Array, emits: jax.Array
) -> RolloutState:
    """Chooses a token for each row that emits one; ends and frees those done."""
    num_requests, width = state.tokens.shape
    row = jnp.minimum(state.requests, num_requests - 1)
    request = jnp.where(emits, state.requests, num_requests)
    length = state.lengths[row]
    keys = jax.vmap(jax.random.fold_in)(work.keys[row], length)
    chosen = sample(logits, keys, work.sampling)
    logprobs = token_logprobs(logits, chosen)
    place = jnp.where(emits, length, width)
    is_full = length + 1 >= work.limits[row // work.num_samples]
    is_end = jnp.any(chosen[:, None] == work.eos_ids[None, :], axis=-1)
    status = jnp.where(is_full, Status.LENGTH, Status.RUNNING)
    status = jnp.where(is_end, Status.STOP, status).astype(jnp.int32)
    ended = emits & (status != Status.RUNNING)
    stats = state.stats
    ended_at = stats.ended_at.at[jnp.where(ended, request, num_requests)].set(
        stats.num_steps, mode="drop"
    )
    state = dataclasses.replace(
        state,
        retry=state.retry | jnp.any(ended),
        tokens=state.tokens.at[request, place].set(chosen, mode="drop"),
        logprobs=state.logprobs.at[request, place].set(logprobs, mode="drop"),
        lengths=state.lengths.at[request].set(length + 1, mode="drop"),
        status=state.status.at[request].set(status, mode="drop"),
        stats=dataclasses.replace(stats, ended_at=ended_at),
    )
    return release_rows(state, ended)
