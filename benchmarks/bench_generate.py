"""Generation with SmolLM2-135M in float32: decode speed, and where a step's time goes.

- Decode tokens/s at batch 1, 8 and 32 after a 64-token prompt; the time of a step over
  that of its matrix products alone, the same shapes taking turns in one process, in the
  faster of two arrangements (as in the model; all layers unrolled).
- At batch 8 also against the same model on a dense contiguous cache, with the same
  tokens, and the share of the page table in a step.
- Decode steps over 1,024 tokens of context against the XLA attention.
- Prefill of 512 tokens, over its products; 8 samples of one 512-token prompt, 128
  tokens each; the compile time of `generate`.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import pagedjax as pj
from benchmarks import _models
from benchmarks._harness import Case, interleave, median_ratio, run_cli
from pagedjax import models

PROMPT = 64
NEW_TOKENS = 17  # the first comes from the prefill
PRODUCT_STEPS = 8
PAGE_SIZE = 16
BATCHES = (1, 8, 32)
DENSE_BATCH = 8
LONG_CONTEXT = 1024
LONG_BATCHES = (8, 32)
SAMPLES, SAMPLE_TOKENS, LONG_PROMPT = 8, 128, 512


def main() -> Iterator[Case]:
    """Yields the cases."""
    model, params, loaded = _models.load()
    vocab_size = loaded.config.vocab_size
    yield _compile_time(model, params, vocab_size)
    for batch in BATCHES:
        yield from _decode(model, params, loaded.model, batch)
    for batch in LONG_BATCHES:
        yield _long_context(loaded.model, batch)
    yield from _prefill(model, params, loaded.model)
    yield _samples(model, params, vocab_size)


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
    model: pj.PagedModel, params: Any, llama: models.Llama, batch: int
) -> Iterator[Case]:
    prompts = _models.random_prompts(batch, PROMPT, llama.config.vocab_size)
    steps = NEW_TOKENS - 1
    first = pj.start_generation(
        *(model, params, prompts), max_new_tokens=NEW_TOKENS, page_size=PAGE_SIZE
    )
    repeats = 5 if batch < 32 else 3
    # A copy for every paged run: continuing donates it.
    states = [jax.tree.map(jnp.copy, first) for _ in range(repeats + 1)]
    results: dict[str, jax.Array] = {}

    def paged() -> None:
        state = pj.continue_generation(model, params, states.pop(), num_steps=steps)
        results["paged"] = jax.block_until_ready(state.tokens[:, 1:])

    runs: dict[str, Callable[[], Any]] = {"paged": paged}
    runs |= _models.products_alone(llama, batch, head_rows=batch, steps=PRODUCT_STEPS)
    if batch == DENSE_BATCH:
        runs["table"] = _TableLoop(first, steps)
        dense = jax.jit(_models.dense_decode, static_argnums=(0, 5))
        cache = _models.dense_from_pages(first, PROMPT + NEW_TOKENS)
        dense_args = (model, params, cache, first.tokens[:, 0], first.table.seq_lens)

        def contiguous() -> None:
            results["dense"] = jax.block_until_ready(dense(*dense_args, steps))

        runs["dense"] = contiguous

    seconds = interleave(runs, repeats=repeats)
    settings = dict(batch=batch, prompt=PROMPT, steps=steps, page_size=PAGE_SIZE)
    yield Case(
        f"decode, batch {batch}",
        batch * steps / statistics.median(seconds["paged"]),
        "tokens/s",
        "the time of its products alone",
        _over_products(seconds, "paged") * PRODUCT_STEPS / steps,
        settings,
    )
    if "dense" not in runs:
        return
    if not bool(jnp.all(results["paged"] == results["dense"])):
        raise AssertionError("the paged and the dense cache gave different tokens")
    yield Case(
        f"decode on a dense cache, batch {batch}",
        batch * steps / statistics.median(seconds["dense"]),
        "tokens/s",
        "the speed on pages",
        median_ratio(seconds["paged"], seconds["dense"]),
        settings,
    )
    yield Case(
        f"page table's share of a decode step, batch {batch}",
        100 * median_ratio(seconds["table"], seconds["paged"]),
        "%",
        settings=settings,
    )


def _over_products(seconds: dict[str, list[float]], name: str) -> float:
    """Gives a time over that of the faster arrangement of its products."""
    arranged = [seconds[key] for key in seconds if key.startswith("products")]
    return median_ratio(seconds[name], min(arranged, key=statistics.median))


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


def _long_context(llama: models.Llama, batch: int) -> Case:
    """Decodes over a pool of zeros: what it holds does not change what a step costs."""
    steps = 4
    pages_per_slot = -(-(LONG_CONTEXT + steps) // PAGE_SIZE)
    table = pj.init_page_table(
        num_pages=batch * pages_per_slot,
        page_size=PAGE_SIZE,
        max_slots=batch,
        pages_per_slot=pages_per_slot,
    )
    table, _, _ = pj.append(table, jnp.full((batch,), LONG_CONTEXT))
    pool = pj.init_kv_pool(
        num_layers=llama.config.num_layers,
        num_pages=table.num_pages,
        page_size=PAGE_SIZE,
        num_kv_heads=llama.config.num_kv_heads,
        head_dim=llama.config.head_dim,
    )
    held = [pool]
    tokens = jnp.zeros((batch,), jnp.int32)

    def run_with(implementation: str | None) -> Callable[[], None]:
        decode = _models.make_decode(llama, steps, implementation)

        def run() -> None:
            held[0], chosen = decode(held[0], table, tokens)
            jax.block_until_ready(chosen)

        return run

    names = {"default": None, "xla": "xla"}
    runs = {key: run_with(name) for key, name in names.items()}
    seconds = interleave(runs, repeats=3)
    return Case(
        f"decode over {LONG_CONTEXT} tokens, batch {batch}",
        batch * steps / statistics.median(seconds["default"]),
        "tokens/s",
        "the speed with the XLA attention",
        median_ratio(seconds["xla"], seconds["default"]),
        dict(batch=batch, context=LONG_CONTEXT, steps=steps, page_size=PAGE_SIZE),
    )


def _prefill(model: pj.PagedModel, params: Any, llama: models.Llama) -> Iterator[Case]:
    prompts = _models.random_prompts(1, LONG_PROMPT, llama.config.vocab_size)
    run = functools.partial(
        pj.start_generation, *(model, params, prompts), max_new_tokens=1
    )
    runs: dict[str, Callable[[], Any]] = {
        "prefill": lambda: jax.block_until_ready(run())
    }
    runs |= _models.products_alone(llama, LONG_PROMPT, head_rows=1, steps=1)
    seconds = interleave(runs, repeats=3)
    yield Case(
        f"prefill of {LONG_PROMPT} tokens",
        LONG_PROMPT / statistics.median(seconds["prefill"]),
        "tokens/s",
        "the time of its products alone",
        _over_products(seconds, "prefill"),
        settings=dict(chunk_size=LONG_PROMPT, page_size=PAGE_SIZE),
    )


def _samples(model: pj.PagedModel, params: Any, vocab_size: int) -> Case:
    prompts = _models.random_prompts(1, LONG_PROMPT, vocab_size)
    start = functools.partial(
        pj.start_generation,
        *(model, params, prompts),
        max_new_tokens=SAMPLE_TOKENS,
        num_samples=SAMPLES,
        temperature=1.0,
        page_size=PAGE_SIZE,
    )
    go_on = functools.partial(pj.continue_generation, model, params)
    go_on(start(), num_steps=1)  # compiles both
    began = time.perf_counter()
    state = jax.block_until_ready(go_on(start(), num_steps=SAMPLE_TOKENS))
    seconds = time.perf_counter() - began
    return Case(
        f"{SAMPLES} samples of one {LONG_PROMPT}-token prompt, prefill included",
        int(jnp.sum(state.lengths)) / seconds,
        "tokens/s",
        settings=dict(new_tokens=SAMPLE_TOKENS, temperature=1.0, page_size=PAGE_SIZE),
    )


if __name__ == "__main__":
    run_cli(main)
