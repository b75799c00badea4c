"""The native host attention against the memory of this machine, and against XLA.

Decode reads every key and value once, so its limit is the speed of the memory: `ratio`
of the `decode_...` cases is useful bytes per second over those of a plain threaded read
that takes turns with it. The last cases compare with XLA, with gathering everything,
and with the detection of shared prefixes switched off; there `ratio` is baseline time
over host time. A `..._bound` case is what no implementation can pass: the baseline's
time over that of a plain threaded read of the bytes that the result depends on, each
once. `settings` names the kernels that ran. The read walks an array that NumPy asks the
system to hold in large pages, so the pool is moved into such pages too
(`host.use_large_pages`), except where the case says `small_pages`.
"""

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from ascend_bridge import host
from benchmarks._harness import (
    Case,
    interleave,
    make_roofline,
    median_ratio,
    run_cli,
)
from benchmarks.bench_attention import dense_decode
from pagedjax import paged_attention, ragged_paged_attention

LARGE, SMALL, WIDE = (32, 8, 128), (9, 3, 64), (32, 32, 128)  # (H, K, D)
POOL_BYTES = 256 * 2**20  # keys and values of a case; no cache holds them
READ_BYTES = 256 * 2**20

Arrays = tuple[jax.Array, ...]


def main() -> Iterable[Case]:
    """Yields a case for each shape, then the comparisons."""
    usable, reason = host.usable()
    if not usable:
        raise SystemExit(f"nothing to measure: {reason}")
    read = make_roofline(READ_BYTES)
    for dtype in ("float32", "bfloat16"):
        for heads in (LARGE, SMALL, WIDE):
            for context, page_size in ((1024, 16), (4096, 16), (16384, 16), (4096, 64)):
                yield against_memory(read, dtype, heads, context, page_size)
        yield against_memory(read, dtype, LARGE, 32768, 16, slots=1)
    yield against_memory(read, "float32", LARGE, 4096, 16, large_pages=False)
    yield against_memory(read, "bfloat16", SMALL, 4096, 16, large_pages=False)
    for dtype in ("float16", "int8", "float8_e4m3fn"):
        yield against_memory(read, dtype, LARGE, 4096, 16)
    for dtype in ("float32", "bfloat16"):
        yield from against_xla(read, dtype)
    for heads in (LARGE, SMALL, WIDE):
        yield from sharing(heads)
    for heads in (LARGE, WIDE):
        yield from sharing(heads, "bfloat16")
    yield prefill("prefill_512", 512, 512)
    yield prefill("prefill_512_bfloat16", 512, 512, "bfloat16")
    yield prefill("4_queries_16384_keys", 4, 16384)


