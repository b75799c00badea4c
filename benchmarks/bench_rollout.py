"""Rollouts against batches that wait for their longest member, and one at a time.

A random Llama of the widths of SmolLM2-135M with 8 of its 30 layers and a vocabulary
of 8,192, in float32, 132 MB: weights are what a step costs, as in serving. 256
prompts of 16 to 512 tokens, budgets of 16 to 256 tokens, 32 slots. A batch of
`generate` runs until its longest sample has ended, because a static batch has one
budget; its prompts are padded to the longest (`padded`), or not. Only tokens that
were asked for count, prefill included in the time. Forward passes that feed prompts
have 256 tokens in all of them. Batches do the same work one after the other, so 2 of
the 8 are run, before and between the rollouts, and scaled to 8; so are 8 prompts
alone. The occupancy of the slots and the share of the token places in used pages that
hold a token are written as curves to `build/rollout.svg`.
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
    num_layers=8,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    hidden_size=576,
    ffn_size=1536,
    vocab_size=8192,
    max_seq_len=1024,
)
OPTIONS: dict[str, Any] = dict(max_new_tokens=BUDGETS[1], page_size=16, chunk_size=256)
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
    outs: dict[bool, pj.Rollout] = {}

    def continuous(longest_first: bool, budgets: Any = budgets) -> None:
        outs[longest_first] = jax.block_until_ready(
            pj.rollout(
                *(model, params, prompts, lens),
                budgets=budgets,
                num_slots=SLOTS,
                longest_first=longest_first,
                **OPTIONS,
            )
        )

    def static(is_padded: bool, batch: int) -> None:
        part = slice(batch * SLOTS, (batch + 1) * SLOTS)
        real = None if is_padded else lens[part]
        jax.block_until_ready(
            pj.generate(model, params, prompts[part], real, **OPTIONS)
        )

    seconds: dict[str, list[float]] = {}

    def measure(name: str, run: Callable[..., None], *args: Any) -> None:
        begin = time.perf_counter()
        run(*args)
        seconds.setdefault(name, []).append(time.perf_counter() - begin)

    continuous(True, np.zeros_like(budgets))  # compiles
    static(True, 0)
    alone = _make_alone(model, params, prompts, lens, budgets)
    alone(0)
    for batch, longest_first in ((0, True), (1, False)):
        measure("padded", static, True, batch)
        measure("not padded", static, False, batch)
        measure(f"longest first: {longest_first}", continuous, longest_first)
        for i in range(batch, ONE_BY_ONE, 2):
            measure("alone", alone, i)
    batches = PROMPTS // SLOTS
    padded, unpadded = (
        batches * float(np.mean(seconds[name])) for name in ("padded", "not padded")
    )
    single = sum(seconds["alone"]) * asked / int(budgets[:ONE_BY_ONE].sum())
    settings = dict(
        prompts=PROMPTS, slots=SLOTS, lengths=LENGTHS, budgets=BUDGETS, asked=asked
    )
    for order, longest_first, name, other in (
        ("", True, "static batches, padded to the longest", padded),
        ("", True, "static batches, prompts not padded", unpadded),
        ("", True, f"one at a time, {ONE_BY_ONE} prompts scaled to all", single),
        (" in the order given", False, "static batches, padded", padded),
    ):
        (took,) = seconds[f"longest first: {longest_first}"]
        yield Case(
            f"rollout of 256 prompts{order} against {name}",
            asked / took,
            "tokens/s",
            "its speed",
            other / took,
            settings,
        )
    yield from _curves(outs[True].stats, settings)


def _make_alone(
    model: pj.PagedModel, params: Any, prompts: Any, lens: Any, budgets: Any
) -> Callable[[int], None]:
    """Makes a function that runs one prompt alone, to its own budget."""
    start = functools.partial(pj.start_generation, model, params, **OPTIONS)

    def run(i: int) -> None:
        state = start(prompts[i : i + 1], lens[i : i + 1])
        steps = int(budgets[i]) - 1
        state = pj.continue_generation(model, params, state, num_steps=steps)
        jax.block_until_ready(state)

    return run


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
