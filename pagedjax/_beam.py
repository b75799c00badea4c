"""Beam search on plain arrays: which hypotheses go on, and which are finished.

One step, with `K` beams of one prompt::

    beams   b0 -0.1   b1 -0.9          sums of log-probabilities
              |  \\       |
    tokens   x   y   .   x  <end>      the best few of every beam, together sorted
    ranks    0   1       2    3
             |   |            +-- an end token of rank < K: a finished hypothesis
             +---+-- the best K that do not end: the beams of the next step

The beams of a prompt are the rows of its slots. A row may go on in several places, so
each step says which row every row is now a copy of: `reorder` moves the pages after
it, and copy-on-write does the rest.

The rules are those of the `transformers` library without sampling
(https://huggingface.co/docs/transformers/generation_strategies).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax import _options as options
from pagedjax import _page_ops as ops


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BeamRule:
    """How a search scores and ends. The numbers are data: other ones compile nothing.

    Attributes:
      length_penalty: float32[]; the score of a finished hypothesis is the sum of its
        log-probabilities over its length to this power.
      early_stopping: bool[]; end as soon as there are `num_beams` finished ones.
      num_beams: hypotheses that go on at each step, `K` (static).
    """

    length_penalty: jax.Array
    early_stopping: jax.Array
    num_beams: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Beams:
    """The searches of `B` prompts, besides the rows that hold their beams.

    Attributes:
      rule: how they score and end.
      sums: float32[B, K]; log-probability of each beam, best first; -inf for one that
        stands for no hypothesis.
      scores: float32[B, K]; of the finished hypotheses, best first; -inf where there
        is none yet.
      tokens: int32[B, K, M]; the finished hypotheses; 0 past the end.
      logprobs: float32[B, K, M]; of their tokens.
      lengths: int32[B, K]; of them, the end token included.
    """

    rule: BeamRule
    sums: jax.Array
    scores: jax.Array
    tokens: jax.Array
    logprobs: jax.Array
    lengths: jax.Array


def init_beam_rule(
    num_beams: Any, *, length_penalty: Any = 1.0, early_stopping: Any = False
) -> BeamRule:
    """Checks the numbers of a beam search.

    Raises:
      ValueError: `num_beams` is below 1, or `length_penalty` is not finite.
    """
    num_beams = ops.as_size("num_beams", num_beams)
    length_penalty = options.as_number("length_penalty", length_penalty)
    is_traced = isinstance(length_penalty, jax.core.Tracer)
    if not is_traced and not abs(float(length_penalty)) < float("inf"):
        raise ValueError(f"length_penalty must be finite, got {length_penalty}")
    return BeamRule(
        length_penalty=jnp.asarray(length_penalty, jnp.float32),
        early_stopping=options.as_flag("early_stopping", early_stopping),
        num_beams=num_beams,
    )


def init_beams(rule: BeamRule, batch: int, max_new_tokens: int) -> Beams:
    """Begins a search per prompt: one hypothesis, without tokens."""
    shape = (batch, rule.num_beams)
    return Beams(
        rule=rule,
        # Every row of a prompt is the same at first, so only one may go on.
        sums=jnp.full(shape, -jnp.inf).at[:, 0].set(0.0),
        scores=jnp.full(shape, -jnp.inf),
        tokens=jnp.zeros((*shape, max_new_tokens), jnp.int32),
        logprobs=jnp.zeros((*shape, max_new_tokens), jnp.float32),
        lengths=jnp.zeros(shape, jnp.int32),
    )


def extend_beams(
    beams: Beams,
    logits: jax.Array,
    tokens: jax.Array,
    logprobs: jax.Array,
    lengths: jax.Array,
    searching: jax.Array,
    eos_ids: jax.Array,
) -> tuple[Beams, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Extends every search by one token.

    Args:
      beams: the searches; beam `k` of prompt `b` is row `b * K + k`.
      logits: float[R, V]; after the latest token of each row.
      tokens: int32[R, M]; the hypotheses that go on.
      logprobs: float32[R, M]; of their tokens.
      lengths: int32[B]; tokens of each of them.
      searching: bool[B]; searches that go on; the others stay as they are.
      eos_ids: int32[E]; the end tokens.

    Returns:
      `(beams, parents, tokens, logprobs, done)`: int32[R], the row that each row is
      now a copy of, one token longer; the new tokens and log-probabilities; bool[B],
      no hypothesis that goes on can be better than all the finished ones.
    """
    batch, width = beams.sums.shape
    max_new_tokens = tokens.shape[-1]
    ranked, parents, chosen, gains = _rank_candidates(beams.sums, logits, eos_ids)
    is_end = jnp.any(chosen[..., None] == eos_ids[None, None, :], axis=-1)

    sums, best = lax.top_k(jnp.where(is_end, -jnp.inf, ranked), width)
    shape = (batch, width, max_new_tokens)
    rows = (tokens.reshape(shape), logprobs.reshape(shape))
    # Finished ones come from the first K ranks; `grow` is for both kinds.
    index = jnp.arange(max_new_tokens, dtype=jnp.int32)[None, None, :]
    is_new = index == lengths[:, None, None]

    def grow(places: jax.Array) -> tuple[jax.Array, jax.Array]:
        parent, token, gain = (
            jnp.take_along_axis(x, places, axis=1) for x in (parents, chosen, gains)
        )
        old = [jnp.take_along_axis(x, parent[..., None], axis=1) for x in rows]
        return (
            jnp.where(is_new, token[..., None], old[0]),
            jnp.where(is_new, gain[..., None], old[1]),
        )

    new_lengths = lengths + 1
    norm = jnp.power(new_lengths.astype(jnp.float32), beams.rule.length_penalty)
    firsts = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
    ends = is_end[:, :width] & searching[:, None]
    finished = jnp.where(ends, ranked[:, :width] / norm[:, None], -jnp.inf)
    kept = _merge(
        (beams.scores, beams.tokens, beams.logprobs, beams.lengths),
        (finished, *grow(firsts), jnp.broadcast_to(new_lengths[:, None], ends.shape)),
    )
    worst = kept[0][:, -1]
    full = worst > -jnp.inf
    done = worst >= sums[:, 0] / norm
    done = searching & (done | (full & beams.rule.early_stopping))

    goes_on = searching[:, None]
    own = jnp.arange(batch * width, dtype=jnp.int32)
    first_row = own.reshape(batch, width)[:, :1]
    source = first_row + jnp.take_along_axis(parents, best, axis=1)
    source = jnp.where(goes_on, source, own.reshape(batch, width))
    grown = [
        jnp.where(goes_on[..., None], new, old)
        for new, old in zip(grow(best), rows, strict=True)
    ]
    beams = Beams(beams.rule, jnp.where(goes_on, sums, beams.sums), *kept)
    flat = [x.reshape(batch * width, max_new_tokens) for x in grown]
    return beams, source.reshape(-1), flat[0], flat[1], done


