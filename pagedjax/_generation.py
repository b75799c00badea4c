"""The steps of generation: what `generate` jits.

In call order: `start` (prompts to first tokens), `proceed` (decode steps until all
are done). The state between them is one pytree.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pagedjax import _page_ops as ops
from pagedjax._beam import BeamRule, Beams, extend_beams, init_beams
from pagedjax._generation_state import (
    GenerationState,
    Status,
    count_step,
    no_stats,
    observe,
    produce,
)
from pagedjax._kv_pool import KVPool, copy_pages
from pagedjax._page_table import (
    PageTable,
    append,
    fork,
    free,
    init_page_table,
    reorder,
)
from pagedjax._paged_model import PagedModel, init_model_pool
from pagedjax._ragged import pack_decode, pack_ragged
from pagedjax._sampling import Sampling, sample, token_logprobs
from pagedjax._speculative import DraftModel, Drafts, PromptLookup
from pagedjax._speculative_step import speculative_step


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
    beam_rule: BeamRule | None = None,
    drafter: PromptLookup | DraftModel | None = None,
    draft_params: Any = None,
) -> GenerationState:
    batch = prompts.shape[0]
    per_prompt = num_samples if beam_rule is None else beam_rule.num_beams
    rows = batch * per_prompt
    slots = jnp.arange(rows, dtype=jnp.int32)
    first = slots[::per_prompt]  # the slot each prompt is prefilled in
    # Under shard_map the loops' carries must vary from the start as what they will
    # meet does: the prompts, and for keys and values the parameters too.
    data = (prompts, prompt_lens, key, seeds, eos_ids, sampling, beam_rule)
    table = init_page_table(
        num_pages=num_pages,
        page_size=page_size,
        max_slots=rows,
        pages_per_slot=pages_per_slot,
    )
    table = ops.vary_together(table, data)
    pool = init_model_pool(model, num_pages=num_pages, page_size=page_size)
    pool = ops.vary_together(pool, data, params)
    wanted = jnp.zeros((rows,), jnp.int32).at[first].set(prompt_lens)
    table, _, ok = append(table, wanted, max_tokens=prompts.shape[1])
    held = table.seq_lens[first]
    pool, logits = _prefill(
        model, params, pool, table, prompts, held, first, chunk_size
    )
    drafts = None
    if drafter is not None:
        drafts = _start_drafts(
            *(drafter, draft_params, table, prompts, held, first),
            chunk_size=chunk_size,
            max_new_tokens=max_new_tokens,
        )
    if per_prompt > 1:
        others = jnp.asarray(np.flatnonzero(np.arange(rows) % per_prompt), jnp.int32)
        table = fork(table, others - others % per_prompt, others)

    limit = ops.INT32_MAX if model.max_seq_len is None else model.max_seq_len
    limits = jnp.minimum(max_new_tokens, limit - prompt_lens)
    status = jnp.where(prompt_lens == 0, Status.EMPTY, Status.RUNNING)
    status = jnp.where(ok[first], status, Status.OUT_OF_PAGES)
    # A prompt that fills the context to the last token leaves room for none.
    full = (status == Status.RUNNING) & (limits <= 0)
    status = jnp.where(full, Status.LENGTH, status)

    def per_sample(values: jax.Array) -> jax.Array:
        return jnp.repeat(values, per_prompt, axis=0, total_repeat_length=rows)

    beams = None
    if beam_rule is not None:
        beams = init_beams(beam_rule, batch, max_new_tokens)
        beams = ops.vary_together(beams, data)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, per_sample(seeds))
    keys = jax.vmap(jax.random.fold_in)(keys, slots % per_prompt)
    state = GenerationState(
        table=table,
        pool=pool,
        **ops.vary_together(_no_tokens(rows, max_new_tokens), data),
        limits=per_sample(limits),
        status=per_sample(status.astype(jnp.int32)),
        keys=keys,
        eos_ids=eos_ids,
        sampling=sampling,
        stats=observe(no_stats(), table),
        drafts=drafts,
        beams=beams,
        num_samples=num_samples,
    )
    return _record(state, per_sample(logits))


def _start_drafts(
    drafter: PromptLookup | DraftModel,
    params: Any,
    table: PageTable,
    prompts: jax.Array,
    held: jax.Array,
    first: jax.Array,
    *,
    chunk_size: int,
    max_new_tokens: int,
) -> Drafts:
    """Gives the drafter the prompts."""
    rows = table.max_slots
    per_prompt = rows // prompts.shape[0]
    history = pool = None
    if isinstance(drafter, DraftModel):
        pool = init_model_pool(
            drafter.model, num_pages=table.num_pages, page_size=table.page_size
        )
        pool = ops.vary_together(pool, table, prompts, params)
        pool, _ = _prefill(
            drafter.model, params, pool, table, prompts, held, first, chunk_size
        )
    else:
        history = jnp.pad(prompts, ((0, 0), (0, max_new_tokens)))
        history = jnp.repeat(history, per_prompt, axis=0, total_repeat_length=rows)
        history = ops.vary_together(history, table)
    none = ops.vary_together(jnp.zeros((rows,), jnp.int32), table)
    return Drafts(
        history=history,
        prompt_lens=jnp.repeat(held, per_prompt, total_repeat_length=rows),
        pool=pool,
        drafted=none,
        accepted=none,
        drafter=drafter,
    )


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
    logits = ops.vary_together(logits, table)
    num_chunks = -(-ends[-1] // chunk_size)
    return lax.fori_loop(0, num_chunks, run_chunk, (pool, logits))


def _no_tokens(rows: int, max_new_tokens: int) -> dict[str, jax.Array]:
    return {
        "tokens": jnp.zeros((rows, max_new_tokens), jnp.int32),
        "logprobs": jnp.zeros((rows, max_new_tokens), jnp.float32),
        "lengths": jnp.zeros((rows,), jnp.int32),
    }


def proceed(
    params: Any,
    state: GenerationState,
    num_steps: jax.Array,
    draft_params: Any = None,
    *,
    model: PagedModel,
) -> GenerationState:
    done = state.stats.num_steps
    last = done + jnp.minimum(num_steps, ops.INT32_MAX - done)  # must not overflow

    def unfinished(state: GenerationState) -> jax.Array:
        running = jnp.any(state.status == Status.RUNNING)
        return running & (state.stats.num_steps < last)

    step = functools.partial(_decode_step, model, params)
    if state.drafts is not None:
        step = functools.partial(speculative_step, model, params, draft_params)
    return lax.while_loop(unfinished, step, state)


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
    stats = count_step(observe(state.stats, table), plan)
    state = dataclasses.replace(
        state, table=table, pool=pool, status=status.astype(jnp.int32), stats=stats
    )
    return _record(state, logits)


def _record(state: GenerationState, logits: jax.Array) -> GenerationState:
    """Chooses a token for each running sample; ends and frees those that are done."""
    if state.beams is not None:
        return _record_beams(state, state.beams, logits)
    running = state.status == Status.RUNNING
    keys = jax.vmap(jax.random.fold_in)(state.keys, state.lengths)
    chosen = sample(logits, keys, state.sampling)
    logprobs = token_logprobs(logits, chosen)
    state = produce(
        state, chosen[:, None], logprobs[:, None], running.astype(jnp.int32)
    )
    return dataclasses.replace(
        state, table=free(state.table, state.status != Status.RUNNING)
    )


def _record_beams(
    state: GenerationState, beams: Beams, logits: jax.Array
) -> GenerationState:
    """Extends the beams of each prompt; ends and frees the searches that are done."""
    width = beams.rule.num_beams
    by_prompt = state.status.reshape(-1, width)
    # A beam without a page ends the search of its prompt: what the others would go
    # on to find is not the answer.
    refused = jnp.any(by_prompt == Status.OUT_OF_PAGES, axis=1)
    status = jnp.where(refused, Status.OUT_OF_PAGES, by_prompt[:, 0])
    searching = status == Status.RUNNING
    lengths = state.lengths[::width]
    beams, parents, tokens, logprobs, done = extend_beams(
        beams,
        logits,
        state.tokens,
        state.logprobs,
        lengths,
        searching,
        state.eos_ids,
    )
    lengths = lengths + searching.astype(jnp.int32)
    is_full = searching & (lengths >= state.limits[::width])
    status = jnp.where(is_full, Status.LENGTH, status)
    status = jnp.where(done, Status.STOP, status).astype(jnp.int32)
    rows = state.status.shape[0]
    status, lengths = (
        jnp.repeat(x, width, total_repeat_length=rows) for x in (status, lengths)
    )
    table = reorder(state.table, parents)
    return dataclasses.replace(
        state,
        table=free(table, status != Status.RUNNING),
        tokens=tokens,
        logprobs=logprobs,
        lengths=lengths,
        status=status,
        beams=beams,
    )
