"""The Mosaic GPU kernels in their interpreter, against the float64 loop; their choice.

The interpreter is public from jax 0.11 on; `make core312` runs these there. It plays
the copies, barriers and warp groups of the GPU, fills fresh memory with NaN and looks
for races, but not where wgmma reads, nor at what is on its way when a block ends: the
functions `watch_*` do. `mutate_pallas_mosaic.py` says what of all that is noticed.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Arrays, assert_matches_oracle, make_arrays
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh
from pallas_tpu_cases import quantise

import pagedjax as pj
from pallas_kernels import (
    gpu_blocks,
    gpu_mosaic_attention,
    gpu_mosaic_pages,
    gpu_mosaic_sizes,
)

pytestmark = pytest.mark.core
BOTH = pytest.mark.parametrize("ragged", [False, True], ids=["decode", "ragged"])
interpreted = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"),
    reason=f"NOT TESTED: jax {jax.__version__} cannot interpret Mosaic GPU kernels",
)
# Two slots hold nothing, one a token, one exactly a turn of 64 keys, one five turns and
# queries in the last two of them.
SEQ_LENS = [0, 1, 64, 17, 270, 0]
Q_LENS = [0, 1, 40, 1, 17, 0]


def run_free_of_races(fn: Any, *args: Any, **options: Any) -> Any:
    """Return NumPy results of a kernel in the interpreter; fail if it saw a race."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory

    options["interpret"] = plgpu.InterpretGPUParams(detect_races=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_callbacks, "wgmma", watch_products(gpu_callbacks))
        watched = watch_ends(shared_memory.Barrier)
        patch.setattr(shared_memory.Barrier, "deallocate", watched)
        results = jax.jit(functools.partial(fn, **options))(*map(jnp.asarray, args))
        results = jax.tree.map(np.asarray, results)
    assert not gpu_callbacks.get_races().races_found
    return results


def watch_products(interpreter: Any) -> Callable:
    """Return the interpreter's wgmma, made to find reads of what has not arrived.

    A product must come after every write of what it multiplies: after the wait for a
    copy, and after the `commit_smem` that shows it what threads have stored.
    """
    from jax._src.pallas.mosaic.interpret import race_detection_state as ranges

    multiply = interpreter.wgmma

    def watched(**call: Any) -> Any:
        memory, races = interpreter._get_shared_memory(), interpreter.get_races()
        clock = memory.get_clock(call["thread"]).async_smem_clock
        for side in ("a", "b"):
            key = interpreter.HostAllocationKey.from_array(
                call[f"{side}_allocation_key_as_array"]
            )
            where = interpreter._remove_noop_transforms(call[f"{side}_transforms"])
            access = memory.access(key, jax.tree.map(int, where))
            races.reads[key].append((call["thread"], clock, access.range, "wgmma"))
            for _, written, range_, _ in races.writes[key]:
                late = (written.clock > clock.clock).any()
                if late and ranges._ranges_overlap(access.range, range_):
                    races.races_found = True
        return multiply(**call)

    return watched


def watch_ends(barrier_type: Any) -> Callable:
    """Return a barrier's end, made to fail if copies arrived that nobody waited for."""
    deallocate = barrier_type.deallocate

    def watched(barrier: Any) -> None:
        deallocate(barrier)
        waited = barrier.last_observed_phase_by_thread or not barrier.phase
        assert waited, "a block ended before its copies"

    return watched


