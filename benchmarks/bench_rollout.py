"""Rollouts against batches that wait for their longest member, and one at a time.

A random Llama of 4 layers (8 heads, 4 of keys and values, width 512, vocabulary 2,048)
in float32: a real model would take the benchmark's time without changing what is
compared. 256 prompts of 16 to 512 tokens, budgets of 16 to 256 tokens, 32 slots. A
batch of `generate` runs until its longest sample has ended, because a static batch has
one budget; its prompts are padded to the longest (`static`), or not (`unpadded`).
Only tokens that were asked for count. The occupancy of the slots and the share of the
token places in used pages that hold a token are written as curves to
`build/rollout.svg`.
"""

import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

import pagedjax as pj
from benchmarks._harness import Case, interleave, median_ratio, run_cli
from pagedjax.models import Llama, LlamaConfig

PROMPTS, SLOTS = 256, 32
LENGTHS, BUDGETS = (16, 512), (16, 256)
ONE_BY_ONE = 8  # prompts run one at a time; the rest is scaled
CONFIG = LlamaConfig(
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    hidden_size=512,
    ffn_size=1408,
    vocab_size=2048,
    max_seq_len=1024,
)
PLOT = Path(__file__).parents[1] / "build" / "rollout.svg"


def main() -> Iterator[Case]:
    """Yields the cases."""
    model, params = Llama(CONFIG, rngs=nnx.Rngs(0)).paged()
    yield from _against_batches(model, params)
    yield from _samples_of_one_prompt(model, params)


def _against_batches(model: pj.PagedModel, params: Any) -> Iterator[Case]:
    rng = np.random.default_rng(0)
    lens = rng.integers(*LENGTHS, PROMPTS, dtype=np.int32, endpoint=True)
    budgets = rng.integers(*BUDGETS, PROMPTS, dtype=np.int32, endpoint=True)
    prompts = rng.integers(1, CONFIG.vocab_size, (PROMPTS, LENGTHS[1]), dtype=np.int32)
    asked = int(budgets.sum())
    generate = functools.partial(
        pj.generate, model, params, max_new_tokens=BUDGETS[1], page_size=16
    )
    outs: dict[str, Any] = {}

    def continuous(budgets: Any = budgets) -> None:
        outs["rollout"] = jax.block_until_ready(
            pj.rollout(
                *(model, params, prompts, lens),
                budgets=budgets,
                max_new_tokens=BUDGETS[1],
                num_slots=SLOTS,
            )
        )

    def static(padded: bool, num_prompts: int = PROMPTS) -> None:
        for i in range(0, num_prompts, SLOTS):
            part = slice(i, i + SLOTS)
            real = None if padded else lens[part]
            jax.block_until_ready(generate(prompts[part], real))

    continuous(np.zeros_like(budgets))  # compiles
    static(True, SLOTS)
    seconds = interleave(
        {
            "rollout": continuous,
            "static": functools.partial(static, True),
            "unpadded": functools.partial(static, False),
        },
        repeats=1,
        warmup=0,
    )
    alone = _one_by_one(model, params, prompts, lens, budgets)
    rollout = seconds["rollout"][0]
    settings = dict(
        prompts=PROMPTS, slots=SLOTS, lengths=LENGTHS, budgets=BUDGETS, asked=asked
    )
    for name, other in (
        ("static batches, padded to the longest", seconds["static"][0]),
        ("static batches, prompts not padded", seconds["unpadded"][0]),
        (f"one at a time, {ONE_BY_ONE} prompts scaled to all", alone),
    ):
        yield Case(
            f"rollout of 256 prompts against {name}",
            asked / rollout,
            "tokens/s",
            "its speed",
            other / rollout,
            settings,
        )
    yield from _curves(outs["rollout"].stats, settings)