def make_arrays(
    slots: int,
    context: int,
    heads: tuple[int, int, int],
    dtype: str = "float32",
    page_size: int = 16,
    shared: int = 0,
    num_pages: int = 0,
) -> Arrays:
    """Makes queries and a pool in which slots own shuffled pages, some shared."""
    num_heads, _, head_dim = heads
    width, common = -(-context // page_size), shared // page_size
    own = slots * (width - common)
    num_pages = num_pages or common + own
    ids = np.random.default_rng(0).permutation(num_pages).astype(np.int32)
    table = np.empty((slots, width), np.int32)
    table[:, :common] = ids[:common]
    table[:, common:] = ids[common : common + own].reshape(slots, -1)
    key = jax.random.key(1)
    q_dtype = "bfloat16" if jnp.dtype(dtype).itemsize == 1 else dtype
    return (
        jax.random.normal(key, (slots, num_heads, head_dim), q_dtype),
        *make_pool(num_pages, (page_size, *heads[1:]), dtype),
        jnp.asarray(table),
        jnp.full((slots,), context, jnp.int32),
    )


@functools.lru_cache(maxsize=1)
def make_pool(num_pages: int, page: tuple[int, ...], dtype: str) -> Arrays:
    """Makes keys and values; pages repeat a few, as drawing all would take long."""

    def pages(key: jax.Array) -> jax.Array:
        drawn = jax.random.normal(key, (64, *page))
        if jnp.dtype(dtype).itemsize == 1:
            drawn = jnp.round(drawn * 30)
        whole = jnp.tile(drawn.astype(dtype), (-(-num_pages // 64), 1, 1, 1))
        return whole[:num_pages]

    keys = jax.random.split(jax.random.key(0), 2)
    return pages(keys[0]), pages(keys[1])


def against_memory(
    read,
    dtype: str,
    heads: tuple,
    context: int,
    page_size: int,
    slots: int = 0,
    large_pages: bool = True,
) -> Case:
    """Times decode and a plain read in turn."""
    token = 2 * heads[1] * heads[2] * jnp.dtype(dtype).itemsize
    slots = slots or max(1, POOL_BYTES // (context * token))
    num_pages = max(POOL_BYTES // (page_size * token), slots * -(-context // page_size))
    arrays = make_arrays(slots, context, heads, dtype, page_size, num_pages=num_pages)
    moved = host.use_large_pages(*arrays[1:3]) if large_pages else 0
    attend = host.paged_attention
    if jnp.dtype(dtype).itemsize == 1:
        scales = jnp.full(arrays[1].shape[:3], 0.03)
        attend = functools.partial(attend, k_scales=scales, v_scales=scales)
        token += 2 * heads[1] * scales.dtype.itemsize
    run = blocking(attend, arrays)
    seconds = interleave({"host": run, "read": read}, repeats=5)
    useful = slots * context * token
    share = median_ratio(seconds["read"], seconds["host"]) * useful / READ_BYTES
    suffix = "" if large_pages else "_small_pages"
    shape = "x".join(map(str, heads))
    return Case(
        f"decode_{slots}x{context}_{shape}_{dtype}_page{page_size}{suffix}",
        useful / np.median(seconds["host"]) / 1e9,
        "GB/s",
        "plain threaded read",
        share,
        {
            "heads": heads,
            "dtype": dtype,
            "page_size": page_size,
            "bytes_in_large_pages": moved,
            **kernels(),
        },
    )


def against_xla(read, dtype: str) -> Iterable[Case]:
    """Times 8 sequences of 4096 tokens against XLA, and against gathering all.

    Each with the host alone, and after reads of other memory, more than caches hold:
    gathering leaves them full of what is still to be written to memory, and the next
    call, whoever it is, would pay for that.
    """
    arrays = make_arrays(8, 4096, LARGE, dtype)
    host.use_large_pages(*arrays[1:3])
    needed = sum(pages.nbytes for pages in arrays[1:3])
    least = [needed / READ_BYTES * each for each in interleave({"read": read})["read"]]
    run = blocking(host.paged_attention, arrays)
    xla = functools.partial(paged_attention, implementation="xla")
    for name, baseline, attention in (
        ("xla", "XLA", xla),
        ("dense", "gather everything, softmax", dense_decode),
    ):
        runs = {"host": run, name: blocking(attention, arrays)}
        seconds = interleave(runs, before=lambda: [read() for _ in range(3)])
        yield from with_bound(
            f"decode_8x4096_{dtype}_against_{name}",
            baseline,
            median_ratio(seconds[name], seconds["host"]),
            seconds["host"],
            least,
            {"heads": LARGE, "dtype": dtype, "page_size": 16},
        )


def with_bound(
    name: str,
    baseline: str,
    ratio: float,
    seconds: list[float],
    least: list[float],
    settings: dict,
) -> Iterable[Case]:
    """Reports a ratio, and what it would be in the time of the least reads, if any."""
    took = float(np.median(seconds)) * 1e3
    yield Case(name, took, "ms", baseline, ratio, settings)
    if not least:
        return
    bound = float(np.median(least)) * 1e3
    yield Case(f"{name}_bound", bound, "ms", baseline, ratio * took / bound, settings)


def sharing(heads: tuple[int, int, int], dtype: str = "float32") -> Iterable[Case]:
    """Times 32 slots with 2048 shared tokens and without, detection on and off."""
    for shared in (2048, 0):
        slots = 32 if shared else 8  # nothing shared: the pool would not fit
        arrays = make_arrays(slots, 2112, heads, dtype, shared=shared)
        off = functools.partial(host.paged_attention, share_prefixes=False)
        runs = {
            "on": blocking(host.paged_attention, arrays),
            "off": blocking(off, arrays),
        }
        seconds = interleave(runs, repeats=21)
        suffix = "" if dtype == "float32" else f"_{dtype}"
        name = f"shared_{shared}_of_2112_{'x'.join(map(str, heads))}{suffix}"
        least = []
        if shared:
            # An array of the pool's size: what a cache holds is read faster.
            read = make_roofline(sum(pages.nbytes for pages in arrays[1:3]))
            least = interleave({"read": read}, repeats=21)["read"]
        yield from with_bound(
            name,
            "detection off",
            median_ratio(seconds["off"], seconds["on"]),
            seconds["on"],
            least,
            {"slots": slots, "heads": heads, "dtype": dtype, **kernels()},
        )


def prefill(name: str, queries: int, length: int, dtype: str = "float32") -> Case:
    """Times the last queries of one sequence, per layer of SmolLM2-135M."""
    arrays = make_arrays(1, length, SMALL, dtype)
    q = jnp.broadcast_to(arrays[0], (queries, *arrays[0].shape[1:]))
    arrays = (q, *arrays[1:], jnp.array([0, queries], jnp.int32))
    xla = functools.partial(ragged_paged_attention, implementation="xla")
    runs = {
        "host": blocking(host.ragged_paged_attention, arrays),
        "xla": blocking(xla, arrays),
    }
    seconds = interleave(runs)
    return Case(
        name,
        float(np.median(seconds["host"])) * 1e3,
        "ms",
        "XLA",
        median_ratio(seconds["xla"], seconds["host"]),
        {"heads": SMALL, "dtype": dtype, **kernels()},
    )


def kernels() -> dict[str, str]:
    """Returns what `host.usable` says of the kernels that run."""
    return {"kernels": host.usable()[1]}


def blocking(attention, arrays: Arrays):
    """Returns the compiled call as a function that waits for its result."""
    compiled = jax.jit(attention)
    return lambda: jax.block_until_ready(compiled(*arrays))


if __name__ == "__main__":
    run_cli(main)
