"""Paged attention on XLA against gathering everything and a softmax.

The baseline gathers the whole context of every slot into one dense array and runs the
plain formula, which is what paged attention is without a loop over pages. Both run in
turn in one process. `ratio` is baseline time over paged time, so more than 1 is
faster; `of_roofline` is the useful bytes per second (the keys and values a slot
holds, read once) over those of a plain threaded read measured in the same run.
"""

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks._harness import (
    Case,
    interleave,
    make_roofline,
    median_ratio,
    run_cli,
)
from pagedjax import paged_attention, ragged_paged_attention

PAGE_SIZE = 16
LARGE = (32, 8, 128)  # (H, K, D) of an 8B model
SMALL = (9, 3, 64)  # of SmolLM2-135M

# name, layers in one program, slots' lengths, (H, K, D)
DECODE = [
    ("decode_8x4096_large", 1, [4096] * 8, LARGE),
    ("decode_8x256_large", 4, [256] * 8, LARGE),
    ("decode_8x64_large", 8, [64] * 8, LARGE),
    ("decode_1x256_small", 30, [256], SMALL),
    ("decode_8x64_small", 30, [64] * 8, SMALL),
    ("decode_8x256_small", 30, [256] * 8, SMALL),
    ("decode_8x1024_small", 10, [1024] * 8, SMALL),
    ("decode_32x256_small", 10, [256] * 32, SMALL),
    ("decode_8_mixed_to_1024_small", 10, [16, 64, 96, 128, 256, 384, 768, 1024], SMALL),
]
# name, layers in one program, length, rows, (H, K, D)
PREFILL = [
    ("prefill_512_small", 4, 512, 512, SMALL),
    ("prefill_512_after_512_small", 4, 1024, 512, SMALL),
    ("prefill_512_large", 1, 512, 512, LARGE),
]

PAGED_DECODE = functools.partial(paged_attention, implementation="xla")
PAGED_PREFILL = functools.partial(ragged_paged_attention, implementation="xla")

Arrays = tuple[jax.Array, ...]


def main() -> Iterable[Case]:
    """Yields one case per shape, and the roofline."""
    read = make_roofline()
    roofline = statistics.median(read() for _ in range(5))
    yield Case("memory_read", roofline / 1e9, "GB/s", settings={"threads": 2})
    for name, layers, lengths, heads in DECODE:
        arrays = make_arrays(lengths, len(lengths), heads)
        yield measure(
            name, layers, PAGED_DECODE, dense_decode, arrays, lengths, roofline
        )
    for name, layers, length, rows, heads in PREFILL:
        arrays = (*make_arrays([length], rows, heads), jnp.array([0, rows], jnp.int32))
        yield measure(
            name, layers, PAGED_PREFILL, dense_prefill, arrays, [length], None
        )