def _one_by_one(
    model: pj.PagedModel, params: Any, prompts: Any, lens: Any, budgets: Any
) -> float:
    """Runs some prompts alone, each to its own budget, and scales to all tokens."""
    start = functools.partial(
        pj.start_generation, model, params, max_new_tokens=BUDGETS[1], page_size=16
    )

    def run(i: int) -> None:
        state = start(prompts[i : i + 1], lens[i : i + 1])
        steps = int(budgets[i]) - 1
        state = pj.continue_generation(model, params, state, num_steps=steps)
        jax.block_until_ready(state)

    run(0)
    begin = time.perf_counter()
    for i in range(ONE_BY_ONE):
        run(i)
    took = time.perf_counter() - begin
    return took * float(budgets.sum()) / float(budgets[:ONE_BY_ONE].sum())


def _curves(stats: pj.RolloutStats, settings: dict[str, Any]) -> Iterator[Case]:
    steps, stride = int(stats.num_steps), int(stats.stride)
    entries = -(-steps // stride)
    live = np.asarray(stats.live_slots)[:entries] / SLOTS
    share = np.asarray(stats.kv_share)[:entries]
    PLOT.parent.mkdir(exist_ok=True)
    PLOT.write_text(
        draw_curves({"occupancy of the slots": live, "useful share of KV": share})
    )
    settings = dict(settings, steps=steps, mixed_steps=int(stats.num_mixed_steps))
    for name, curve in (
        ("occupancy of the slots", live),
        ("useful share of KV", share),
    ):
        tenths = [round(float(part.mean()), 2) for part in np.array_split(curve, 10)]
        yield Case(
            f"{name}, mean over {steps} steps",
            100 * float(curve.mean()),
            "%",
            settings=dict(settings, by_tenth_of_the_run=tenths),
        )


def _samples_of_one_prompt(model: pj.PagedModel, params: Any) -> Iterator[Case]:
    samples, length, new = 8, 512, 32
    rng = np.random.default_rng(1)
    prompt = rng.integers(1, CONFIG.vocab_size, (1, length), dtype=np.int32)
    options = dict(max_new_tokens=new, temperature=1.0, num_slots=samples)
    outs: dict[str, pj.Rollout] = {}

    def run(name: str, call: Callable[[], pj.Rollout]) -> None:
        outs[name] = jax.block_until_ready(call())

    shared = functools.partial(
        pj.rollout, model, params, prompt, num_samples=samples, **options
    )
    apart = functools.partial(
        pj.rollout,
        *(model, params, np.repeat(prompt, samples, axis=0)),
        prefix_entries=0,
        **options,
    )
    seconds = interleave(
        {
            "shared": functools.partial(run, "shared", shared),
            "apart": functools.partial(run, "apart", apart),
        },
        repeats=3,
    )
    stats, alone = outs["shared"].stats, outs["apart"].stats
    yield Case(
        f"{samples} samples of a {length}-token prompt, {new} tokens each",
        samples * new / min(seconds["shared"]),
        "tokens/s",
        "8 independent requests",
        median_ratio(seconds["apart"], seconds["shared"]),
        dict(
            tokens_fed=int(stats.tokens_fed),
            tokens_fed_apart=int(alone.tokens_fed),
            pages_used=int(stats.pages_used),
            pages_used_apart=int(alone.pages_used),
            pages_copied=int(stats.pages_copied),
        ),
    )


def draw_curves(curves: dict[str, np.ndarray]) -> str:
    """Draws curves between 0 and 1 as an SVG."""
    width, height, pad = 640, 240, 30
    colours = ("#1b6ca8", "#c8553d", "#3b8a4f")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + 2 * pad}"'
        f' height="{height + 3 * pad}" font-family="sans-serif" font-size="12">',
        f'<rect x="{pad}" y="{pad}" width="{width}" height="{height}" fill="none"'
        ' stroke="#999"/>',
    ]
    for i, (name, curve) in enumerate(curves.items()):
        x = pad + np.linspace(0, width, len(curve))
        y = pad + height * (1 - np.clip(curve, 0, 1))
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
        colour = colours[i % len(colours)]
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}"'
            ' stroke-width="1.5"/>'
            f'<text x="{pad + 220 * i}" y="{height + 2 * pad}" fill="{colour}">'
            f"{name}</text>"
        )
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    run_cli(main)