def run(arrays: Arrays, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return (out, lse) of the kernel; `options` as its keyword arguments."""
    options = {"scale": arrays.q.shape[-1] ** -0.5, "stages": 2, **options}
    kernel = gpu_mosaic_attention.paged_attention
    if arrays.cu_q_lens is not None:
        kernel = gpu_mosaic_attention.ragged_paged_attention
        options.pop("num_splits", None)
    return run_free_of_races(kernel, *arrays.args(), **options)


def arrays_of(*, ragged: bool, **options: Any) -> Arrays:
    """Return slots of mixed lengths: NaN and garbage wherever nobody may look."""
    shapes = {"page_size": 16, "head_dim": 64, "dtype": "bfloat16", **options}
    slots = shapes.pop("slots", slice(None))
    q_lens = Q_LENS[slots] if ragged else None
    return make_arrays(SEQ_LENS[slots], q_lens=q_lens, padding=3 * ragged, **shapes)


def quantised_arrays_of(kv_dtype: str, q_dtype: str, **options: Any) -> tuple:
    """Return arrays for the oracle, those for the kernel, and scales."""
    arrays = arrays_of(dtype="float32", **options)
    arrays.q = arrays.q.astype(jnp.dtype(q_dtype))
    held, scales = quantise(arrays, jnp.dtype(kv_dtype))
    if kv_dtype != "int8":
        unowned = ~held.owned()
        held.k_pages[unowned] = held.v_pages[unowned] = np.nan
    return arrays, held, scales


CASES = [
    dict(heads=(4, 2)),
    dict(page_size=8, heads=(6, 2), head_dim=128, window=20, soft_cap=2.5),
    dict(page_size=24, heads=(9, 3), dtype="float16", window=1),
    dict(page_size=128, heads=(8, 1), head_dim=256, soft_cap=30.0),
]


@interpreted
@BOTH
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_oracle(case: dict, ragged: bool) -> None:
    options = {x: case[x] for x in ("window", "soft_cap") if x in case}
    shapes = {x: case[x] for x in case if x not in options}
    arrays = arrays_of(ragged=ragged, **shapes)
    # Two parts: one walks two turns, and that of a short context is empty.
    assert_matches_oracle(arrays, *run(arrays, num_splits=2, **options), **options)


INT8 = dict(kv_dtype="int8", q_dtype="bfloat16", heads=(8, 4))
FLOAT8 = dict(
    kv_dtype="float8_e4m3fn",
    q_dtype="bfloat16",
    heads=(4, 4),
    page_size=24,
    window=70,
)
FLOAT16 = dict(
    kv_dtype="float8_e4m3fn",
    q_dtype="float16",
    heads=(8, 8),
    page_size=8,
    head_dim=128,
    window=20,
    soft_cap=2.5,
)


@interpreted
@pytest.mark.parametrize(
    ("case", "ragged"),
    [(INT8, False), (INT8, True), (FLOAT8, True), (FLOAT16, False)],
    ids=["int8-decode", "int8-ragged", "float8-ragged", "float16-decode"],
)
def test_quantised_pages(case: dict, ragged: bool) -> None:
    options = {x: case[x] for x in ("window", "soft_cap") if x in case}
    shapes = {x: case[x] for x in case if x not in options}
    # Without a slot that holds nothing, one token and 17: the interpreter is slow.
    shapes["slots"] = slice(0, None, 2)
    arrays, held, scales = quantised_arrays_of(ragged=ragged, **shapes)
    out, lse = run(held, num_splits=2, **options, **scales)
    assert out.dtype == jnp.dtype(case["q_dtype"])
    assert_matches_oracle(arrays, out, lse, **options)


@interpreted
@BOTH
def test_nan_that_a_row_may_see_shows(ragged: bool) -> None:
    arrays = arrays_of(ragged=ragged)
    arrays.v_pages[arrays.page_indices[3, 0], 0, 1] = np.nan
    assert_only_one_is_nan(run(arrays, num_splits=1)[0], ragged)


@interpreted
def test_nan_scale_that_a_row_may_see_shows() -> None:
    shapes = dict(heads=(8, 4), ragged=True)
    _, held, scales = quantised_arrays_of("int8", "bfloat16", **shapes)
    seen = held.page_indices[3, 0]
    scales["v_scales"] = scales["v_scales"].at[seen, 0, 1:].set(jnp.nan)
    assert_only_one_is_nan(run(held, num_splits=1, **scales)[0], ragged=True)


def assert_only_one_is_nan(out: np.ndarray, ragged: bool) -> None:
    """Check that the row of slot 3 is NaN from its head 2 on, and no other row."""
    rows = np.array([41 if ragged else 3])
    assert np.isnan(out[rows, 2:].astype(np.float32)).all()
    others = np.delete(out, rows, axis=0).astype(np.float32)
    assert len(others) and not np.isnan(others).any()


# --- pages ----------------------------------------------------------------------------


def draw_pages(dtype: str, row: tuple[int, ...] = (3, 16)) -> tuple[np.ndarray, ...]:
    """Return keys and values in 6 pages of 5 tokens; scales for a row without dims."""
    rng = np.random.default_rng(0)
    shape = (2, 6, 5, *row)
    return tuple((100 * rng.standard_normal(shape)).astype(jnp.dtype(dtype)))


@interpreted
@pytest.mark.parametrize(
    ("dtype", "row"),
    [("bfloat16", (3, 16)), ("int8", (3, 16)), ("float32", (4,))],
    ids=str,
)
def test_tokens_are_written_where_they_belong(dtype: str, row: tuple) -> None:
    held = draw_pages(dtype, row)
    new = tuple(x[:2].reshape(10, *row)[:8] for x in draw_pages(dtype, row))
    pages = np.array([0, 5, 6, -1, 3, 3, 2**31 - 1, 2], np.int32)
    offsets = np.array([0, 4, 0, 0, 1, 2, 0, 9], np.int32)
    got = run_free_of_races(gpu_mosaic_pages.write_kv, *held, *new, pages, offsets)
    for was, tokens, now in zip(held, new, got, strict=True):
        want = was.copy()
        for i in (0, 1, 4, 5):
            want[pages[i], offsets[i]] = tokens[i]
        np.testing.assert_array_equal(now, want)


@interpreted
@pytest.mark.parametrize(
    ("dtype", "row"),
    [("float32", (3, 16)), ("float8_e4m3fn", (3, 16)), ("float32", (4,))],
    ids=str,
)
def test_pages_are_copied_and_no_others_change(dtype: str, row: tuple) -> None:
    held = draw_pages(dtype, row)
    src = np.array([1, 6, 2, 0, -1, 1], np.int32)
    dst = np.array([3, 4, 5, -1, 4, 0], np.int32)
    got = run_free_of_races(gpu_mosaic_pages.copy_pages, *held, src, dst)
    for was, now in zip(held, got, strict=True):
        want = was.copy()
        want[[3, 5, 0]] = was[[1, 2, 1]]
        np.testing.assert_array_equal(now, want)


def test_rows_that_tma_cannot_move_are_refused() -> None:
    pages, ids = jnp.zeros((2, 2, 1, 10), jnp.int8), jnp.zeros(1, jnp.int32)
    with pytest.raises(NotImplementedError, match="20 bytes, TMA moves multiples"):
        gpu_mosaic_pages.copy_pages(pages, pages, ids, ids)
    with pytest.raises(NotImplementedError, match="10 bytes, TMA moves multiples"):
        gpu_mosaic_pages.write_kv(pages, pages, pages[0], pages[0], ids, ids)


# --- blocks ---------------------------------------------------------------------------


def test_every_row_is_in_one_block() -> None:
    q_lens, seq_lens = np.array([0, 9, 1, 8, 0]), np.array([5, 9, 40, 12, 0])
    cu_q_lens = np.cumsum([0, *q_lens]).astype(np.int32)
    tokens = int(q_lens.sum()) + 3
    cut = gpu_blocks.cut_blocks(
        jnp.asarray(seq_lens, jnp.int32),
        jnp.asarray(cu_q_lens),
        num_tokens=tokens,
        rows=4,
    )
    seen = []
    for slot, start, count, position in zip(*map(np.asarray, cut[:4]), strict=True):
        assert count <= 4
        for i in range(count):
            seen.append((start + i, slot, position + i))
    want = []
    for slot, (queries, length) in enumerate(zip(q_lens, seq_lens, strict=True)):
        for i in range(queries):
            want.append((cu_q_lens[slot] + i, slot, length - queries + i))
    assert seen == want


# --- the choice -----------------------------------------------------------------------


def on_gpu(kind: str) -> Any:
    """Return the context of an ahead-of-time compile for a GPU."""
    device = AbstractDevice(kind, 1, "cuda")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@BOTH
@pytest.mark.parametrize("quantised", [False, True], ids=["", "int8"])
def test_a_named_kernel_is_in_the_program(quantised: bool, ragged: bool) -> None:
    arrays = arrays_of(ragged=ragged, heads=(4, 4))
    attention = pj.ragged_paged_attention if ragged else pj.paged_attention
    options: dict[str, Any] = {"implementation": "pallas_mosaic_gpu"}
    if quantised:
        scales = jnp.ones(arrays.k_pages.shape[:3])
        options |= {"k_scales": scales, "v_scales": scales}
        arrays.k_pages, arrays.v_pages = 2 * [np.zeros(arrays.k_pages.shape, np.int8)]
    with on_gpu("NVIDIA H200"):
        run = functools.partial(attention, **options)
        traced = jax.jit(run).trace(*arrays.args())
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1


def test_only_hopper_is_usable() -> None:
    with on_gpu("NVIDIA A100-SXM4-80GB"):
        able, reason = pj.available_implementations()["pallas_mosaic_gpu"]
    assert not able and "the GPU has 8.0" in reason
    with on_gpu("NVIDIA H200"):
        assert pj.available_implementations()["pallas_mosaic_gpu"][0]
    arrays = arrays_of(ragged=False)
    with pytest.raises(NotImplementedError, match="no NVIDIA GPU: the device is cpu"):
        pj.paged_attention(*arrays.args(), implementation="pallas_mosaic_gpu")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        (dict(head_dim=256, page_size=24, group=64), ""),
        (dict(kv_dtype="int8"), ""),
        (dict(kv_dtype="float8_e4m3fn", q_dtype="float16", kv_heads=4), ""),
        (dict(kv_dtype="int8", kv_heads=6), "of 6 kv heads take 24 bytes a token"),
        (dict(kv_dtype="float32"), "queries are bfloat16 and the pages float32"),
        (dict(q_dtype="float32"), "float16, the queries are float32"),
        (dict(head_dim=80), "head_dim 80 is none of"),
        (dict(head_dim=320), "head_dim 320 is none of"),
        (dict(page_size=12), "page_size 12 is no multiple of 8"),
        (dict(group=71), "71 query heads per kv head are over 64"),
    ],
)
def test_what_the_kernels_cannot_do_has_a_reason(change: dict, reason: str) -> None:
    call = dict(
        q_dtype="bfloat16",
        kv_dtype="bfloat16",
        kv_heads=8,
        group=4,
        head_dim=128,
        page_size=16,
    )
    able, why = gpu_mosaic_sizes.supports(**{**call, **change})
    assert able == (not reason) and reason in why