def make_arrays(
    lengths: Sequence[int], rows: int, heads: tuple[int, int, int]
) -> Arrays:
    """Makes float32 queries and a pool in which the slots own shuffled pages."""
    num_heads, num_kv_heads, head_dim = heads
    rng = np.random.default_rng(0)
    needs = [-(-length // PAGE_SIZE) for length in lengths]
    num_pages = sum(needs)
    table = np.full((len(lengths), max(needs)), num_pages, np.int32)
    pages = iter(rng.permutation(num_pages))
    for slot, need in enumerate(needs):
        table[slot, :need] = [next(pages) for _ in range(need)]
    shape = (num_pages, PAGE_SIZE, num_kv_heads, head_dim)
    q = rng.standard_normal((rows, num_heads, head_dim), np.float32)
    k_pages = rng.standard_normal(shape, np.float32)
    v_pages = rng.standard_normal(shape, np.float32)
    seq_lens = np.array(lengths, np.int32)
    return tuple(jnp.asarray(x) for x in (q, k_pages, v_pages, table, seq_lens))


def measure(
    name: str,
    layers: int,
    paged: Callable[..., jax.Array],
    dense: Callable[..., jax.Array],
    arrays: Arrays,
    lengths: Sequence[int],
    roofline: float | None,
) -> Case:
    """Times `layers` calls in one program, each fed the queries of the last."""
    compiled = {
        "paged": jax.jit(functools.partial(repeat, paged, layers)),
        "dense": jax.jit(functools.partial(repeat, dense, layers)),
    }
    results = {key: np.asarray(run(*arrays)) for key, run in compiled.items()}
    np.testing.assert_allclose(results["paged"], results["dense"], atol=1e-5)
    runs = {
        key: functools.partial(lambda run: jax.block_until_ready(run(*arrays)), run)
        for key, run in compiled.items()
    }
    seconds = interleave(runs, repeats=9)
    per_layer = statistics.median(seconds["paged"]) / layers
    num_heads, head_dim = arrays[0].shape[1:]
    num_kv_heads = arrays[1].shape[2]
    settings = {
        "lengths": lengths
        if len(set(lengths)) > 1
        else f"{len(lengths)} x {lengths[0]}",
        "rows": arrays[0].shape[0],
        "heads": (num_heads, num_kv_heads, head_dim),
        "page_size": PAGE_SIZE,
        "implementation": "xla",
        "dtype": "float32",
        "layers": layers,
    }
    if roofline is not None:
        useful = 2 * 4 * sum(lengths) * num_kv_heads * head_dim
        settings["of_roofline"] = round(useful / per_layer / roofline, 3)
    return Case(
        name,
        per_layer * 1e3,
        "ms per layer",
        "gather everything, then softmax",
        median_ratio(seconds["dense"], seconds["paged"]),
        settings,
    )


def repeat(
    attention: Callable[..., jax.Array],
    layers: int,
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_indices: jax.Array,
    *lens: jax.Array,
) -> jax.Array:
    """Runs attention `layers` times in a scan: the output is the next query.

    Each layer has pages of its own, as in a model: with the same pages everywhere XLA
    would gather the context once, before the loop, and flatter the baseline.
    """
    num_pages = k_pages.shape[0]

    def layer(rows: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
        moved = (page_indices + i) % num_pages
        table = jnp.where(page_indices < num_pages, moved, num_pages)
        return attention(rows, k_pages, v_pages, table, *lens), None

    return lax.scan(layer, q, jnp.arange(layers, dtype=jnp.int32))[0]


def dense_decode(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_indices: jax.Array,
    seq_lens: jax.Array,
) -> jax.Array:
    """Gathers the whole table's width, then attends: the baseline."""
    num_slots, num_heads, head_dim = q.shape
    num_kv_heads = k_pages.shape[2]
    context = (num_slots, -1, num_kv_heads, head_dim)
    keys, values = (x[page_indices].reshape(context) for x in (k_pages, v_pages))
    q = q.reshape(num_slots, num_kv_heads, -1, head_dim) / math.sqrt(head_dim)
    scores = jnp.einsum("skgd,stkd->skgt", q, keys)
    seen = jnp.arange(keys.shape[1])[None] < seq_lens[:, None]
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    out = jnp.einsum("skgt,stkd->skgd", jax.nn.softmax(scores), values)
    return out.reshape(num_slots, num_heads, head_dim)


def dense_prefill(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_indices: jax.Array,
    seq_lens: jax.Array,
    cu_q_lens: jax.Array,
) -> jax.Array:
    """Gathers one slot's pages, then attends causally: the baseline."""
    del cu_q_lens
    rows, num_heads, head_dim = q.shape
    num_kv_heads = k_pages.shape[2]
    context = (-1, num_kv_heads, head_dim)
    keys, values = (x[page_indices[0]].reshape(context) for x in (k_pages, v_pages))
    q = q.reshape(rows, num_kv_heads, -1, head_dim) / math.sqrt(head_dim)
    scores = jnp.einsum("rkgd,tkd->kgrt", q, keys)
    places = seq_lens[0] - rows + jnp.arange(rows)
    seen = jnp.arange(keys.shape[0])[None] <= places[:, None]
    scores = jnp.where(seen[None, None], scores, -jnp.inf)
    out = jnp.einsum("kgrt,tkd->rkgd", jax.nn.softmax(scores), values)
    return out.reshape(rows, num_heads, head_dim)


if __name__ == "__main__":
    run_cli(main)