def best_beams(
    beams: Beams,
    tokens: jax.Array,
    logprobs: jax.Array,
    lengths: jax.Array,
    cut_short: jax.Array,
    num_samples: int,
) -> tuple[jax.Array, ...]:
    """Gives the best hypotheses of each prompt.

    Args:
      beams: the searches.
      tokens: int32[R, M]; the hypotheses that were going on.
      logprobs: float32[R, M]; of their tokens.
      lengths: int32[B]; tokens of each of them.
      cut_short: bool[B]; the search did not come to its end: those that were going on
        count as they are.
      num_samples: how many to give, at most `K`.

    Returns:
      `(scores, tokens, logprobs, lengths, is_finished)`, best first: float32[B, n],
      -inf where there is no hypothesis; int32 and float32[B, n, M]; int32[B, n];
      bool[B, n], ended with an end token.
    """
    batch, width = beams.sums.shape
    shape = (batch, width, tokens.shape[-1])
    length = jnp.maximum(lengths, 1).astype(jnp.float32)
    norm = jnp.power(length, beams.rule.length_penalty)
    counts = (cut_short & (lengths > 0))[:, None]
    running = jnp.where(counts, beams.sums / norm[:, None], -jnp.inf)
    no, yes = jnp.zeros(running.shape, bool), jnp.ones(running.shape, bool)
    scores, *rest = _merge(
        (beams.scores, beams.tokens, beams.logprobs, beams.lengths, yes),
        (
            running,
            tokens.reshape(shape),
            logprobs.reshape(shape),
            jnp.broadcast_to(lengths[:, None], running.shape),
            no,
        ),
    )
    is_one = ~jnp.isneginf(scores)

    def cut(x: jax.Array) -> jax.Array:
        mask = is_one.reshape(is_one.shape + (1,) * (x.ndim - 2))
        return jnp.where(mask, x, jnp.zeros_like(x))[:, :num_samples]

    return (scores[:, :num_samples], *map(cut, rest))


def _rank_candidates(
    sums: jax.Array, logits: jax.Array, eos_ids: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Finds the likeliest continuations of each prompt's beams, best first.

    So many that K of them do not end, whatever the others do: 2 K with one end token.
    The best of a prompt are among the best of each of its rows, so no row is
    normalised as a whole.

    Returns:
      `(sums, parents, tokens, gains)`, [B, C] each: the log-probability with the new
      token, the beam, the token, and its log-probability.
    """
    batch, width = sums.shape
    wanted = max(2, 1 + eos_ids.shape[0]) * width
    logits = logits.astype(jnp.float32)
    values, ids = lax.top_k(logits, min(wanted, logits.shape[-1]))
    values = values - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    per_row = values.shape[-1]
    values, ids = (x.reshape(batch, width, per_row) for x in (values, ids))
    totals = (sums[..., None] + values).reshape(batch, -1)
    ranked, places = lax.top_k(totals, min(wanted, totals.shape[-1]))
    chosen, gains = (
        jnp.take_along_axis(x.reshape(batch, -1), places, axis=1) for x in (ids, values)
    )
    return ranked, places // per_row, chosen, gains


def _merge(
    old: tuple[jax.Array, ...], new: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """Keeps the best K of two lists; the first of each tuple is the score."""
    both = [jnp.concatenate(pair, axis=1) for pair in zip(old, new, strict=True)]
    scores, places = lax.top_k(both[0], old[0].shape[1])

    def pick(x: jax.Array) -> jax.Array:
        index = places.reshape(places.shape + (1,) * (x.ndim - 2))
        return jnp.take_along_axis(x, index, axis=1)

    return (scores, *map(pick, both[1:]))
