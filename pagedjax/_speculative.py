"""Speculative decoding: drafts, and one pass that checks them all.

One step of a row that holds the keys and values of `n` tokens, with 4 drafts::

    fed        latest   d1    d2    d3    d4      to positions n .. n + 4
    chosen       c0     c1    c2    c3    c4      by the model, one key a position
    agree        d1=c0  d2=c1 d3/=c2
    produced     c0     c1    c2                  the row keeps n + 3
    rolled back                     d3    d4      `truncate`

The model chooses the token of each position as it would without drafts: from the same
logits, with the key of that position. A draft is accepted where it is the token
chosen anyway, so the result is that of plain generation, token for token, at every
temperature. For a draft that is certain of its token, the chance of that is the
probability that the model gives it: no less than with the rejection rule of
https://arxiv.org/abs/2211.17192. A draft model draws with the same keys, so that it
tends to draw the same token where its distribution is close.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax import _page_ops as ops
from pagedjax._kv_pool import KVPool
from pagedjax._page_table import PageTable
from pagedjax._paged_model import PagedModel
from pagedjax._ragged import RaggedBatch, pack_decode, pack_ragged
from pagedjax._sampling import Sampling, sample


@dataclasses.dataclass(frozen=True)
class PromptLookup:
    """Drafts what followed the latest tokens when they last stood together.

    Costs next to nothing, and is often right where the answer repeats the prompt or
    itself: summaries, edits, code (https://github.com/apoorvumang/prompt-lookup-decoding).

    Attributes:
      max_ngram: most latest tokens to look for; the longest match is taken, and of
        equally long ones the latest.
      num_tokens: tokens to draft in a step.

    Example:
      >>> import pagedjax as pj
      >>> pj.PromptLookup(max_ngram=2, num_tokens=8).num_tokens
      8
    """

    max_ngram: int = 3
    num_tokens: int = 4

    def __post_init__(self) -> None:
        ops.set_sizes(self, "max_ngram", "num_tokens")


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """Drafts with a smaller model of the same vocabulary.

    Its cache is a pool of its own behind the same page table. Past its context its
    drafts only get worse.

    Attributes:
      model: the model; its parameters are given as `draft_params`.
      num_tokens: tokens to draft in a step.

    Example:
      >>> import jax, pagedjax as pj
      >>> def guess(params, pool, tokens, batch, rows):
      ...     tokens = tokens if rows is None else tokens[rows]
      ...     return pool, jax.nn.one_hot(tokens + 1, 100)
      >>> small = pj.PagedModel(guess, 1, 1, 8, vocab_size=100)
      >>> pj.DraftModel(small, num_tokens=3).num_tokens
      3
    """

    model: PagedModel
    num_tokens: int = 4

    def __post_init__(self) -> None:
        ops.set_sizes(self, "num_tokens")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafts:
    """What a speculative generation holds besides a plain one. `R` rows.

    Attributes:
      history: int32[R, L + M]; prompt and produced tokens; None with a draft model.
      prompt_lens: int32[R]; how many of them are the prompt's.
      pool: keys and values of the draft model; None without one.
      drafted: int32[R]; tokens drafted so far.
      accepted: int32[R]; how many of them were produced.
      drafter: where drafts come from (static).
    """

    history: jax.Array | None
    prompt_lens: jax.Array
    pool: KVPool | None
    drafted: jax.Array
    accepted: jax.Array
    drafter: PromptLookup | DraftModel = dataclasses.field(metadata={"static": True})


def remember(
    drafts: Drafts, lengths: jax.Array, tokens: jax.Array, counts: jax.Array
) -> Drafts:
    """Adds the first tokens of each row to its history, if one is kept.

    Args:
      drafts: the state.
      lengths: int32[R]; tokens produced before.
      tokens: int32[R, C].
      counts: int32[R]; how many of them to add.
    """
    history = drafts.history
    if history is None:
        return drafts
    rows, width = history.shape
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    nth = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    place = (drafts.prompt_lens + lengths)[:, None] + nth
    place = jnp.where(nth < counts[:, None], place, width)
    history = history.at[row, place].set(tokens, mode="drop")
    return dataclasses.replace(drafts, history=history)


def look_up(
    history: jax.Array, lengths: jax.Array, drafter: PromptLookup
) -> tuple[jax.Array, jax.Array]:
    """Drafts from each row's own history.

    The draft goes on from the earlier place as if the tokens since then came again
    and again, so that it is whole even where the earlier place is the latest token
    but one.

    Args:
      history: int32[R, W].
      lengths: int32[R]; tokens of each row, at least 1.
      drafter: how.

    Returns:
      `(drafts, found)`: int32[R, num_tokens]; bool[R], False where the latest token
      is new and there is no draft.
    """
    rows, width = history.shape
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    place = jnp.arange(width, dtype=jnp.int32)[None, :]
    last = lengths[:, None] - 1
    same = place < last
    matched = jnp.zeros((rows, width), jnp.int32)
    for back in range(drafter.max_ngram):
        wanted = history.at[row, last - back].get(mode="fill", fill_value=-1)
        earlier = jnp.pad(history, ((0, 0), (back, 0)), constant_values=-2)[:, :width]
        same &= (earlier == wanted) & (last >= back)
        matched += same.astype(jnp.int32)
    # The longest match first, then the latest.
    end = jnp.argmax(jnp.where(matched > 0, matched * width + place, -1), axis=1)
    found = jnp.any(matched > 0, axis=1)
    period = jnp.maximum(last - end[:, None], 1)
    ahead = jnp.arange(drafter.num_tokens, dtype=jnp.int32)[None, :]
    source = end[:, None] + 1 + ahead % period
    return history.at[row, source].get(mode="fill", fill_value=0), found


def draft_with_model(
    drafter: DraftModel,
    params: object,
    pool: KVPool,
    table: PageTable,
    held: jax.Array,
    latest: jax.Array,
    counts: jax.Array,
    keys: jax.Array,
    sampling: Sampling,
) -> tuple[KVPool, jax.Array]:
    """Lets the draft model go ahead, a token at a time.

    It is fed its last draft too, for the keys and values: if all drafts are accepted
    that token is behind the next step's start.

    Args:
      drafter: the model.
      params: its parameters.
      pool: its keys and values.
      table: the page table, with room for the latest token and the drafts.
      held: int32[R]; tokens before the latest one.
      latest: int32[R]; the latest token.
      counts: int32[R]; tokens to draft; -1 for a row that takes no part.
      keys: key[R, num_tokens + 1]; of the positions to choose for.
      sampling: how tokens are chosen.

    Returns:
      `(pool, drafts)`; int32[R, num_tokens].
    """

    def feed(j: jax.Array, carry: tuple[KVPool, jax.Array]) -> tuple:
        pool, tokens = carry
        active = counts >= j
        # Pages for what comes later are there already: cut the view, not the table.
        view = dataclasses.replace(table, seq_lens=jnp.where(active, held + j + 1, 0))
        batch = pack_decode(view, active)
        pool, logits = drafter.model.apply(params, pool, tokens[:, j], batch, None)
        chosen = sample(logits, keys[:, j], sampling)
        return pool, tokens.at[:, j + 1].set(chosen, mode="drop")

    tokens = jnp.zeros((latest.shape[0], drafter.num_tokens + 1), jnp.int32)
    tokens = ops.vary_together(tokens, latest, counts).at[:, 0].set(latest)
    pool, tokens = lax.fori_loop(0, jnp.max(counts) + 1, feed, (pool, tokens))
    return pool, tokens[:, 1:]


def pack_drafts(
    table: PageTable, tokens: jax.Array, counts: jax.Array
) -> tuple[RaggedBatch, jax.Array, jax.Array]:
    """Lays out the latest token of each row and its drafts for one pass.

    Args:
      table: the page table, with room for them.
      tokens: int32[R, C]; the latest token first.
      counts: int32[R]; how many of them to feed; 0 for a row that takes no part.

    Returns:
      `(batch, packed, rows)`: the tokens int32[R * C] as the batch has them, and
      where each entry of `tokens` went, int32[R * C].
    """
    num_tokens = tokens.size
    batch = pack_ragged(table, counts, num_tokens=num_tokens)
    assert batch.cu_q_lens is not None
    nth = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    places = batch.cu_q_lens[:-1, None] + nth
    places = jnp.where(nth < counts[:, None], places, num_tokens)
    packed = jnp.zeros((num_tokens,), jnp.int32).at[places].set(tokens, mode="drop")
    return batch, packed, jnp.minimum(places.reshape(-1), num_tokens - 1)


def count_accepted(
    chosen: jax.Array, drafts: jax.Array, counts: jax.Array
) -> jax.Array:
    """Counts the leading drafts that are what the model chose.

    Args:
      chosen: int32[R, C]; the model's tokens, of one position more.
      drafts: int32[R, C - 1].
      counts: int32[R]; drafts that there are.

    Returns:
      int32[R].
    """
    nth = jnp.arange(drafts.shape[1], dtype=jnp.int32)[None, :]
    agree = (chosen[:, :-1] == drafts) & (nth < counts[:, None])
    return jnp.sum(jnp.cumprod(agree.astype(jnp.int32), axis=1), axis=1)


def check_draft(
    draft: Any, draft_params: Any, model: PagedModel, *, is_beam_search: bool
) -> None:
    """Checks what `generate` is given to draft with.

    Raises:
      TypeError: it is nothing to draft with.
      ValueError: it does not go with the other arguments.
    """
    if draft is None:
        if draft_params is not None:
            raise ValueError("draft_params needs draft")
        return
    if not isinstance(draft, PromptLookup | DraftModel):
        raise TypeError(
            f"draft must be a PromptLookup or a DraftModel, got {type(draft).__name__}"
        )
    if is_beam_search:
        raise ValueError("draft and num_beams cannot be given together")
    if isinstance(draft, PromptLookup):
        if draft_params is not None:
            raise ValueError("draft_params are a DraftModel's; draft is a PromptLookup")
        return
    if not isinstance(draft.model, PagedModel):
        raise TypeError(
            f"the model of a DraftModel must be a PagedModel, got {draft.model!r}"
        )
    if draft.model.vocab_size != model.vocab_size:
        raise ValueError(
            f"the draft model has a vocabulary of {draft.model.vocab_size} tokens, the"
            f" model one of {model.vocab_size}"
        )
