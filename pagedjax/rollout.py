"""Rollouts: a whole continuous batch inside one XLA program.

::

    prompts * samples, in order       a queue in device memory, thousands if need be
            |  admit: a row is free, its pages fit
            v
    rows    [ 17 decodes ][ 12 decodes ][ 18 feeds its prompt ][ free ]
            |  one forward pass: a token of each row, prompt tokens in what is left
            v
    ended? its row and pages are the next request's, in the same step

`generate` decodes one batch until its longest sample has ended; here a row goes to
the next request as soon as its own has. No host is involved between the first prompt
and the last token.

Many prompts with samples in groups, finished in one jitted call, is what rollouts for
reinforcement learning, evaluation and search need.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pagedjax import _options as options
from pagedjax import _page_ops as ops
from pagedjax._arguments import check_arguments
from pagedjax._paged_model import PagedModel
from pagedjax._rollout import run_rollout
from pagedjax._rollout_state import RolloutStats, finish_stats
from pagedjax._sampling import init_sampling

__all__ = ["Rollout", "RolloutStats", "rollout"]

_MAX_PREFIX_ENTRIES = 1024  # by default; finding a prefix compares with each


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rollout:
    """What was produced for `B` prompts with `n` samples each, in prompt order.

    Attributes:
      tokens: int32[B, n, max_new_tokens]; an end token included; 0 past the end.
      logprobs: float32[B, n, max_new_tokens]; log-softmax of the model's logits at
        each token; 0 past the end.
      lengths: int32[B, n]; tokens produced.
      status: int32[B, n]; see `Status`.
      stats: what happened on the way.
    """

    tokens: jax.Array
    logprobs: jax.Array
    lengths: jax.Array
    status: jax.Array
    stats: RolloutStats


def rollout(
    model: PagedModel,
    params: Any,
    prompts: jax.Array,
    prompt_lens: jax.Array | None = None,
    key: jax.Array | None = None,
    *,
    max_new_tokens: int,
    num_slots: int,
    num_samples: int = 1,
    budgets: jax.Array | None = None,
    temperature: Any = 0.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    eos_ids: Sequence[int] = (),
    seeds: jax.Array | None = None,
    page_size: int = 16,
    num_pages: int | None = None,
    chunk_size: int = 128,
    reserve: Any = False,
    longest_first: Any = False,
    prefix_entries: int | None = None,
) -> Rollout:
    """Continues every prompt, `num_slots` samples at a time, in one jitted program.

    The requests are admitted sample after sample and prompt after prompt, in order
    or the largest budget first.
    Samples of one prompt share its pages, and so do prompts that start alike: the
    full pages of the prompts are remembered until others need the room.

    The tokens are those of `generate` with the same key and seeds. They depend
    neither on `num_slots` nor on `page_size`, `num_pages`, `chunk_size`,
    `prefix_entries`, `reserve` or `longest_first`, up to rounding of the logits. A
    second call with the same shapes compiles nothing, whatever the other numbers.

    Args:
      model: the model.
      params: its parameters.
      prompts: int32[B, L]; token ids, padded on the right.
      prompt_lens: int32[B]; tokens of each prompt; default `L`. 0 makes the row
        padding: nothing is computed for it.
      key: random key; default `jax.random.key(0)`. Not used when greedy.
      max_new_tokens: most tokens to produce for a sample.
      num_slots: samples that run at a time.
      num_samples: samples of each prompt, `n`.
      budgets: int32[B]; most tokens to produce for each sample of each prompt;
        default, and at most, `max_new_tokens`.
      temperature: at least 0; 0 is greedy.
      top_k: keep that many tokens; 0 = all.
      top_p: keep the fewest tokens that hold this much probability, in (0, 1].
      eos_ids: tokens that end a sample.
      seeds: int32[B]; the number folded into the key for each prompt. Default:
        0 .. B - 1.
      page_size: tokens in a page.
      num_pages: pages in the pool; default: enough for `num_slots` of the longest.
      chunk_size: tokens in a forward pass that feeds prompts; at least `num_slots`
        are taken.
      reserve: True admits a request only when the pages fit that it and those that
        run may need to their last token, so that none is ever preempted. False
        admits more at a time, which pays where most samples end early; when pages
        run out the request admitted last gives its own back, and what it had is
        computed again later. May be traced.
      longest_first: True admits prompts in the order of their budgets, the largest
        first and equal ones in their order. Otherwise a long one admitted late runs
        on when there is nothing left for the other rows (the rule and its bound:
        R. L. Graham, https://doi.org/10.1137/0117039). Pays where budgets differ and
        are mostly used up. May be traced.
      prefix_entries: pages of prompts to remember for prompts that start alike;
        0 = none; default: those of all prompts, at most 1,024.

    Returns:
      Tokens, how each sample ended and what happened. A request that would not fit
      the pool even alone has status `UNSERVABLE` and produces none; one with a
      budget of 0 has status `LENGTH`.

    Raises:
      ValueError, TypeError: an argument has a wrong shape, dtype or range.

    Example:
      A model that attends to nothing and always counts on. Two rows serve three
      requests of different lengths:

      >>> import jax, jax.numpy as jnp, pagedjax as pj
      >>> def count(params, pool, tokens, batch, rows):
      ...     tokens = tokens if rows is None else tokens[rows]
      ...     return pool, jax.nn.one_hot(tokens + 1, 100)
      >>> model = pj.PagedModel(
      ...     count, num_layers=1, num_kv_heads=1, head_dim=8, vocab_size=100
      ... )
      >>> out = pj.rollout(
      ...     model, None, jnp.array([[7], [40], [90]]),
      ...     max_new_tokens=4, num_slots=2, budgets=jnp.array([4, 2, 3]),
      ... )
      >>> out.tokens[:, 0].tolist()
      [[8, 9, 10, 11], [41, 42, 0, 0], [91, 92, 93, 0]]
      >>> out.stats.admitted_at.ravel().tolist(), int(out.stats.num_steps)
      ([0, 0, 2], 5)
    """
    arrays, statics = check_arguments(
        model,
        prompts,
        prompt_lens,
        key,
        seeds,
        eos_ids,
        max_new_tokens=max_new_tokens,
        num_samples=num_samples,
        page_size=page_size,
        num_pages=num_pages,
        chunk_size=chunk_size,
    )
    batch, length = arrays[0].shape
    max_new_tokens = statics["max_new_tokens"]
    slots = ops.as_size("num_slots", num_slots)
    slots = min(slots, batch * statics["num_samples"])
    every = np.full((batch,), max_new_tokens, np.int32)
    limits = ops.as_int32("budgets", every if budgets is None else budgets, (batch,))
    if not isinstance(limits, jax.core.Tracer):
        most = np.asarray(limits)
        if most.min() < 0 or most.max() > max_new_tokens:
            raise ValueError(
                f"budgets must be between 0 and max_new_tokens={max_new_tokens}, got"
                f" {most.min()} to {most.max()}"
            )
    if num_pages is None:
        statics["num_pages"] = slots * statics["pages_per_slot"]
    if prefix_entries is None:
        prefix_entries = batch * (length // statics["page_size"])
        prefix_entries = min(prefix_entries, _MAX_PREFIX_ENTRIES)
    return _rollout_jit(
        params,
        init_sampling(temperature=temperature, top_k=top_k, top_p=top_p),
        *arrays,
        limits,
        options.as_flag("reserve", reserve),
        options.as_flag("longest_first", longest_first),
        model=model,
        num_slots=slots,
        prefix_entries=ops.as_size("prefix_entries", prefix_entries, low=0),
        **statics,
    )


def _rollout(*arrays: Any, num_samples: int, **statics: Any) -> Rollout:
    state = run_rollout(*arrays, num_samples=num_samples, **statics)
    by_prompt = (-1, num_samples)
    return Rollout(
        tokens=state.tokens.reshape(*by_prompt, state.tokens.shape[1]),
        logprobs=state.logprobs.reshape(*by_prompt, state.tokens.shape[1]),
        lengths=state.lengths.reshape(by_prompt),
        status=state.status.reshape(by_prompt),
        stats=finish_stats(state.stats, num_samples),
    )


_rollout_jit = jax.jit(
    _rollout,
    static_argnames=(
        "model",
        "max_new_tokens",
        "num_samples",
        "num_slots",
        "page_size",
        "num_pages",
        "pages_per_slot",
        "chunk_size",
        "prefix_entries",
    ),
)
