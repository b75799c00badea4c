"""The Triton kernels in the interpreter, against the float64 loop; and their choice."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    Arrays,
    assert_matches_oracle,
    case_arrays,
    make_arrays,
    pairwise_cases,
)
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec
from pallas_tpu_cases import arrays_of, quantise

import pagedjax as pj
from pallas_kernels import gpu_triton_attention, gpu_triton_pages, gpu_triton_sizes

BOTH = pytest.mark.parametrize("ragged", [False, True], ids=["decode", "ragged"])


def run(arrays: Arrays, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return (out, lse) of the kernel, interpreted."""
    options = {"scale": arrays.q.shape[-1] ** -0.5, "interpret": True, **options}
    kernel = gpu_triton_attention.paged_attention
    if arrays.cu_q_lens is not None:
        kernel = gpu_triton_attention.ragged_paged_attention
        options.pop("num_splits", None)
    out, lse = jax.jit(functools.partial(kernel, **options))(*arrays.args())
    return np.asarray(out), np.asarray(lse)


def check(arrays: Arrays, **options: Any) -> None:
    """Run the kernel and compare with the oracle."""
    wanted = {x: options[x] for x in ("window", "soft_cap", "scale") if x in options}
    assert_matches_oracle(arrays, *run(arrays, **options), **wanted)


CASES = [
    dict(page_size=4, heads=(4, 2), head_dim=8, dtype="float32"),
    dict(page_size=1, heads=(8, 1), head_dim=64, dtype="bfloat16", window=7),
    dict(page_size=5, heads=(6, 2), head_dim=80, dtype="float16", soft_cap=2.5),
    dict(page_size=16, heads=(9, 3), head_dim=128, dtype="bfloat16", window=1),
    dict(page_size=8, heads=(2, 2), head_dim=256, dtype="float32", soft_cap=30.0),
]


@BOTH
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_oracle(case: dict, ragged: bool) -> None:
    options = {x: case[x] for x in ("window", "soft_cap") if x in case}
    shapes = {x: case[x] for x in case if x not in options}
    # Blocks of 16: contexts of 17 have two, and the splits of a short one are empty.
    check(arrays_of(ragged=ragged, **shapes), block_tokens=16, num_splits=3, **options)


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("case", pairwise_cases(), ids=str)
def test_matches_oracle_on_every_pair_of_options(case: Any, ragged: bool) -> None:
    check(case_arrays(case, ragged=ragged), **case.options)


@pytest.mark.parametrize("num_splits", [1, 2, 7])
@pytest.mark.parametrize("window", [None, 40])
def test_splits_change_nothing(num_splits: int, window: int | None) -> None:
    arrays = make_arrays([0, 1, 31, 32, 33, 100, 128], heads=(2, 1))
    check(arrays, num_splits=num_splits, block_tokens=16, window=window)


@BOTH
def test_queries_of_another_dtype_than_the_pages(ragged: bool) -> None:
    for q_dtype, kv_dtype in (("float16", "float32"), ("float32", "bfloat16")):
        arrays = arrays_of(ragged=ragged, dtype=kv_dtype)
        arrays.q = arrays.q.astype(q_dtype)
        check(arrays)


@BOTH
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn], ids=["int8", "fp8"])
def test_quantised_pages(dtype: Any, ragged: bool) -> None:
    arrays = arrays_of(ragged=ragged, page_size=8, head_dim=16)
    held, scales = quantise(arrays, dtype)
    assert_matches_oracle(arrays, *run(held, block_tokens=16, **scales))


@BOTH
def test_nan_that_a_row_may_see_shows(ragged: bool) -> None:
    arrays = arrays_of(ragged=ragged)
    arrays.v_pages[arrays.page_indices[6, 0], 0, 1] = np.nan
    out, _ = run(arrays)
    rows = np.arange(9, 26) if ragged else np.array([6])
    assert np.isnan(out[rows, 2:]).all()
    others = np.delete(out, rows, axis=0)
    assert len(others) and not np.isnan(others).any()


def test_sizes_that_are_no_powers_of_two_are_named() -> None:
    with pytest.raises(ValueError, match="block_tokens must be a power of two, got 24"):
        run(arrays_of(ragged=False), block_tokens=24)


# --- pages ----------------------------------------------------------------------------


