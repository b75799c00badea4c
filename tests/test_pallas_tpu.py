"""The TPU attention kernels in both interpreters, against the float64 loop."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pallas_tpu_cases as cases
import pytest
from attention_cases import assert_matches_oracle, make_arrays
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, PartitionSpec
from pallas_tpu_cases import SIZES, arrays_of, check, quantise, run, simulated

from pagedjax import (
    available_implementations,
    paged_attention,
    ragged_paged_attention,
)
from pallas_kernels import tpu_chips

BOTH = pytest.mark.parametrize("ragged", [False, True], ids=["decode", "ragged"])
MODES = pytest.mark.parametrize("mode", ["eager", "on_wait"])

# Every value of every axis once: the page size, (H, K), D, dtype and the options.
CASES = [
    dict(page_size=4, heads=(4, 2), head_dim=8, dtype="float32"),
    dict(page_size=1, heads=(8, 1), head_dim=64, dtype="bfloat16", window=7),
    dict(page_size=5, heads=(6, 2), head_dim=80, dtype="float32", soft_cap=2.5),
    dict(page_size=16, heads=(9, 3), head_dim=128, dtype="bfloat16", window=1),
    dict(page_size=8, heads=(2, 2), head_dim=256, dtype="float32", soft_cap=30.0),
]


# --- against the oracle ---------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"D{case['head_dim']}")
def test_matches_oracle(case: dict, ragged: bool) -> None:
    options = {x: case[x] for x in ("window", "soft_cap") if x in case}
    shapes = {x: case[x] for x in case if x not in options}
    check(arrays_of(ragged=ragged, **shapes), **options)


@BOTH
def test_queries_of_another_dtype_than_the_pages(ragged: bool) -> None:
    arrays = arrays_of(ragged=ragged)
    arrays.q = arrays.q.astype(np.float16)
    check(arrays)
    arrays = arrays_of(ragged=ragged, dtype="bfloat16")
    arrays.q = arrays.q.astype(np.float32)
    check(arrays)


@MODES
@BOTH
@pytest.mark.core
def test_no_race_in_the_simulator(ragged: bool, mode: str) -> None:
    arrays = arrays_of(ragged=ragged, dtype="bfloat16")
    with simulated(mode) as interpret:
        check(arrays, interpret=interpret, window=9)


@BOTH
def test_two_cores_share_the_items(ragged: bool) -> None:
    arrays = arrays_of(ragged=ragged)
    chip = tpu_chips.CHIPS["v5p"]
    check(arrays, chip=chip)
    with simulated("on_wait", num_cores_or_threads=2) as interpret:
        check(arrays, chip=chip, interpret=interpret)


@BOTH
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn], ids=["int8", "fp8"])
def test_quantised_pages(dtype, ragged: bool) -> None:
    arrays = arrays_of(ragged=ragged, page_size=8, head_dim=16)
    held, scales = quantise(arrays, dtype)
    sizes = tpu_chips.BlockSizes(tokens=1, queries=16)
    if dtype == jnp.int8:
        out, lse = run(held, scales=scales, block_sizes=sizes)
    else:
        with simulated("on_wait") as interpret:
            out, lse = run(held, scales=scales, block_sizes=sizes, interpret=interpret)
    assert_matches_oracle(arrays, out, lse)


@BOTH
def test_a_table_larger_than_scalar_memory(ragged: bool) -> None:
    arrays = arrays_of(ragged=ragged)
    table_row = 4 * arrays.page_indices.shape[1] + 20
    runs = 20 * (arrays.q.shape[0] // SIZES.queries + 1) if ragged else 0
    chip = tpu_chips.CHIPS["v6e"]
    room = tpu_chips.MIB // 4 + runs + 3 * table_row
    small = dataclasses.replace(chip, smem=room)
    assert _fit(arrays, small).slots_per_call == 3
    check(arrays, chip=small)


@BOTH
def test_no_slot_holds_anything(ragged: bool) -> None:
    arrays = make_arrays([0, 0], q_lens=[0, 0] if ragged else None, padding=2 * ragged)
    out, lse = run(arrays)
    assert out.shape[0] == 2 and not out.any() and np.isneginf(lse).all()


@BOTH
def test_pages_outside_the_window_are_not_read(ragged: bool) -> None:
    # Slot 6 has 17 tokens; with 3 rows and a window of 4 it sees those from 11 on.
    q_lens = [0, 1, 1, 1, 1, 1, 3, 0] if ragged else None
    arrays = make_arrays(cases.SEQ_LENS, q_lens=q_lens)
    want = run(arrays, window=4)
    gone = arrays.page_indices[6, :2].copy()
    arrays.page_indices[6, :2] = arrays.k_pages.shape[0]
    arrays.k_pages[gone] = arrays.v_pages[gone] = np.nan
    for interpret in (True, cases.pltpu.InterpretParams()):
        got = run(arrays, window=4, interpret=interpret)
        np.testing.assert_array_equal(got[0], want[0])


def test_nan_that_is_seen_shows_in_its_own_slot_only() -> None:
    arrays = arrays_of(ragged=False)
    clean = run(arrays)[0]
    arrays.k_pages[arrays.page_indices[4, 1], 2, 0] = np.nan
    out = run(arrays)[0]
    assert np.isnan(out[4, :2]).all() and not np.isnan(out[4, 2:]).any()
    others = np.arange(len(out)) != 4
    np.testing.assert_array_equal(out[others], clean[others])


@BOTH
def test_wrong_ids_and_lengths_stay_inside_the_pool(ragged: bool) -> None:
    # The simulator raises on any read outside an array.
    arrays = arrays_of(ragged=ragged)
    clean = run(arrays)[0]
    arrays.page_indices[4] = 10**6
    arrays.seq_lens[3] = 10**6
    with simulated("eager") as interpret:
        out = run(arrays, interpret=interpret)[0]
    rows = slice(8, 26) if ragged else slice(5, 7)  # of slots 5 and 6
    np.testing.assert_array_equal(out[rows], clean[rows])


# --- transformations ------------------------------------------------------------------


@BOTH
def test_vmap_equals_one_by_one(ragged: bool) -> None:
    several = [arrays_of(ragged=ragged, seed=seed) for seed in (0, 1)]
    stacked = [jnp.stack(x) for x in zip(*(a.args() for a in several), strict=True)]
    kernel = cases.KERNELS[ragged]
    kernel = partial(kernel, block_sizes=SIZES, interpret=True)
    out = jax.jit(jax.vmap(kernel))(*stacked)[0]
    for got, arrays in zip(out, several, strict=True):
        np.testing.assert_array_equal(got, run(arrays)[0])
    # One pool for all: the slots are laid end to end.
    if not ragged:
        axes = (0, None, None, None, 0)
        lens = jnp.stack([several[0].args()[4], several[0].args()[4] // 2])
        args = (stacked[0], *several[0].args()[1:4], lens)
        out = jax.jit(jax.vmap(kernel, in_axes=axes))(*args)[0]
        np.testing.assert_array_equal(out[0], run(several[0])[0])
        several[0].q, several[0].seq_lens = several[1].q, several[0].seq_lens // 2
        np.testing.assert_array_equal(out[1], run(several[0])[0])


@BOTH
def test_shard_map_over_kv_heads(ragged: bool) -> None:
    arrays = arrays_of(ragged=ragged, heads=(4, 2))
    mesh = Mesh(np.array(jax.devices()[:2]), ("heads",))
    spec = PartitionSpec
    pages, rest = spec(None, None, "heads"), (spec(),) * (2 + ragged)
    kernel = cases.KERNELS[ragged]
    shard = partial(
        jax.shard_map,
        in_specs=(spec(None, "heads"), pages, pages, *rest),
        out_specs=spec(None, "heads"),
    )
    # The interpreter's own loop does not keep track of what varies over the mesh.
    sharded = shard(
        partial(kernel, block_sizes=SIZES, interpret=True), mesh=mesh, check_vma=False
    )
    out, lse = jax.jit(sharded)(*arrays.args())
    assert_matches_oracle(arrays, np.asarray(out), np.asarray(lse))
    # For a TPU the kernels do.
    device = AbstractDevice("TPU v6e", 1, "tpu")
    auto = (AxisType.Auto,)
    mesh = AbstractMesh((2,), ("heads",), axis_types=auto, abstract_device=device)
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays.args()]
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(shard(kernel, mesh=mesh)).trace(*args)
        lowered = lowered.lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" in lowered.as_text()


# --- the implementation of pagedjax ---------------------------------------------------


def test_it_says_why_it_is_not_usable_here() -> None:
    usable, reason = available_implementations()["pallas_tpu"]
    assert (usable, reason) == (False, "no TPU: the device is cpu")
    args = arrays_of(ragged=False).args()
    with pytest.raises(NotImplementedError, match="no TPU: the device is cpu"):
        paged_attention(*args, implementation="pallas_tpu")


@BOTH
def test_it_is_chosen_for_a_tpu_and_lowers(ragged: bool) -> None:
    args = [
        jax.ShapeDtypeStruct(x.shape, x.dtype)
        for x in arrays_of(ragged=ragged, head_dim=128).args()
    ]
    attention = ragged_paged_attention if ragged else paged_attention
    device = AbstractDevice("TPU v6e", 1, "tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        assert available_implementations()["pallas_tpu"] == (True, "runs on TPU v6e")
        lowered = jax.jit(attention).trace(*args).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" in lowered.as_text()


def test_it_gives_what_the_kernel_gives(monkeypatch) -> None:
    monkeypatch.setattr(tpu_chips, "target_chip", lambda: (tpu_chips.CHIPS["v6e"], ""))
    arrays = arrays_of(ragged=False, heads=(2, 1), seed=5)
    with cases.pltpu.force_tpu_interpret_mode():
        out, lse = paged_attention(
            *arrays.args(), window=6, return_lse=True, implementation="pallas_tpu"
        )
    assert_matches_oracle(arrays, np.asarray(out), np.asarray(lse), window=6)


# --- what is refused, and the sizes ---------------------------------------------------


def _fit(arrays, chip, **changes):
    """Return how the call of these arrays is run on a chip."""
    return tpu_chips.fit(_call(arrays, **changes), chip, SIZES)


def _call(arrays, **changes):
    call = tpu_chips.Call(
        num_tokens=arrays.q.shape[0],
        num_slots=arrays.page_indices.shape[0],
        pages_per_slot=arrays.page_indices.shape[1],
        page_size=arrays.k_pages.shape[1],
        num_heads=arrays.q.shape[1],
        num_kv_heads=arrays.k_pages.shape[2],
        head_dim=arrays.q.shape[2],
        q_dtype="float32",
        kv_dtype="float32",
        ragged=arrays.cu_q_lens is not None,
        has_scales=False,
    )
    return dataclasses.replace(call, **changes)


@pytest.mark.parametrize(
    "changes, reason",
    [
        (dict(kv_dtype="float16"), "pages of float16 are not supported"),
        (dict(q_dtype="float64"), "queries of float64 are not supported"),
        (dict(kv_dtype="int8"), "scales go with int8 and float8_e4m3fn pages"),
        (
            dict(kv_dtype="int8", has_scales=True, page_size=12),
            "multiple of 8, a tile of scales; got 12",
        ),
        (dict(pages_per_slot=200_000), "200000 ids, takes 800000 bytes"),
        (
            dict(page_size=8192, num_kv_heads=32, num_heads=32, head_dim=128),
            "blocks of 8192 tokens of 32 kv heads of 128 in float32 take",
        ),
    ],
    ids=lambda x: None if isinstance(x, str) else "-".join(x),
)
def test_what_a_chip_cannot_do_is_refused_with_the_reason(changes, reason) -> None:
    call = _call(arrays_of(ragged=False), **changes)
    for chip in tpu_chips.CHIPS.values():
        able, why = tpu_chips.supports(call, chip)
        assert not able and reason in why


def test_block_sizes_follow_the_table_and_are_halved_to_fit(
    monkeypatch,
) -> None:
    chip = tpu_chips.CHIPS["v6e"]
    call = _call(
        arrays_of(ragged=True),
        page_size=16,
        num_tokens=4096,
        pages_per_slot=512,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        kv_dtype="bfloat16",
    )
    fit = tpu_chips.fit(call, chip)
    assert (fit.pages_per_block, fit.block_queries) == (32, 128)
    sizes = tpu_chips.BlockSizes(tokens=100, queries=32)
    monkeypatch.setitem(tpu_chips.BLOCK_SIZES, "v6e", sizes)
    fit = tpu_chips.fit(call, chip)
    assert (fit.pages_per_block, fit.block_queries) == (7, 32)
    monkeypatch.undo()
    small = dataclasses.replace(chip, vmem=chip.vmem // 3)
    halved = tpu_chips.fit(call, small)
    assert halved.vmem <= small.vmem // 2 < tpu_chips.fit(call, chip).vmem
    assert halved.block_queries < 128
    with pytest.raises(ValueError, match="queries must be a power of 2, got 48"):
        tpu_chips.BlockSizes(tokens=8, queries=48)
