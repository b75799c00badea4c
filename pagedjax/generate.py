"""Generation inside one XLA program, from prompts to finished tokens.

::

    prompts -> append -> prefill in chunks -> fork into n samples -> first token
                                                      |
            +-----------------------------------------+
            v
          append one token per live slot  --- no page left: OUT_OF_PAGES
            | copy pages that are still shared
            | model -> logits -> sample -> record
            +-- end token or length reached: free the slot; any left? again

`generate` runs all of it in one jitted call. `start_generation`,
`continue_generation` and `finish_generation` are the same steps for a caller who
wants tokens as they come.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax import _page_ops as ops
from pagedjax._generation import (
    GenerationState,
    PagedModel,
    PageStats,
    Status,
    proceed,
    start,
)
from pagedjax._sampling import Sampling, init_sampling

__all__ = [
    "Generation",
    "GenerationState",
    "PageStats",
    "PagedModel",
    "Status",
    "continue_generation",
    "finish_generation",
    "generate",
    "start_generation",
]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Generation:
    """What was generated for `B` prompts with `n` samples each.

    Attributes:
      tokens: int32[B, n, max_new_tokens]; an end token included; 0 past the end.
      logprobs: float32[B, n, max_new_tokens]; log-softmax of the model's logits at
        each token; 0 past the end.
      lengths: int32[B, n]; tokens produced.
      status: int32[B, n]; see `Status`.
      stats: page statistics.
    """

    tokens: jax.Array
    logprobs: jax.Array
    lengths: jax.Array
    status: jax.Array
    stats: PageStats


def generate(
    model: PagedModel,
    params: Any,
    prompts: jax.Array,
    prompt_lens: jax.Array | None = None,
    key: jax.Array | None = None,
    *,
    max_new_tokens: int,
    num_samples: int = 1,
    temperature: Any = 0.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    eos_ids: Sequence[int] = (),
    seeds: jax.Array | None = None,
    page_size: int = 16,
    num_pages: int | None = None,
    chunk_size: int = 512,
) -> Generation:
    """Continues every prompt, all in one jitted program.

    Prompts are prefilled once and forked into their samples, which share the
    prompt's pages until they write. A second call with the same shapes compiles
    nothing, whatever the other numbers.

    Args:
      model: the model.
      params: its parameters.
      prompts: int32[B, L]; token ids, padded on the right.
      prompt_lens: int32[B]; tokens of each prompt; default `L`. 0 makes the row
        padding: nothing is computed for it.
      key: random key; default `jax.random.key(0)`. Not used when greedy.
      max_new_tokens: most tokens to produce for a sample.
      num_samples: samples of each prompt, `n`.
      temperature: at least 0; 0 is greedy.
      top_k: keep that many tokens; 0 = all.
      top_p: keep the fewest tokens that hold this much probability, in (0, 1].
      eos_ids: tokens that end a sample.
      seeds: int32[B]; the number folded into the key for each prompt, so that a
        prompt's samples depend neither on the batch nor on its place in it.
        Default: 0 .. B - 1.
      page_size: tokens in a page.
      num_pages: pages in the pool; default: enough for every sample to its end.
      chunk_size: most prompt tokens in one forward pass.

    Returns:
      The tokens, how each sample ended, and what the pages did. A sample that
      finds no page has status `OUT_OF_PAGES` and keeps the tokens it had; a prompt
      that does not fit produces none.

    Raises:
      ValueError, TypeError: an argument has a wrong shape, dtype or range.

    Example:
      A model of one layer that attends to nothing and always counts on:

      >>> import jax, jax.numpy as jnp, pagedjax as pj
      >>> def count(params, pool, tokens, batch, rows):
      ...     tokens = tokens if rows is None else tokens[rows]
      ...     return pool, jax.nn.one_hot(tokens + 1, 100)
      >>> model = pj.PagedModel(
      ...     count, num_layers=1, num_kv_heads=1, head_dim=8, vocab_size=100
      ... )
      >>> out = pj.generate(
      ...     model, None, jnp.array([[7], [40]]), max_new_tokens=3, eos_ids=[42]
      ... )
      >>> out.tokens.tolist(), out.lengths.tolist()
      ([[[8, 9, 10]], [[41, 42, 0]]], [[3], [2]])
      >>> [pj.Status(int(s)).name for s in out.status.ravel()]
      ['LENGTH', 'STOP']
    """
    arrays, statics = _check_arguments(
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
    sampling = init_sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    return _run_jit(params, sampling, *arrays, model=model, **statics)


def start_generation(
    model: PagedModel,
    params: Any,
    prompts: jax.Array,
    prompt_lens: jax.Array | None = None,
    key: jax.Array | None = None,
    *,
    max_new_tokens: int,
    num_samples: int = 1,
    temperature: Any = 0.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    eos_ids: Sequence[int] = (),
    seeds: jax.Array | None = None,
    page_size: int = 16,
    num_pages: int | None = None,
    chunk_size: int = 512,
) -> GenerationState:
    """Prefills the prompts, forks the samples and chooses each one's first token.

    The arguments are those of `generate`.

    Example:
      >>> import jax, jax.numpy as jnp, pagedjax as pj
      >>> def count(params, pool, tokens, batch, rows):
      ...     tokens = tokens if rows is None else tokens[rows]
      ...     return pool, jax.nn.one_hot(tokens + 1, 100)
      >>> model = pj.PagedModel(
      ...     count, num_layers=1, num_kv_heads=1, head_dim=8, vocab_size=100
      ... )
      >>> state = pj.start_generation(
      ...     model, None, jnp.array([[7]]), max_new_tokens=3
      ... )
      >>> state.tokens.tolist()
      [[8, 0, 0]]
      >>> state = pj.continue_generation(model, None, state, num_steps=1)
      >>> state.tokens.tolist()
      [[8, 9, 0]]
    """
    arrays, statics = _check_arguments(
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
    sampling = init_sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    return _start_jit(params, sampling, *arrays, model=model, **statics)


def continue_generation(
    model: PagedModel, params: Any, state: GenerationState, *, num_steps: int
) -> GenerationState:
    """Runs up to so many decode steps; fewer if every sample ends before.

    The state is donated: use the one that is returned.

    Args:
      model: the model.
      params: its parameters.
      state: where to go on.
      num_steps: most steps to run.

    Returns:
      The new state. Done when no `status` is `Status.RUNNING`.

    Example:
      See `start_generation`.

      >>> import pagedjax as pj
      >>> pj.Status.RUNNING.value
      0
    """
    num_steps = min(ops.as_size("num_steps", num_steps), ops.INT32_MAX)
    return _continue_jit(params, state, jnp.int32(num_steps), model=model)


def finish_generation(state: GenerationState) -> Generation:
    """Gives what a state has produced so far, by prompt and sample.

    Example:
      See `start_generation`.

      >>> import pagedjax as pj
      >>> pj.Status.STOP.name
      'STOP'
    """
    rows, width = state.tokens.shape
    by_prompt = (rows // state.num_samples, state.num_samples)
    return Generation(
        tokens=state.tokens.reshape(*by_prompt, width),
        logprobs=state.logprobs.reshape(*by_prompt, width),
        lengths=state.lengths.reshape(by_prompt),
        status=state.status.reshape(by_prompt),
        stats=jax.tree.map(jnp.copy, state.stats),  # the state may be donated next
    )


def _check_arguments(
    model: PagedModel,
    prompts: Any,
    prompt_lens: Any,
    key: jax.Array | None,
    seeds: Any,
    eos_ids: Sequence[int],
    *,
    max_new_tokens: int,
    num_samples: int,
    page_size: int,
    num_pages: int | None,
    chunk_size: int,
) -> tuple[tuple[jax.Array, ...], dict[str, int]]:
    """Completes and checks the arguments; gives the arrays and the static sizes."""
    prompts = ops.as_int32("prompts", prompts, (None, None))
    batch, length = prompts.shape
    sizes = dict(
        max_new_tokens=max_new_tokens,
        num_samples=num_samples,
        page_size=page_size,
        chunk_size=chunk_size,
    )
    sizes |= {"prompts.shape[0]": batch, "prompts.shape[1]": length}
    if num_pages is not None:
        sizes["num_pages"] = num_pages
    for name, value in sizes.items():
        ops.as_size(name, value)
    if prompt_lens is None:
        prompt_lens = np.full((batch,), length, np.int32)
    prompt_lens = ops.as_int32("prompt_lens", prompt_lens, (batch,))
    limit = model.max_seq_len
    if not isinstance(prompt_lens, jax.core.Tracer):
        # NumPy's: under an outer jit even a concrete array's min() is traced.
        lens = np.asarray(prompt_lens)
        low, high = int(lens.min()), int(lens.max())
        if low < 0 or high > length:
            raise ValueError(
                f"prompt_lens must be between 0 and {length}, got {low} to {high}"
            )
        if limit is not None and high > limit:
            raise ValueError(
                f"a prompt of {high} tokens is longer than the model's context of"
                f" {limit}"
            )
    seeds = np.arange(batch, dtype=np.int32) if seeds is None else seeds
    seeds = ops.as_int32("seeds", seeds, (batch,))
    key = jax.random.key(0) if key is None else key
    ids = list(eos_ids) or np.zeros((0,), np.int32)
    ends = ops.as_int32("eos_ids", ids, (None,))
    longest = length + max_new_tokens
    longest = longest if limit is None else min(longest, max(limit, length))
    if num_pages is None:
        # A prompt's pages are shared; each sample adds its own tokens and, at the
        # seam, its copy of the prompt's last page.
        own = ops.num_pages_of(max_new_tokens, page_size) + 1
        num_pages = batch * (ops.num_pages_of(length, page_size) + num_samples * own)
    return (prompts, prompt_lens, key, seeds, ends), dict(
        max_new_tokens=max_new_tokens,
        num_samples=num_samples,
        page_size=page_size,
        num_pages=num_pages,
        pages_per_slot=ops.num_pages_of(longest, page_size),
        chunk_size=min(chunk_size, batch * length),
    )


def _run(
    params: Any,
    sampling: Sampling,
    *arrays: jax.Array,
    model: PagedModel,
    **statics: Any,
) -> Generation:
    state = start(params, sampling, *arrays, model=model, **statics)
    most = jnp.int32(statics["max_new_tokens"])
    return finish_generation(proceed(params, state, most, model=model))


_STATICS = (
    "model",
    "max_new_tokens",
    "num_samples",
    "page_size",
    "num_pages",
    "pages_per_slot",
    "chunk_size",
)
_run_jit = jax.jit(_run, static_argnames=_STATICS)
_start_jit = jax.jit(start, static_argnames=_STATICS)
_continue_jit = jax.jit(proceed, static_argnames="model", donate_argnames="state")
