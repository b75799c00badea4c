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

Beam search chooses for all beams of a prompt at once, and `reorder` moves their rows.
Speculative decoding appends several guessed tokens, lets the model look at all of them
in one pass, and rolls back those it would not have chosen. How to use all of it:
`docs/generation.md`.

`generate` runs all of it in one jitted call. `start_generation`,
`continue_generation` and `finish_generation` are the same steps for a caller who
wants tokens as they come.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pagedjax import _options as options
from pagedjax import _page_ops as ops
from pagedjax._arguments import check_arguments, check_model
from pagedjax._beam import best_beams, init_beam_rule
from pagedjax._generation import proceed, start
from pagedjax._generation_state import GenerationState, PageStats, Status
from pagedjax._paged_model import PagedModel
from pagedjax._sampling import init_sampling
from pagedjax._signatures import takes_arguments_of
from pagedjax._speculative import DraftModel, PromptLookup, check_draft

__all__ = [
    "DraftModel",
    "DraftStats",
    "Generation",
    "GenerationState",
    "PageStats",
    "PagedModel",
    "PromptLookup",
    "Status",
    "continue_generation",
    "finish_generation",
    "generate",
    "start_generation",
]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftStats:
    """What became of the drafts.

    Attributes:
      drafted: int32[B, n]; tokens drafted for each sample.
      accepted: int32[B, n]; how many of them it produced.
    """

    drafted: jax.Array
    accepted: jax.Array


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
      scores: float32[B, n]; with beam search, what the sequences are sorted by, best
        first; -inf where a prompt has no so many. None without.
      drafts: with speculative decoding, what became of the drafts. None without.
    """

    tokens: jax.Array
    logprobs: jax.Array
    lengths: jax.Array
    status: jax.Array
    stats: PageStats
    scores: jax.Array | None = None
    drafts: DraftStats | None = None


def generate(
    model: PagedModel,
    params: Any,
    prompts: jax.Array,
    prompt_lens: jax.Array | None = None,
    key: jax.Array | None = None,
    *,
    max_new_tokens: int,
    num_samples: int = 1,
    num_beams: int | None = None,
    length_penalty: Any = 1.0,
    early_stopping: Any = False,
    temperature: Any = 0.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    eos_ids: Sequence[int] = (),
    seeds: jax.Array | None = None,
    page_size: int = 16,
    num_pages: int | None = None,
    chunk_size: int = 512,
    draft: PromptLookup | DraftModel | None = None,
    draft_params: Any = None,
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
      num_samples: samples of each prompt, `n`; with beam search, how many of the
        sequences found to give.
      num_beams: search for the likeliest continuations with so many hypotheses at a
        time, instead of sampling. Default: sample.
      length_penalty: a sequence's score is the sum of its log-probabilities over its
        length (new tokens, the end token included) to this power; above 0 long ones
        gain.
      early_stopping: True ends the search of a prompt once `num_beams` sequences
        have come to an end token; False, once also the best hypothesis that goes on
        would score no better than the worst of these if it ended now.
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
      draft: guess several tokens at a time this way and let the model check them in
        one pass. Changes how many steps it takes, and no token.
      draft_params: parameters of the draft model, if it is one.

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
    arguments = _prepare(
        model=model,
        params=params,
        prompts=prompts,
        prompt_lens=prompt_lens,
        key=key,
        max_new_tokens=max_new_tokens,
        num_samples=num_samples,
        num_beams=num_beams,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        eos_ids=eos_ids,
        seeds=seeds,
        page_size=page_size,
        num_pages=num_pages,
        chunk_size=chunk_size,
        draft=draft,
        draft_params=draft_params,
    )
    return _run_jit(**arguments)


@takes_arguments_of(generate)
def start_generation(arguments: dict[str, Any]) -> GenerationState:
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
    return _start_jit(**_prepare(**arguments))


def continue_generation(
    model: PagedModel,
    params: Any,
    state: GenerationState,
    *,
    num_steps: int,
    draft_params: Any = None,
) -> GenerationState:
    """Runs up to so many decode steps; fewer if every sample ends before.

    The state is donated: use the one that is returned.

    Args:
      model: the model.
      params: its parameters.
      state: where to go on.
      num_steps: most steps to run.
      draft_params: parameters of the draft model, if there is one.

    Returns:
      The new state. Done when no `status` is `Status.RUNNING`.

    Example:
      See `start_generation`.

      >>> import pagedjax as pj
      >>> pj.Status.RUNNING.value
      0
    """
    check_model(model)
    if draft_params is not None and (state.drafts is None or state.drafts.pool is None):
        raise ValueError("draft_params are those of a DraftModel, and none drafts here")
    num_steps = min(ops.as_size("num_steps", num_steps), ops.INT32_MAX)
    return _continue_jit(params, state, jnp.int32(num_steps), draft_params, model=model)


def finish_generation(state: GenerationState) -> Generation:
    """Gives what a state has produced so far, by prompt and sample.

    Of a beam search under way: the best sequences so far, ended or not.

    Example:
      See `start_generation`.

      >>> import pagedjax as pj
      >>> pj.Status.STOP.name
      'STOP'
    """
    if state.beams is not None:
        return _finish_beams_jit(state)
    rows, width = state.tokens.shape
    by_prompt = (rows // state.num_samples, state.num_samples)
    drafts = None
    if state.drafts is not None:
        drafts = DraftStats(
            drafted=state.drafts.drafted.reshape(by_prompt),
            accepted=state.drafts.accepted.reshape(by_prompt),
        )
    return Generation(
        tokens=state.tokens.reshape(*by_prompt, width),
        logprobs=state.logprobs.reshape(*by_prompt, width),
        lengths=state.lengths.reshape(by_prompt),
        status=state.status.reshape(by_prompt),
        stats=jax.tree.map(jnp.copy, state.stats),  # the state may be donated next
        drafts=drafts,
    )


@jax.jit
def _finish_beams_jit(state: GenerationState) -> Generation:
    beams = state.beams
    assert beams is not None
    width, n = beams.rule.num_beams, state.num_samples
    status = state.status[::width]
    scores, tokens, logprobs, lengths, is_finished = best_beams(
        beams,
        state.tokens,
        state.logprobs,
        state.lengths[::width],
        status != Status.STOP,
        n,
    )
    # A finished sequence is the answer only if the search came to its end.
    searched = (status == Status.STOP) | (status == Status.LENGTH)
    stops = is_finished & searched[:, None]
    return Generation(
        tokens=tokens,
        logprobs=logprobs,
        lengths=lengths,
        status=jnp.where(stops, Status.STOP, status[:, None]).astype(jnp.int32),
        stats=jax.tree.map(jnp.copy, state.stats),  # the state may be donated next
        scores=scores,
    )


def _prepare(
    *,
    model: PagedModel,
    params: Any,
    prompts: jax.Array,
    prompt_lens: jax.Array | None,
    key: jax.Array | None,
    num_samples: int,
    num_beams: int | None,
    length_penalty: Any,
    early_stopping: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    eos_ids: Sequence[int],
    seeds: jax.Array | None,
    draft: PromptLookup | DraftModel | None,
    draft_params: Any,
    **sizes: Any,
) -> dict[str, Any]:
    """Completes and checks the arguments of `generate`; gives those of `start`."""
    num_samples = ops.as_size("num_samples", num_samples)
    sampling = init_sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    rule = None
    if num_beams is not None:
        rule = init_beam_rule(
            num_beams, length_penalty=length_penalty, early_stopping=early_stopping
        )
        if sampling.mode != "greedy":
            raise ValueError(
                f"num_beams={num_beams} searches and does not sample: temperature"
                f" must be 0, got {temperature}"
            )
        if num_samples > rule.num_beams:
            raise ValueError(
                f"num_samples={num_samples} sequences cannot come from"
                f" num_beams={rule.num_beams}"
            )
    elif options.differs(length_penalty, 1.0) or options.differs(early_stopping, False):
        raise ValueError("length_penalty and early_stopping need num_beams")
    check_draft(draft, draft_params, model, is_beam_search=rule is not None)
    arrays, statics = check_arguments(
        model,
        prompts,
        prompt_lens,
        key,
        seeds,
        eos_ids,
        num_samples=num_samples if rule is None else rule.num_beams,
        **sizes,
    )
    names = ("prompts", "prompt_lens", "key", "seeds", "eos_ids")
    return {
        **dict(zip(names, arrays, strict=True)),
        **statics,
        "num_samples": num_samples,
        "model": model,
        "params": params,
        "sampling": sampling,
        "beam_rule": rule,
        "drafter": draft,
        "draft_params": draft_params,
    }


def _run(params: Any, *, model: PagedModel, **arguments: Any) -> Generation:
    state = start(params, model=model, **arguments)
    most = jnp.int32(arguments["max_new_tokens"])
    state = proceed(params, state, most, arguments["draft_params"], model=model)
    return finish_generation(state)


_STATICS = (
    "model",
    "max_new_tokens",
    "num_samples",
    "page_size",
    "num_pages",
    "pages_per_slot",
    "chunk_size",
    "drafter",
)
_run_jit = jax.jit(_run, static_argnames=_STATICS)
_start_jit = jax.jit(start, static_argnames=_STATICS)
_continue_jit = jax.jit(proceed, static_argnames="model", donate_argnames="state")
