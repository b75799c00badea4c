"""Speculative decoding by prompt lookup with SmolLM2-135M in float32, one prompt.

The same tokens come from plain generation and with drafts; what differs is how many
passes of the model they take and how long these are. A prompt whose continuation
repeats what is there, and one that tells a story.
"""

import functools
import statistics
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

import pagedjax as pj
from benchmarks import _models
from benchmarks._harness import Case, interleave, median_ratio, run_cli

NEW_TOKENS = 65  # the first comes from the prefill
LENGTH = 64
DRAFT = pj.PromptLookup(max_ngram=3, num_tokens=7)
PROMPTS = {
    "a list that goes on": " ".join(f"item {i}: red, green, blue;" for i in range(5)),
    "a story": "Once upon a time",
}


def main() -> Iterator[Case]:
    """Yields the cases."""
    model, params, loaded = _models.load()
    for name, text in PROMPTS.items():
        ids = loaded.tokenizer.encode(text)[:LENGTH]
        prompts = (
            jnp.zeros((1, LENGTH), jnp.int32).at[0, : len(ids)].set(jnp.array(ids))
        )
        run = functools.partial(
            pj.generate,
            *(model, params, prompts, jnp.array([len(ids)])),
            max_new_tokens=NEW_TOKENS,
        )
        yield from _compare(name, run)


def _compare(name: str, run: Callable[..., pj.Generation]) -> Iterator[Case]:
    plain, drafted = run(), run(draft=DRAFT)
    assert drafted.drafts is not None
    same = plain.tokens.tolist() == drafted.tokens.tolist()
    seconds = interleave(
        {
            "plain": lambda: jax.block_until_ready(run()),
            "drafted": lambda: jax.block_until_ready(run(draft=DRAFT)),
        },
        repeats=2,
        warmup=0,
    )
    settings = dict(
        new_tokens=NEW_TOKENS,
        max_ngram=DRAFT.max_ngram,
        num_tokens=DRAFT.num_tokens,
        drafted=int(drafted.drafts.drafted.sum()),
        accepted=int(drafted.drafts.accepted.sum()),
        same_tokens=same,
    )
    steps, fewer = int(plain.stats.num_steps), int(drafted.stats.num_steps)
    yield Case(
        f"steps with prompt lookup, {name}",
        fewer,
        "steps",
        "fewer than without",
        steps / fewer,
        settings,
    )
    yield Case(
        f"tokens/s with prompt lookup, {name}",
        NEW_TOKENS / statistics.median(seconds["drafted"]),
        "tokens/s",
        "those without drafts, prefill included",
        median_ratio(seconds["plain"], seconds["drafted"]),
        settings,
    )


if __name__ == "__main__":
    run_cli(main)
