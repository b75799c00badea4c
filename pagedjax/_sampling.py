"""Choosing the next token: greedy, temperature, top-k, top-p.

A draw takes one uniform number per row and inverts the cumulative distribution.
Drawing a Gumbel number per logit, as `jax.random.categorical` does, costs about as
much as a decode step of a small model when the vocabulary has 49,152 tokens.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pagedjax import _options as options
from pagedjax import _page_ops as ops

_CANDIDATES = 256, 4096  # sorted first; the whole vocabulary only if these do not do
_BLOCK = 256  # leaf size of the two-level searches in `_argmax` and `_draw`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. The numbers are data: other ones compile nothing.

    Attributes:
      temperature: float32[]; 0 takes the most likely token.
      top_k: int32[]; keep that many tokens, ties to the lower id; 0 = all.
      top_p: float32[]; keep the fewest tokens that hold this much probability
        (after top-k), in (0, 1].
      mode: static; "greedy", "plain" (temperature alone) or "filtered": the
        cheapest program that does what the numbers say.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    mode: str = dataclasses.field(default="filtered", metadata={"static": True})


def init_sampling(
    *, temperature: Any = 0.0, top_k: Any = 0, top_p: Any = 1.0
) -> Sampling:
    """Checks the numbers and picks the cheapest program for them.

    Args:
      temperature: at least 0; 0 is greedy.
      top_k: at least 0; 0 keeps every token.
      top_p: in (0, 1].

    Raises:
      ValueError: a number is out of its range (traced numbers are not checked).

    Example:
      >>> from pagedjax import init_sampling
      >>> init_sampling(temperature=0.8, top_p=0.95).mode
      'filtered'
    """
    for name, value in dict(temperature=temperature, top_k=top_k, top_p=top_p).items():
        options.as_number(name, value)
    mode = "filtered"
    if not any(isinstance(x, jax.core.Tracer) for x in (temperature, top_k, top_p)):
        # Written so that NaN fails.
        if not 0 <= float(temperature) < float("inf"):
            raise ValueError(f"temperature must be finite and >= 0, got {temperature}")
        if not (float(top_k).is_integer() and 0 <= float(top_k) < 2**31):
            raise ValueError(f"top_k must be a whole number >= 0, got {top_k}")
        if not 0 < float(top_p) <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {top_p}")
        # As float32, where numbers below the least normal one count as 0.
        if float(temperature) < jnp.finfo(jnp.float32).tiny:
            mode = "greedy"
        elif top_k == 0 and top_p == 1:
            mode = "plain"
    return Sampling(
        temperature=jnp.array(temperature, jnp.float32),
        top_k=jnp.array(top_k, jnp.int32),
        top_p=jnp.array(top_p, jnp.float32),
        mode=mode,
    )


def sample(logits: jax.Array, keys: jax.Array, sampling: Sampling) -> jax.Array:
    """Chooses a token for each row.

    A row's token depends on its own logits and key alone, not on the other rows.

    Args:
      logits: float[R, V].
      keys: key[R]; one per row, consumed.
      sampling: how.

    Returns:
      int32[R]; token ids.

    Raises:
      ValueError: the logits are not one row of tokens each, or there is not one key
        for each row.
      TypeError: the keys are no random keys.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from pagedjax import init_sampling, sample
      >>> keys = jax.random.split(jax.random.key(0), 1)
      >>> sample(jnp.array([[0.0, 2.0, 1.0]]), keys, init_sampling()).tolist()
      [1]
    """
    logits = _as_rows(logits)
    _check_keys(keys, logits)
    if sampling.mode == "greedy":
        return _argmax(logits)
    # A number so small that float32 has it as 0 is greedy as well.
    warm = sampling.temperature >= jnp.finfo(jnp.float32).tiny
    # The largest is taken off first: over a small temperature it would be infinite.
    scaled = logits - jnp.max(logits, axis=-1, keepdims=True)
    scaled = scaled / jnp.where(warm, sampling.temperature, 1.0)
    uniform = jax.vmap(jax.random.uniform)(keys)
    if sampling.mode == "plain":
        return _draw(_weights(scaled), uniform)
    drawn = _draw_filtered(scaled, uniform, sampling)
    return jnp.where(warm, drawn, _argmax(logits))


def token_logprobs(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Gives the log-probability of one token per row.

    It is that of the model: log-softmax of the raw logits, whatever temperature
    and filters chose the token.

    Args:
      logits: float[R, V].
      tokens: int32[R].

    Returns:
      float32[R].

    Raises:
      ValueError, TypeError: there is not one int32 token for each row.

    Example:
      >>> import jax.numpy as jnp
      >>> from pagedjax import token_logprobs
      >>> round(float(token_logprobs(jnp.zeros((1, 4)), jnp.array([2]))[0]), 4)
      -1.3863
    """
    logits = _as_rows(logits)
    tokens = ops.as_int32("tokens", tokens, logits.shape[:1])
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def _as_rows(logits: Any) -> jax.Array:
    """Takes the logits as float32[R, V], V at least 1."""
    logits = jnp.asarray(logits, jnp.float32)
    if logits.ndim != 2 or not logits.shape[1]:
        raise ValueError(f"logits must have shape [rows, tokens], got {logits.shape}")
    return logits


