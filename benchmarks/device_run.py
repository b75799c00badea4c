"""What there is to learn from a GPU in four minutes: is it right, and how fast?

    python -m benchmarks.device_run --out results.json

First every implementation that runs on the device against a float64 loop in NumPy, then
decode: useful bytes per second over those of a plain copy, and the time against that of
the Mosaic GPU kernel, of jax's own paged attention for GPUs and of a dense
`jax.nn.dot_product_attention` over contexts of the same lengths. Each comparison takes
turns in one process; medians. On a CPU it runs with small sizes, to show that the
script itself works.
"""

import argparse
import json
import math
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pagedjax as pj

# (H, K, D), (slots, context), dtype
_SHAPES = [
    ((32, 8, 128), (32, 4096), "bfloat16"),
    ((32, 8, 128), (1, 32768), "bfloat16"),
    ((32, 32, 128), (8, 4096), "bfloat16"),
    ((9, 3, 64), (64, 2048), "bfloat16"),
    ((32, 8, 128), (32, 4096), "int8"),
]
_SMALL = [((4, 2, 64), (2, 128), "float32"), ((4, 2, 64), (2, 128), "int8")]
_TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}
_MOSAIC = "pallas_mosaic_gpu"
_LAYERS = 16  # calls in one timed program, each on pages of its own


