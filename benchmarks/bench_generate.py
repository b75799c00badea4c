"""Generation with SmolLM2-135M in float32: decode speed, and where a step's time goes.

Decode tokens/s at batch 1, 8 and 32 after a 64-token prompt, against the same model
on a dense contiguous cache (same process, taking turns, same tokens); the share of
the page table in a step; prefill; and the compile time of `generate`.
"""

import functools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import pagedjax as pj
from benchmarks import _models
from benchmarks._harness import Case, interleave, median_ratio, run_cli

PROMPT = 64
NEW_TOKENS = 33  # the first comes from the prefill
PAGE_SIZE = 16
BATCHES = (1, 8, 32)


def main() -> Iterator[Case]:
    """Yields the cases."""
    model, params, loaded = _models.load()
    yield _compile_time(model, params, loaded.config.vocab_size)
    for batch in BATCHES:
        yield from _decode(model, params, loaded.config.vocab_size, batch)
    yield _prefill(model, params, loaded.config.vocab_size)


def _compile_time(model: pj.PagedModel, params: Any, vocab_size: int) -> Case:
    prompts = _models.random_prompts(8, PROMPT, vocab_size)
    jax.clear_caches()
    start = time.perf_counter()
    run = functools.partial(pj.generate, max_new_tokens=NEW_TOKENS)
    jax.jit(run, static_argnums=0).lower(model, params, prompts).compile()
    return Case(
        "compile generate, batch 8",
        time.perf_counter() - start,
        "s",
        settings=dict(prompt=PROMPT, new_tokens=NEW_TOKENS),
    )


def _decode(
    model: pj.PagedModel, params: Any, vocab_size: int, batch: int
) -> Iterator[Case]:
    prompts = _models.random_prompts(batch, PROMPT, vocab_size)
    start = functools.partial(
        pj.start_generation,
        *(model, params, prompts),
        max_new_tokens=NEW_TOKENS,
        page_size=PAGE_SIZE,
    )
    steps = NEW_TOKENS - 1
    first = start()
    dense = jax.jit(_models.dense_decode, static_argnums=(0, 5))
    cache = _models.dense_from_pages(first, PROMPT + NEW_TOKENS)
    dense_args = (model, params, cache, first.tokens[:, 0], first.table.seq_lens, steps)

    # A fresh state for every paged run: continuing donates it.
    states = iter([])
    results: dict[str, jax.Array] = {}

    def paged() -> None:
        state = pj.continue_generation(model, params, next(states), num_steps=steps)
        results["paged"] = jax.block_until_ready(state.tokens[:, 1:])

    def contiguous() -> None:
        results["dense"] = jax.block_until_ready(dense(*dense_args))

    table_only = _TableLoop(first, steps)
    repeats = 5 if batch < 32 else 3
    states = iter([jax.block_until_ready(start()) for _ in range(repeats + 1)])
    seconds = interleave(
        {"paged": paged, "dense": contiguous, "table": table_only}, repeats=repeats
    )
    if not bool(jnp.all(results["paged"] == results["dense"])):
        raise AssertionError("the paged and the dense cache gave different tokens")
    settings = dict(batch=batch, prompt=PROMPT, steps=steps, page_size=PAGE_SIZE)
    yield Case(
        f"decode, batch {batch}",
        batch * steps / statistics.median(seconds["paged"]),
        "tokens/s",
        "the speed on a dense cache",
        median_ratio(seconds["dense"], seconds["paged"]),
        settings,
    )
    yield Case(
        f"page table's share of a decode step, batch {batch}",
        100 * median_ratio(seconds["table"], seconds["paged"]),
        "%",
        settings=settings,
    )


class _TableLoop:
    """All that a decode step does with pages, without the model."""

    def __init__(self, state: pj.GenerationState, steps: int) -> None:
        self.table = state.table
        rows = state.table.max_slots

        @jax.jit
        def loop(table: pj.PageTable) -> Any:
            def step(table: pj.PageTable, _: None) -> Any:
                one = jnp.ones((rows,), jnp.int32)
                table, plan, ok = pj.append(table, one, max_tokens=1)
                batch = pj.pack_decode(table, ok)
                # Used, so that none of it is dead code.
                used = (plan, batch.pages, batch.offsets, batch.positions)
                return pj.free(table, ~ok), used

            return jax.lax.scan(step, table, None, length=steps)

        self.loop = loop

    def __call__(self) -> None:
        jax.block_until_ready(self.loop(self.table))


def _prefill(model: pj.PagedModel, params: Any, vocab_size: int) -> Case:
    prompts = _models.random_prompts(1, 512, vocab_size)
    run = functools.partial(
        pj.start_generation, *(model, params, prompts), max_new_tokens=1
    )
    seconds = interleave({"prefill": lambda: jax.block_until_ready(run())}, repeats=5)
    return Case(
        "prefill of 512 tokens",
        512 / statistics.median(seconds["prefill"]),
        "tokens/s",
        settings=dict(chunk_size=512, page_size=PAGE_SIZE),
    )


if __name__ == "__main__":
    run_cli(main)