def _check_keys(keys: Any, logits: jax.Array) -> None:
    """Checks that there is one key a row: one for all would draw alike in each.

    A raw key, as `jax.random.PRNGKey` makes, is a row of uint32 words.
    """
    if not isinstance(keys, jax.Array | np.ndarray):
        raise TypeError(f"keys must be random keys, one for each row, got {keys!r}")
    is_raw = not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)
    if is_raw and keys.dtype != jnp.uint32:
        raise TypeError(
            f"keys must be random keys, one for each row, got {keys.dtype}{keys.shape}"
        )
    if keys.shape[: keys.ndim - is_raw] != logits.shape[:1]:
        raise ValueError(
            f"keys must be one for each of the {logits.shape[0]} rows of logits, got"
            f" shape {keys.shape}" + " of raw keys" * is_raw
        )


def _argmax(logits: jax.Array) -> jax.Array:
    """Finds the place of each row's largest logit, the first of a tie.

    XLA:CPU reduces a maximum with vector instructions, but a maximum and its place
    one element after the other. So: the maximum of each block, then the place of the
    best block, then the place in it. NaN counts as infinity: the vectorised maximum
    turns a block that holds NaN into -inf (jaxlib 0.10.2).

    Args:
      logits: float32[R, V].

    Returns:
      int32[R].
    """
    rows, vocab = logits.shape
    size = math.gcd(vocab, _BLOCK)  # no padding, which would copy the logits
    blocks = logits.reshape(rows, -1, size)
    peaks = jnp.max(jnp.where(jnp.isnan(blocks), jnp.inf, blocks), axis=-1)
    block = jnp.argmax(peaks, axis=-1)
    leaf = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return (block * size + jnp.argmax(leaf, axis=-1)).astype(jnp.int32)


def _draw_filtered(
    logits: jax.Array, uniform: jax.Array, sampling: Sampling
) -> jax.Array:
    """Draws after top-k and top-p.

    Sorting the vocabulary is dear, and the kept tokens are nearly always among the
    first few: sort those, then more, and all of it only if some row needs that.
    """
    vocab = logits.shape[-1]
    log_total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)

    def draw_among(values: jax.Array, ids: jax.Array) -> jax.Array:
        ranks = jnp.arange(values.shape[1], dtype=jnp.int32)[None, :]
        by_rank = (sampling.top_k == 0) | (ranks < sampling.top_k)
        # Probability relative to the tokens that top-k keeps.
        probs = jnp.where(by_rank, jnp.exp(values - log_total), 0.0)
        kept = jnp.sum(probs, axis=-1, keepdims=True)
        total = jnp.where(sampling.top_k == 0, 1.0, kept)
        before = jnp.cumsum(probs, axis=-1) - probs
        by_mass = (before < sampling.top_p * total) | (sampling.top_p >= 1)
        keep = (by_rank & by_mass) | (ranks == 0)
        rank = _draw(jnp.where(keep, _weights(values), 0.0), uniform)
        return jnp.take_along_axis(ids, rank[:, None], axis=-1)[:, 0]

    def draw_from(sizes: Sequence[int]) -> jax.Array:
        num, *more = sizes
        values, ids = lax.top_k(logits, num)  # ties: the lower id first
        if not more:
            return draw_among(values, ids)
        mass = jnp.sum(jnp.exp(values - log_total), axis=-1)
        enough = jnp.where(
            sampling.top_k > 0,
            sampling.top_k <= num,
            jnp.all(mass >= sampling.top_p) & (sampling.top_p < 1),
        )
        return lax.cond(enough, draw_among, lambda *_: draw_from(more), values, ids)

    return draw_from([*(n for n in _CANDIDATES if n < vocab), vocab])


def _draw(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Draws an index with probability in proportion to its weight.

    Args:
      weights: float32[R, M]; not negative, at least one positive per row.
      uniform: float32[R]; in [0, 1).

    Returns:
      int32[R]; never an index of weight 0.
    """
    rows, size = weights.shape
    if size <= _BLOCK:
        return _invert(jnp.cumsum(weights, axis=-1), uniform)[0]
    # First the block, then the place in it: two short sums instead of a long one.
    weights = jnp.pad(weights, ((0, 0), (0, -size % _BLOCK)))
    blocks = weights.reshape(rows, -1, _BLOCK)
    block, rest = _invert(jnp.cumsum(jnp.sum(blocks, axis=-1), axis=-1), uniform)
    leaf = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    place, _ = _invert(jnp.cumsum(leaf, axis=-1), rest)
    return block * _BLOCK + place


def _invert(cumulative: jax.Array, uniform: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Finds the step of a cumulative sum that a uniform number falls into.

    Returns:
      `(index, rest)`: int32[R], and where inside the step it fell, in [0, 1).
    """
    total = cumulative[:, -1]
    # Rounding must not carry the number past the last step.
    target = jnp.minimum(uniform * total, jnp.nextafter(total, jnp.zeros_like(total)))
    index = jnp.sum(cumulative <= target[:, None], axis=-1, dtype=jnp.int32)
    end = jnp.take_along_axis(cumulative, index[:, None], axis=-1)[:, 0]
    below = jnp.take_along_axis(
        cumulative, jnp.maximum(index - 1, 0)[:, None], axis=-1
    )[:, 0]
    start = jnp.where(index > 0, below, 0.0)
    rest = (target - start) / (end - start)
    return index, jnp.clip(rest, 0.0, 1.0 - 2.0**-24)


def _weights(logits: jax.Array) -> jax.Array:
    return jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