def main() -> int:
    """Runs everything; exit status 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", help="where to write the JSON; default: print only")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore", DeprecationWarning)
    device = jax.devices()[0]
    on_gpu = device.platform != "cpu"
    rows = list(_check_all())
    rows += _measure_all(_SHAPES if on_gpu else _SMALL, 64 if not on_gpu else 2048)
    report = {
        "device": device.device_kind,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "rows": rows,
    }
    text = json.dumps(report, indent=1)
    print(text)
    if chosen.out:
        with open(chosen.out, "w") as file:
            file.write(text + "\n")
    return 0 if all(row.get("ok", True) for row in rows) else 1


# --- is it right? ---------------------------------------------------------------------


def _check_all() -> list[dict[str, Any]]:
    """Compares every usable implementation with the loop, decode and ragged."""
    usable = [n for n, (able, _) in pj.available_implementations().items() if able]
    rows = []
    for name in usable:
        for dtype in _TOLERANCES:
            for window in (None, 9):
                try:
                    row = _check(name, dtype, window)
                except NotImplementedError as refusal:
                    row = {"case": f"{name} {dtype}", "refused": str(refusal)}
                rows.append(row)
                print(rows[-1], file=sys.stderr, flush=True)
    return rows


def _check(name: str, dtype: str, window: int | None) -> dict[str, Any]:
    heads, kv_heads, dim, size = 6, 2, 64, 16
    lens, q_lens = np.array([33, 1, 0, 70]), np.array([9, 1, 0, 3])
    call = _Call.draw((heads, kv_heads, dim), lens, size, dtype)
    q = jax.random.normal(jax.random.key(1), (int(q_lens.sum()), heads, dim))
    q = q.astype(dtype)
    cu_q_lens = jnp.asarray(np.cumsum([0, *q_lens]), jnp.int32)
    options: dict[str, Any] = dict(window=window, implementation=name)
    out = pj.ragged_paged_attention(q, *call.arrays, cu_q_lens, **options)
    want = _loop(np.asarray(q, np.float64), call, lens, q_lens, window)
    error = float(np.max(np.abs(np.asarray(out, np.float64) - want)))
    # Decode: the last row of each slot that has one.
    ends = np.cumsum(q_lens) - 1
    decode = pj.paged_attention(q[np.maximum(ends, 0)], *call.arrays, **options)
    rows = np.flatnonzero(q_lens)
    got = np.asarray(decode, np.float64)[rows]
    error = max(error, float(np.max(np.abs(got - want[ends[rows]]))))
    return {
        "case": f"{name} {dtype} window {window} against a float64 loop",
        "largest error": error,
        "ok": bool(error < _TOLERANCES[dtype]),
    }


def _loop(
    q: np.ndarray, call: "_Call", lens: np.ndarray, q_lens: np.ndarray, window: Any
) -> np.ndarray:
    k_pages, v_pages, table, _ = (np.asarray(x, np.float64) for x in call.arrays)
    size, group = k_pages.shape[1], q.shape[1] // k_pages.shape[2]
    out = np.zeros(q.shape)
    row = 0
    for slot, (length, count) in enumerate(zip(lens, q_lens, strict=True)):
        pages = table[slot].astype(int)
        for i in range(count):
            end = length - count + i + 1
            start = 0 if window is None else max(0, end - window)
            at = np.arange(start, end)
            k, v = (x[pages[at // size], at % size] for x in (k_pages, v_pages))
            for head in range(q.shape[1]):
                scores = k[:, head // group] @ q[row, head] / math.sqrt(q.shape[2])
                weights = np.exp(scores - scores.max())
                out[row, head] = weights @ v[:, head // group] / weights.sum()
            row += 1
    return out


class _Call:
    """Pages of random numbers, in random order.

    Attributes:
        arrays: k_pages, v_pages, page_indices, seq_lens.
        scales: those of quantised pages, by name.
    """

    def __init__(self, arrays: tuple[Any, ...], scales: dict[str, Any]) -> None:
        self.arrays = arrays
        self.scales = scales

    @classmethod
    def draw(
        cls,
        heads: tuple[int, int, int],
        lens: np.ndarray,
        size: int,
        dtype: str,
        layers: int = 1,
    ) -> "_Call":
        """Draws pages for sequences of these lengths, `layers` times as many."""
        _, kv_heads, dim = heads
        width = max(1, -(-int(lens.max()) // size))
        pages = len(lens) * width * layers
        table = np.random.default_rng(0).permutation(len(lens) * width)
        table = table.reshape(len(lens), width).astype(np.int32)
        shape = (pages, size, kv_heads, dim)
        keys = jax.random.split(jax.random.key(0))
        scales = {}
        if dtype == "int8":
            k, v = (jax.random.randint(x, shape, -127, 128, jnp.int8) for x in keys)
            scales = {x: jnp.full(shape[:3], 0.02) for x in ("k_scales", "v_scales")}
        else:
            k, v = (jax.random.normal(x, shape, jnp.bfloat16) for x in keys)
            k, v = k.astype(dtype), v.astype(dtype)
        return cls((k, v, jnp.asarray(table), jnp.asarray(lens, jnp.int32)), scales)


# --- how fast? ------------------------------------------------------------------------


def _measure_all(shapes: list[Any], copy_mib: int) -> list[dict[str, Any]]:
    rows = []
    copy = _copy_speed(copy_mib * 2**20)
    for heads, (slots, context), dtype in shapes:
        rows.append(_measure(heads, slots, context, dtype, copy))
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def _copy_speed(size: int) -> Callable[[], float]:
    """Makes a function that gives bytes moved per second by a plain copy."""
    array = jnp.ones((size // 4,), jnp.float32)
    run = jax.jit(lambda x: x + 1)
    jax.block_until_ready(run(array))

    def measure() -> float:
        began = time.perf_counter()
        jax.block_until_ready(run(array))
        return 2 * array.nbytes / (time.perf_counter() - began)

    return measure


def _measure(
    heads: tuple[int, int, int], slots: int, context: int, dtype: str, copy: Any
) -> dict[str, Any]:
    q_dtype = "bfloat16" if dtype == "int8" else dtype
    lens = np.full((slots,), context)
    call = _Call.draw(heads, lens, 16, dtype, _LAYERS)
    k, v, table, seq_lens = call.arrays
    q = jax.random.normal(jax.random.key(2), (slots, heads[0], heads[2]), q_dtype)
    pages = table.size

    def paged(q: Any, k: Any, v: Any, scales: Any, name: str | None) -> Any:
        def layer(q: Any, i: Any) -> Any:
            rows = table + i * pages
            options = {**scales, "implementation": name}
            return pj.paged_attention(q, k, v, rows, seq_lens, **options), None

        return jax.lax.scan(layer, q, jnp.arange(_LAYERS, dtype=jnp.int32))[0]

    def run_of(name: str | None) -> tuple[Any, tuple]:
        return jax.jit(partial(paged, name=name)), (q, k, v, call.scales)

    runs = {"paged": run_of(None)}
    if dtype != "int8":
        if pj.available_implementations()[_MOSAIC][0]:
            runs["mosaic"] = run_of(_MOSAIC)
        dense = jnp.zeros((slots, context, *k.shape[2:]), k.dtype)
        runs["dense"] = (jax.jit(_dense), (q, dense, dense, seq_lens))
        if jax.default_backend() != "cpu" and heads[0] // heads[1] <= 16:
            # It wants the heads first.
            first = [x[:pages].transpose(2, 0, 1, 3) for x in (k, v)]
            runs["jax"] = (jax.jit(_jax_own), (q, *first, table, seq_lens))
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    copies = []
    failed = {}
    for round_ in range(6):
        copies.append(copy())
        for name, (run, arguments) in runs.items():
            if name in failed:
                continue
            began = time.perf_counter()
            try:
                jax.block_until_ready(run(*arguments))
            except Exception as error:  # a baseline may not support a shape
                if name == "paged":
                    raise
                failed[name] = " ".join(str(error).split())[:200]
            if round_ > 0:
                seconds[name].append(time.perf_counter() - began)
    useful = 2 * lens.sum() * heads[1] * heads[2] * k.dtype.itemsize
    if call.scales:
        useful += 2 * lens.sum() * heads[1] * 4
    median = {n: statistics.median(s) for n, s in seconds.items() if n not in failed}
    speed = float(useful) * _LAYERS / median["paged"]
    row: dict[str, Any] = {
        "case": f"decode H{heads[0]} K{heads[1]} D{heads[2]} {slots}x{context} {dtype}",
        "GB/s": speed / 1e9,
        "of a copy": speed / statistics.median(copies),
    }
    # The baselines run one layer per call.
    for name, layers in (("mosaic", 1), ("dense", _LAYERS), ("jax", _LAYERS)):
        if name in median:
            row[f"faster than {name}"] = median[name] * layers / median["paged"]
        elif name in failed:
            row[name] = failed[name]
    return row


def _dense(q: Any, k: Any, v: Any, lens: Any) -> Any:
    return jax.nn.dot_product_attention(q[:, None], k, v, key_value_seq_lengths=lens)[
        :, 0
    ]


def _jax_own(q: Any, k: Any, v: Any, table: Any, lens: Any) -> Any:
    from jax.experimental.pallas.ops.gpu import paged_attention as own

    return own.paged_attention(q, k, v, table, lens)


if __name__ == "__main__":
    sys.exit(main())
