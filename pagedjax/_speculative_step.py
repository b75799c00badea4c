"""One step of speculative decoding; see `_speculative` for the idea."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pagedjax._generation_state import (
    GenerationState,
    Status,
    count_step,
    observe,
    produce,
)
from pagedjax._kv_pool import copy_pages
from pagedjax._page_table import append, truncate
from pagedjax._paged_model import PagedModel
from pagedjax._sampling import sample, token_logprobs
from pagedjax._speculative import (
    DraftModel,
    PromptLookup,
    count_accepted,
    draft_with_model,
    look_up,
    pack_drafts,
)


def speculative_step(
    model: PagedModel,
    params: Any,
    draft_params: Any,
    state: GenerationState,
) -> GenerationState:
    """Drafts tokens for each running row, checks them at once, keeps what agrees."""
    drafts = state.drafts
    assert drafts is not None
    most = drafts.drafter.num_tokens
    held = state.table.seq_lens
    guesses = jnp.zeros((held.shape[0], most), jnp.int32)
    wanted = jnp.clip(state.limits - state.lengths - 1, 0, most)
    if isinstance(drafts.drafter, PromptLookup):
        assert drafts.history is not None
        known = drafts.prompt_lens + state.lengths
        guesses, found = look_up(drafts.history, known, drafts.drafter)
        wanted = jnp.where(found, wanted, 0)

    # The token that must have a place first, as without drafts; they get what is left.
    running = state.status == Status.RUNNING
    table, plan, ok = append(state.table, running.astype(jnp.int32), max_tokens=1)
    status = jnp.where(running & ~ok, Status.OUT_OF_PAGES, state.status)
    running &= ok
    table, _, fits = append(table, jnp.where(running, wanted, 0), max_tokens=most)
    counts = jnp.where(running & fits, wanted, 0)
    pool = copy_pages(state.pool, plan)

    latest = jnp.maximum(state.lengths - 1, 0)[:, None]
    latest = jnp.take_along_axis(state.tokens, latest, axis=1)
    places = state.lengths[:, None] + jnp.arange(most + 1, dtype=jnp.int32)[None, :]
    keys = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(state.keys, places)
    if isinstance(drafts.drafter, DraftModel):
        assert drafts.pool is not None
        draft_pool, guesses = draft_with_model(
            drafts.drafter,
            draft_params,
            copy_pages(drafts.pool, plan),
            table,
            held,
            latest[:, 0],
            jnp.where(running, counts, -1),
            keys,
            state.sampling,
        )
        drafts = dataclasses.replace(drafts, pool=draft_pool)

    fed = jnp.concatenate([latest, guesses], axis=1)
    batch, packed, rows = pack_drafts(table, fed, jnp.where(running, counts + 1, 0))
    pool, logits = model.apply(params, pool, packed, batch, rows)
    chosen = sample(logits, keys.reshape(-1), state.sampling)
    logprobs = token_logprobs(logits, chosen).reshape(fed.shape)
    chosen = chosen.reshape(fed.shape)
    accepted = count_accepted(chosen, guesses, counts)

    before = state.lengths
    state = dataclasses.replace(
        state,
        pool=pool,
        status=status.astype(jnp.int32),
        stats=count_step(observe(state.stats, table), plan),
        drafts=drafts,
    )
    state = produce(state, chosen, logprobs, jnp.where(running, accepted + 1, 0))
    produced = state.lengths - before
    assert state.drafts is not None
    # A row holds all but its latest token, as before the step.
    keeps = jnp.where(state.status == Status.RUNNING, held + produced, 0)
    return dataclasses.replace(
        state,
        table=truncate(table, keeps),
        drafts=dataclasses.replace(
            state.drafts,
            drafted=drafts.drafted + counts,
            accepted=drafts.accepted + jnp.minimum(accepted, produced),
        ),
    )