def draw_pages(dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return tuple((100 * rng.standard_normal((2, 6, 5, 3, 10))).astype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_tokens_are_written_where_they_belong(dtype: str) -> None:
    held = draw_pages(jnp.dtype(dtype))
    new = tuple(x[:4].reshape(20, 5, 3, 2)[:8, 0:1] for x in draw_pages(held[0].dtype))
    new = tuple(np.resize(x, (8, 3, 10)) for x in new)
    pages = np.array([0, 5, 6, -1, 3, 3, 2**31 - 1, 2], np.int32)
    offsets = np.array([0, 4, 0, 0, 1, 2, 0, 9], np.int32)
    got = gpu_triton_pages.write_kv(
        *map(jnp.asarray, (*held, *new, pages, offsets)), interpret=True
    )
    for was, tokens, now in zip(held, new, got, strict=True):
        want = was.copy()
        for i in (0, 1, 4, 5):
            want[pages[i], offsets[i]] = tokens[i]
        np.testing.assert_array_equal(now, want)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_pages_are_copied_and_no_others_change(dtype: str) -> None:
    held = draw_pages(jnp.dtype(dtype))
    src = np.array([1, 6, 2, 0, -1, 1], np.int32)
    dst = np.array([3, 4, 5, -1, 4, 0], np.int32)
    got = gpu_triton_pages.copy_pages(
        *map(jnp.asarray, (*held, src, dst)), interpret=True
    )
    for was, now in zip(held, got, strict=True):
        want = was.copy()
        want[[3, 5, 0]] = was[[1, 2, 1]]
        np.testing.assert_array_equal(now, want)


# --- the choice -----------------------------------------------------------------------


def lowered_for_cuda(fn: Any, *args: Any) -> str:
    """Return the program for an H200, as an ahead-of-time compile makes it."""
    device = AbstractDevice("NVIDIA H200", 1, "cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(fn).trace(*args)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@BOTH
def test_a_gpu_takes_the_kernel_and_grad_goes_around_it(ragged: bool) -> None:
    arrays = arrays_of(ragged=ragged)
    attention = pj.ragged_paged_attention if ragged else pj.paged_attention
    q, *rest = arrays.args()
    text = lowered_for_cuda(lambda q: attention(q, *rest), q)
    assert text.count("__gpu$xla.gpu.triton") == 1
    text = lowered_for_cuda(jax.grad(lambda q: attention(q, *rest).sum()), q)
    assert "__gpu$xla.gpu.triton" in text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@BOTH
@pytest.mark.parametrize("name", ["triton", "mosaic_gpu"])
def test_shard_map_over_kv_heads_keeps_track_of_the_mesh(
    name: str, ragged: bool
) -> None:
    arrays = arrays_of(ragged=ragged, page_size=8, head_dim=64, dtype="bfloat16")
    attention = pj.ragged_paged_attention if ragged else pj.paged_attention
    device = AbstractDevice("NVIDIA H200", 2, "cuda")
    auto = (AxisType.Auto,)
    mesh = AbstractMesh((2,), ("heads",), axis_types=auto, abstract_device=device)
    heads, pages = PartitionSpec(None, "heads"), PartitionSpec(None, None, "heads")
    sharded = jax.shard_map(
        functools.partial(attention, implementation=f"pallas_{name}"),
        mesh=mesh,
        in_specs=(heads, pages, pages, *[PartitionSpec()] * (2 + ragged)),
        out_specs=heads,
    )
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays.args()]
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(sharded).trace(*args).lower(lowering_platforms=("cuda",))
    assert name in lowered.as_text()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("NVIDIA H200", ""),
        ("NVIDIA A100-SXM4-80GB", "need compute capability 8.9, the GPU has 8.0"),
        ("NVIDIA L40S", ""),
        ("NVIDIA Riva 128", "capability of NVIDIA Riva 128 is not known"),
    ],
)
def test_a_gpu_that_is_compiled_for_is_known_by_name(kind: str, reason: str) -> None:
    arrays = arrays_of(ragged=False, page_size=8, head_dim=16)
    held, scales = quantise(arrays, jnp.float8_e4m3fn)

    def run(*args: Any) -> Any:
        return pj.paged_attention(*args, **scales, implementation="pallas_triton")

    device = AbstractDevice(kind, 1, "cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        if not reason:
            assert jax.eval_shape(run, *held.args()).shape == held.q.shape
        else:
            with pytest.raises(NotImplementedError, match=reason):
                jax.eval_shape(run, *held.args())


def test_without_a_gpu_the_kernel_is_refused_with_the_reason() -> None:
    arrays = arrays_of(ragged=False)
    with pytest.raises(NotImplementedError, match="no NVIDIA GPU: the device is cpu"):
        pj.paged_attention(*arrays.args(), implementation="pallas_triton")
    assert not pj.available_implementations()["pallas_triton"][0]


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (dict(kv_dtype="float32", head_dim=320, pool_bytes=1), "head_dim 320 is over"),
        (dict(kv_dtype="int8", head_dim=64, pool_bytes=2**31), "past 31 bits"),
        (dict(kv_dtype="int8", head_dim=64, pool_bytes=2**32 + 1), ""),
        (dict(kv_dtype="bfloat16", head_dim=256, pool_bytes=2**40), ""),
        (dict(kv_dtype="float8_e4m3fn", head_dim=64, pool_bytes=1), ""),
        (
            dict(
                kv_dtype="float8_e4m3fn", head_dim=64, pool_bytes=1, capability=(8, 6)
            ),
            "need compute capability 8.9, the GPU has 8.6",
        ),
    ],
)
def test_what_the_kernels_cannot_do_has_a_reason(call: dict, reason: str) -> None:
    able, why = gpu_triton_sizes.supports(**{"capability": (9, 0), **call})
    assert able == (not reason) and reason in why
