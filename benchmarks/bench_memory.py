"""How much of the KV memory holds tokens: paged against reserved blocks.

Replays a mixed workload through the page table alone (no model: memory is a matter
of lengths): requests arrive as slots free up, with prompts and answers of log-normal
length as in chat: medians of 160 and 140 tokens, long tails, cut at 2,048. Beam search
runs the model, which decides what beams have in common.
"""

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import pagedjax as pj
from benchmarks import _models
from benchmarks._harness import Case, run_cli

PAGE_SIZE = 16
SLOTS = 32
MAX_LEN = 2_048
REQUESTS = 256
KV_BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 4  # SmolLM2-135M in float32


def main() -> Iterator[Case]:
    """Yields the cases."""
    yield from _mixed_workload()
    for num_samples in (2, 4, 8):
        yield _parallel_samples(num_samples)
    yield _beams(4)


def _mixed_workload() -> Iterator[Case]:
    draw = np.random.default_rng(0)
    prompts = _lengths(draw, median=160, sigma=1.1)
    answers = _lengths(draw, median=140, sigma=0.9)
    answers = np.minimum(answers, MAX_LEN - prompts)
    table = pj.init_page_table(
        num_pages=SLOTS * MAX_LEN // PAGE_SIZE,
        page_size=PAGE_SIZE,
        max_slots=SLOTS,
        pages_per_slot=MAX_LEN // PAGE_SIZE,
    )

    @jax.jit
    def step(table: pj.PageTable, add: jax.Array, done: jax.Array) -> tuple:
        table, _, ok = pj.append(pj.free(table, done), add)
        return table, pj.utilization(table), pj.num_used_pages(table), ok

    left = np.zeros(SLOTS, np.int64)
    waiting = list(zip(prompts, answers, strict=True))
    shares, static = [], []
    while waiting or left.any():
        add = (left > 0).astype(np.int32)
        done = left == 0
        reserved = 0
        for slot in np.flatnonzero(done):
            if waiting:
                prompt, answer = waiting.pop()
                add[slot], left[slot] = prompt, answer
        table, share, used, ok = step(table, jnp.asarray(add), jnp.asarray(done))
        assert bool(ok.all())
        if int(used):
            held = float(share) * float(used) * PAGE_SIZE
            reserved = int((left > 0).sum()) * MAX_LEN
            shares.append(float(share))
            static.append(held / reserved)
        left = np.maximum(left - 1, 0)
    settings = dict(slots=SLOTS, requests=REQUESTS, max_len=MAX_LEN)
    yield Case(
        "useful share of KV memory, mixed workload, paged",
        100 * float(np.mean(shares)),
        "%",
        "that of reserving the maximum",
        float(np.mean(shares) / np.mean(static)),
        settings | dict(page_size=PAGE_SIZE),
    )
    yield Case(
        "useful share of KV memory, mixed workload, reserved to the maximum",
        100 * float(np.mean(static)),
        "%",
        settings=settings,
    )


def _parallel_samples(num_samples: int, prompt: int = 500, answer: int = 100) -> Case:
    """The prompt's pages are shared; each sample owns what it writes."""
    table = _one_prompt(num_samples, prompt)
    rest = jnp.arange(1, num_samples, dtype=jnp.int32)
    table = pj.fork(table, jnp.zeros_like(rest), rest)
    table, _, ok = pj.append(table, jnp.full((num_samples,), answer, jnp.int32))
    assert bool(ok.all())
    apart = num_samples * -(-(prompt + answer) // PAGE_SIZE)
    return _saved(
        f"KV of {num_samples} samples of a {prompt}-token prompt, {answer} tokens each",
        int(pj.num_used_pages(table)),
        apart,
    )


def _beams(num_beams: int, prompt: int = 200, answer: int = 100) -> Case:
    """The real search: which beams leave each other, and when, is up to the model."""
    model, params, loaded = _models.load()
    text = (Path(__file__).parents[1] / "ARCHITECTURE.md").read_text()
    out = pj.generate(
        model,
        params,
        jnp.array([loaded.tokenizer.encode(text)[:prompt]]),
        max_new_tokens=answer,
        num_beams=num_beams,
        page_size=PAGE_SIZE,
    )
    return _saved(
        f"KV of {num_beams} beams, {prompt}-token prompt, {answer} steps",
        int(out.stats.pages_used),
        int(out.stats.pages_mapped),
    )


def _one_prompt(slots: int, prompt: int) -> pj.PageTable:
    table = pj.init_page_table(
        num_pages=1_024, page_size=PAGE_SIZE, max_slots=slots, pages_per_slot=64
    )
    tokens = jnp.zeros((slots,), jnp.int32).at[0].set(prompt)
    return pj.append(table, tokens)[0]


def _saved(case: str, used: int, apart: int) -> Case:
    return Case(
        case,
        used * PAGE_SIZE * KV_BYTES_PER_TOKEN / 2**20,
        "MiB",
        "of the memory of separate copies",
        used / apart,
        dict(page_size=PAGE_SIZE, pages=used, pages_apart=apart),
    )


def _lengths(draw: np.random.Generator, *, median: float, sigma: float) -> np.ndarray:
    values = draw.lognormal(np.log(median), sigma, REQUESTS).astype(np.int64)
    return np.clip(values, 4, MAX_LEN - 256)


if __name__ == "__main__":
    run_cli(main)
