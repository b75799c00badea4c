"""The Mosaic GPU kernels in their interpreter, against the float64 loop; their choice.

The interpreter is public from jax 0.11 on; `make core312` runs these there. It plays
the copies, barriers and warp groups of the GPU, fills fresh memory with NaN and looks
for races.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Arrays, assert_matches_oracle, make_arrays
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh

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
# Two slots hold nothing, one a token, one exactly a turn of 64 keys, one three turns.
SEQ_LENS = [0, 1, 64, 17, 150, 0]
Q_LENS = [0, 1, 40, 1, 3, 0]


def run_free_of_races(fn: Any, *args: Any, **options: Any) -> Any:
    """Return NumPy results of a kernel in the interpreter; fail if it saw a race."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    options["interpret"] = plgpu.InterpretGPUParams(detect_races=True)
    results = jax.jit(functools.partial(fn, **options))(*map(jnp.asarray, args))
    results = jax.tree.map(np.asarray, results)
    assert not gpu_callbacks.get_races().races_found
    return results


def run(arrays: Arrays, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return (out, lse) of the kernel."""
    options = {"scale": arrays.q.shape[-1] ** -0.5, "stages": 2, **options}
    kernel = gpu_mosaic_attention.paged_attention
    if arrays.cu_q_lens is not None:
        kernel = gpu_mosaic_attention.ragged_paged_attention
        options.pop("num_splits", None)
    return run_free_of_races(kernel, *arrays.args(), **options)


def arrays_of(*, ragged: bool, **options: Any) -> Arrays:
    """Return slots of mixed lengths: NaN and garbage wherever nobody may look."""
    shapes = {"page_size": 16, "head_dim": 64, "dtype": "bfloat16", **options}
    q_lens = Q_LENS if ragged else None
    return make_arrays(SEQ_LENS, q_lens=q_lens, padding=3 * ragged, **shapes)


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


@interpreted
@BOTH
def test_nan_that_a_row_may_see_shows(ragged: bool) -> None:
    arrays = arrays_of(ragged=ragged)
    arrays.v_pages[arrays.page_indices[3, 0], 0, 1] = np.nan
    out, _ = run(arrays, num_splits=1)
    rows = np.array([41 if ragged else 3])
    assert np.isnan(out[rows, 2:].astype(np.float32)).all()
    others = np.delete(out, rows, axis=0).astype(np.float32)
    assert len(others) and not np.isnan(others).any()


# --- pages ----------------------------------------------------------------------------


def draw_pages(dtype: str) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    shape = (2, 6, 5, 3, 16)
    return tuple((100 * rng.standard_normal(shape)).astype(jnp.dtype(dtype)))


@interpreted
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_tokens_are_written_where_they_belong(dtype: str) -> None:
    held = draw_pages(dtype)
    new = tuple(x[:2].reshape(10, 3, 16)[:8] for x in draw_pages(dtype))
    pages = np.array([0, 5, 6, -1, 3, 3, 2**31 - 1, 2], np.int32)
    offsets = np.array([0, 4, 0, 0, 1, 2, 0, 9], np.int32)
    got = run_free_of_races(gpu_mosaic_pages.write_kv, *held, *new, pages, offsets)
    for was, tokens, now in zip(held, new, got, strict=True):
        want = was.copy()
        for i in (0, 1, 4, 5):
            want[pages[i], offsets[i]] = tokens[i]
        np.testing.assert_array_equal(now, want)


@interpreted
@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_pages_are_copied_and_no_others_change(dtype: str) -> None:
    held = draw_pages(dtype)
    src = np.array([1, 6, 2, 0, -1, 1], np.int32)
    dst = np.array([3, 4, 5, -1, 4, 0], np.int32)
    got = run_free_of_races(gpu_mosaic_pages.copy_pages, *held, src, dst)
    for was, now in zip(held, got, strict=True):
        want = was.copy()
        want[[3, 5, 0]] = was[[1, 2, 1]]
        np.testing.assert_array_equal(now, want)


def test_rows_that_tma_cannot_move_are_refused() -> None:
    pages, ids = jnp.zeros((2, 2, 1, 10), jnp.int8), jnp.zeros(1, jnp.int32)
    with pytest.raises(NotImplementedError, match="10 bytes, TMA moves multiples"):
        gpu_mosaic_pages.copy_pages(pages, pages, ids, ids)


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
def test_a_named_kernel_is_in_the_program(ragged: bool) -> None:
    arrays = arrays_of(ragged=ragged)
    attention = pj.ragged_paged_attention if ragged else pj.paged_attention
    with on_gpu("NVIDIA H200"):
        run = functools.partial(attention, implementation="pallas_mosaic_gpu")
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
        (dict(kv_dtype="int8", has_scales=True), "quantised pages need the scales"),
        (dict(kv_dtype="float32"), "the pages are float32"),
        (dict(q_dtype="float32"), "the queries are float32 and the pages bfloat16"),
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
        has_scales=False,
        group=4,
        head_dim=128,
        page_size=16,
    )
    able, why = gpu_mosaic_sizes.supports(**{**call, **change})
    assert able == (not reason) and reason in why
