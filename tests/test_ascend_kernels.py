"""The Ascend C kernels on the simulator, against the NumPy oracle."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import ascend_kernel_cases as cases
import ascend_kernels
import numpy as np
import pytest
from ascend_kernel_cases import Attention, Copy, Mean, Write
from ascend_kernels import BFLOAT16, KernelError, Library, Refused

from ascend_bridge.kernels import build

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="there is no C++ compiler",
)
FLOAT16 = np.dtype(np.float16)
HEADS = ((4, 4), (8, 1), (8, 2), (6, 2), (9, 3), (32, 8))
LENGTHS = {
    16: (0, 1, 15, 16, 17, 40, 96),
    64: (0, 1, 63, 64, 65, 150),
    128: (0, 1, 127, 128, 129, 300),
}


@pytest.fixture(params=build.ARCHES)
def library(request: pytest.FixtureRequest) -> Library:
    """The kernels of each architecture, in the order of the program."""
    made = ascend_kernels.load(request.param)
    made.seed, made.cores = 0, 4
    return made


@pytest.mark.parametrize("page_size", LENGTHS)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
def test_matrix(library: Library, page_size: int, dim: int, dtype: np.dtype) -> None:
    """Head ratios, lengths around a page, window, soft cap, splits."""
    if dtype == BFLOAT16 and library.arch == 1001:
        pytest.skip("the 910A does not compute bfloat16; the refusal is tested below")
    options: list[dict[str, float]] = [
        {"window": 37},
        {"soft_cap": 2.0, "splits": 2},
        {"window": page_size + 3, "soft_cap": 2.0, "scale": 0.5},
    ]
    for i, heads in enumerate(HEADS):
        for option in ({}, options[(i + dim // 64) % 3]):
            Attention(
                LENGTHS[page_size],
                heads,
                dim=dim,
                page_size=page_size,
                dtype=dtype,
                **option,  # type: ignore[arg-type]
            ).check(library)


@pytest.mark.parametrize("group", range(1, 17))
def test_every_group(library: Library, group: int) -> None:
    Attention((19, 66), (group * 2, 2), dim=32, splits=2, seed=group).check(library)


@pytest.mark.parametrize(
    "case",
    [
        Attention((4096, 1), (2, 1), dim=16, page_size=128, pages=9),
        Attention((4096, 4095), (4, 2), dim=16, splits=5, window=3000),
        # More page ids than are brought in at once.
        Attention((32768,), (1, 1), dim=16, splits=1, pages=50),
        Attention((32768, 100), (1, 1), dim=16, page_size=128),
    ],
    ids=["pages of 128", "window and splits", "ids in two runs", "splits chosen"],
)
def test_long_contexts(library: Library, case: Attention) -> None:
    case.check(library)


def test_page_ids_are_read_again_for_the_next_head(library: Library) -> None:
    """One core takes both heads of a row with more ids than are brought in at once."""
    library.cores = 1
    Attention((16640,), (2, 2), dim=16, splits=1, pages=50).check(library)


def test_a_case_of_atb(library: Library) -> None:
    """Two tokens, 32 heads, D 128, context 500 and 64 pages of 128, ids that repeat.

    The shape and the rule (1e-3 absolute and relative) are those of ATB's own test.
    """
    case = Attention((500, 500), (32, 32), dim=128, page_size=128, pages=64)
    q, k, v, table, lens = cases.make_attention(case)
    out, _ = library.attend(q, k, v, table, lens)
    want, _ = cases.expect_attention(case)
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("seed", range(40))
def test_random_shapes(library: Library, seed: int) -> None:
    """Odd tiles, more splits than tokens, windows of any size, D that are no powers."""
    rng = np.random.default_rng(seed)
    kv_heads = int(rng.integers(1, 4))
    page_size = 16 * int(rng.integers(1, 7))
    lens = rng.integers(0, 4 * page_size, rng.integers(1, 6))
    library.seed = seed
    library.cores = int(rng.integers(1, 9))
    Attention(
        tuple(int(n) for n in lens),
        (kv_heads * int(rng.integers(1, 6)), kv_heads),
        dim=16 * int(rng.integers(1, 13)),
        page_size=page_size,
        window=int(rng.integers(1, 3 * page_size)) * int(rng.integers(0, 2)),
        soft_cap=float(rng.uniform(0.5, 30)) * int(rng.integers(0, 2)),
        scale=float(rng.uniform(0.01, 2)),
        splits=int(rng.integers(0, 9)),
        tile=int(rng.integers(0, 34)),
        seed=seed,
    ).check(library)


def test_pools_of_more_than_2_31_elements(library: Library) -> None:
    """The last page of a pool whose elements no int32 counts."""
    shape = (17000, 128, 8, 128)
    k, v = np.zeros(shape, FLOAT16), np.zeros(shape, FLOAT16)
    assert k.size > 1 << 31
    rng = np.random.default_rng(0)
    k_new, v_new = (rng.uniform(-1, 1, (3, 8, 128)).astype(FLOAT16) for _ in "kv")
    slots = 16998 * 128 + np.arange(3, dtype=np.int32)
    library.write(k_new, v_new, k, v, slots)
    pages = np.array([16998], np.int32)
    library.copy(k, v, pages, pages + 1, np.array([1], np.int32))
    np.testing.assert_array_equal(k[16999, :3], k_new)
    q = rng.uniform(-1, 1, (1, 8, 128)).astype(FLOAT16)
    lens = np.array([3], np.int32)
    got = library.attend(q, k, v, pages[None] + 1, lens)
    want = library.attend(q, k[16999:], v[16999:], pages[None] * 0, lens)
    np.testing.assert_array_equal(got[0], want[0])
    assert (got[0] != 0).all()


def test_a_stream_runs_jobs_later(library: Library) -> None:
    """The runtime decides when: a job it takes, one it drops, and one it refuses."""
    jobs: list[tuple[int, ...]] = []
    run_type = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
    )
    drop_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    refusal = 0

    @ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
    def enqueue(*job: int) -> int:
        if refusal == 0:
            jobs.append(job)
        return refusal

    k = np.arange(2 * 16 * 16, dtype=np.float16).reshape(2, 16, 1, 16)
    v, before = -k, k.copy()
    lists = [np.array([x], np.int32) for x in (0, 1, 1)]
    plan = ascend_kernels.CopyPlan()
    c = library.c
    assert c.pagedjax_ascend_plan_block_copy(
        library.arch, 4, 0, 1, 1, *k.shape, ctypes.byref(plan)
    )
    places = [ctypes.c_void_p(x.ctypes.data) for x in (k, v, *lists)]

    def launch() -> int:
        tiling = ctypes.byref(plan.tiling)
        return c.pagedjax_ascend_block_copy(plan.blocks, None, *places, tiling)

    message = ctypes.create_string_buffer(200)
    c.pagedjax_sim_clear_regions()
    c.pagedjax_sim_set_enqueue(enqueue)
    try:
        assert launch() == 0 and launch() == 0 and launch() == 0
        np.testing.assert_array_equal(k, before)
        (stream, run, _, first), (_, _, _, second), (_, _, drop, third) = jobs
        assert stream is None
        # No memory is registered: nothing is touched, and the run says so.
        assert run_type(run)(first, message, 200) > 0
        assert b"gm-bounds" in message.value
        np.testing.assert_array_equal(k, before)
        for array in (k, v, *lists):
            size = ctypes.c_size_t(array.nbytes)
            c.pagedjax_sim_add_region(ctypes.c_void_p(array.ctypes.data), size, b"x")
        assert run_type(run)(second, message, 200) == 0
        np.testing.assert_array_equal(k[1], before[0])
        np.testing.assert_array_equal(v[1], -before[0])
        drop_type(drop)(third)
        refusal = 5
        assert launch() == 5 and len(jobs) == 3
    finally:
        c.pagedjax_sim_set_enqueue(None)
        c.pagedjax_sim_clear_regions()
        c.pagedjax_sim_clear_errors()


@pytest.mark.parametrize("case", cases.SMALL, ids=lambda case: type(case).__name__)
def test_small(library: Library, case: Attention | Mean | Write | Copy) -> None:
    """The cases that the mutation test breaks."""
    case.check(library)


@pytest.mark.parametrize(
    "case",
    [
        Write(2, (1, 16, 1, 16)),
        Write(40, (3, 16, 4, 128)),
        # More places than are brought in at once.
        Write(1500, (100, 16, 1, 16)),
        Copy((8, 16, 1, 16)),
        Copy((8, 128, 8, 128)),
    ],
    ids=str,
)
def test_writes_and_copies_are_bit_exact(library: Library, case: Write | Copy) -> None:
    for cores in (1, 4, 40):
        library.cores = cores
        case.check(library)


def test_no_false_alarm_in_200_schedules(library: Library) -> None:
    scheduled: list[Attention | Write | Copy] = [
        Attention((0, 1, 70, 40), (6, 2), dim=80, splits=2, tile=16, bad=3),
        Write(13, (3, 16, 2, 64)),
        Copy((7, 16, 2, 64)),
    ]
    for seed in range(1, 201):
        library.seed = seed
        for case in scheduled:
            case.check(library)


def test_poison(library: Library) -> None:
    """NaN in pages nobody owns and behind the last token; any id in unmapped cells."""
    rng = np.random.default_rng(5)
    lens = np.array([37, 0, 64, 1], np.int32)
    shape = (24, 16, 2, 64)
    clean_k, clean_v = (rng.uniform(-1, 1, shape).astype(FLOAT16) for _ in "kv")
    q = rng.uniform(-1, 1, (4, 8, 64)).astype(FLOAT16)
    table = rng.permutation(24)[:16].reshape(4, 4).astype(np.int32)
    k, v = (np.full(shape, np.nan, FLOAT16) for _ in "kv")
    for slot, length in enumerate(lens):
        for position in range(length):
            at = table[slot, position // 16], position % 16
            k[at], v[at] = clean_k[at], clean_v[at]
    wild = table.copy()
    for slot, length in enumerate(lens):
        wild[slot, -(-length // 16) :] = [-1, 24, 1 << 30, -(1 << 31)][slot]
    want = library.attend(q, clean_k, clean_v, table, lens)
    for got, expected in zip(library.attend(q, k, v, wild, lens), want, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("splits", [1, 2])
def test_a_visible_nan_shows(library: Library, splits: int) -> None:
    case = Attention((20, 40), (2, 2), pages=9, splits=splits)
    q, k, v, table, lens = (x.copy() for x in cases.make_attention(case))
    table[:, :3] = [[0, 1, 9], [2, 3, 4]]
    for poisoned in (k, v):
        poisoned[1, 3, 1, 5] = np.nan  # the last token of slot 0, kv head 1
        out, lse = library.attend(q, k, v, table, lens, splits=splits)
        assert np.isnan(out[0, 1, 5])
        assert not np.isnan(out[0, 0]).any() and not np.isnan(out[1]).any()
        assert np.isnan(lse[0, 1]) == (poisoned is k)
        assert np.isfinite(lse[0, 0]) and np.isfinite(lse[1]).all()
        poisoned[1, 3, 1, 5] = 0


def test_pages_before_a_window_are_not_looked_at(library: Library) -> None:
    case = Attention((100, 33), (4, 2), window=20, pages=20)
    q, k, v, table, lens = cases.make_attention(case)
    want = library.attend(q, k, v, table, lens, window=20)
    hidden = table.copy()
    hidden[0, :5] = 1 << 20  # positions 0 to 79 of 100
    for splits in (1, 2):
        got = library.attend(q, k, v, hidden, lens, window=20, splits=splits)
        cases.assert_close(got[0], want[0].astype(np.float64))
        cases.assert_lse_close(got[1], want[1].astype(np.float64), FLOAT16)


def test_pages_outside_the_pool_void_their_row_only(library: Library) -> None:
    case = Attention((50, 50, 50), (4, 2), pages=12)
    q, k, v, table, lens = cases.make_attention(case)
    want, want_lse = library.attend(q, k, v, table, lens)
    for page in (12, -1, 1 << 30, -(1 << 31)):
        for column in range(4):
            bad = table.copy()
            bad[1, column] = page
            out, lse = library.attend(q, k, v, bad, lens)
            assert (out[1] == 0).all() and np.isneginf(lse[1]).all()
            np.testing.assert_array_equal(out[[0, 2]], want[[0, 2]])
            np.testing.assert_array_equal(lse[[0, 2]], want_lse[[0, 2]])


def test_lengths_that_cannot_be(library: Library) -> None:
    """A negative length is empty; one past the table row is that of the row."""
    case = Attention((32, 32), (2, 1), pages=5)
    q, k, v, table, lens = cases.make_attention(case)
    for window in (0, 9):
        want = library.attend(q, k, v, table, lens, window=window)
        for length in (-1, -(1 << 31), 33, (1 << 31) - 1):
            lens = np.array([32, length], np.int32)
            out, lse = library.attend(q, k, v, table, lens, window=window)
            if length < 0:
                assert (out[1] == 0).all() and np.isneginf(lse[1]).all()
            rows = [0] if length < 0 else [0, 1]
            np.testing.assert_array_equal(out[rows], want[0][rows])
            np.testing.assert_array_equal(lse[rows], want[1][rows])


def test_a_length_past_the_longest_planned_is_right_too(library: Library) -> None:
    """The last split takes what is left: a plan may be too short, never wrong."""
    case = Attention((300,), (2, 1), pages=20)
    q, k, v, table, lens = cases.make_attention(case)
    out, _ = library.attend(q, k, v, table, lens, max_tokens=64, splits=2)
    cases.assert_close(out, cases.expect_attention(case)[0])


def test_results_do_not_depend_on_company(library: Library) -> None:
    """Bit for bit: physical pages permuted, each slot alone, cores, order of pipes."""
    case = Attention((70, 1, 33), (6, 2), pages=15, splits=2)
    q, k, v, table, lens = cases.make_attention(case)
    want = library.attend(q, k, v, table, lens, splits=2, max_tokens=80)
    moved = np.random.default_rng(0).permutation(15)
    back = np.argsort(moved)
    places = np.where(table < 15, moved[np.minimum(table, 14)], 15)
    runs = [library.attend(q, k[back], v[back], places, lens, splits=2, max_tokens=80)]
    library.cores = 1
    runs.append(library.attend(q, k, v, table, lens, splits=2, max_tokens=80))
    library.seed = 11
    runs.append(library.attend(q, k, v, table, lens, splits=2, max_tokens=80))
    solo = [
        library.attend(
            q[s : s + 1],
            k,
            v,
            table[s : s + 1],
            lens[s : s + 1],
            splits=2,
            max_tokens=80,
        )
        for s in range(3)
    ]
    runs.append(tuple(np.concatenate(x) for x in zip(*solo, strict=True)))  # type: ignore[arg-type]
    for got in runs:
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)


def test_without_lse(library: Library) -> None:
    case = Attention((20,), (4, 2), pages=3)
    q, k, v, table, lens = cases.make_attention(case)
    out, lse = library.attend(q, k, v, table, lens, lse=False)
    cases.assert_close(out, cases.expect_attention(case)[0])
    assert np.isnan(lse).all()


PROBLEM = {
    "cores": 40,
    "dtype": 0,
    "slots": 4,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "num_pages": 100,
    "page_size": 128,
    "pages_per_slot": 256,
    "return_lse": 1,
    "scale": 0.1,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 72}, "head_dim 72 is not a multiple of 16"),
        ({"page_size": 24}, "page_size 24 is not a multiple of 16"),
        ({"heads": 33}, "heads 33 is not a multiple of kv_heads 8"),
        ({"slots": 0}, "slots 0"),
        ({"num_pages": 0}, "num_pages 0"),
        ({"cores": 0}, "cores 0"),
        ({"dtype": 7}, "dtype 7"),
        ({"arch": 910}, "arch 910"),
        ({"window": -1}, "window -1"),
        ({"soft_cap": float("nan")}, "soft_cap nan"),
        ({"splits": 65}, "splits 65 is not in [1, 64]"),
        ({"tile_tokens": 65}, "tile_tokens 65 is not in [1, 64]"),
        ({"kv_heads": 10000, "heads": 10000}, "79992 blocks of 32 bytes"),
        ({"pages_per_slot": 1 << 30}, "does not fit int32"),
        ({"heads": 800}, "100 query heads per kv head with head_dim 128"),
        ({"heads": 256, "kv_heads": 1}, "256 query heads per kv head: an instruction"),
        ({"head_dim": 2048, "tile_tokens": 4}, "head_dim 2048 takes"),
        ({"head_dim": 1024}, "head_dim 1024 and tiles of 16 tokens take"),
        ({"head_dim": 256, "tile_tokens": 64}, "tiles of 64 tokens take"),
    ],
    ids=str,
)
def test_the_plan_refuses_with_the_numbers(
    library: Library, change: dict[str, float], message: str
) -> None:
    library.plan_attention(**PROBLEM)
    with pytest.raises(Refused) as refusal:
        library.plan_attention(**{**PROBLEM, **change})
    assert message in str(refusal.value)


def test_bfloat16_is_for_2201() -> None:
    bfloat16 = {**PROBLEM, "dtype": 1}
    ascend_kernels.load(2201).plan_attention(**bfloat16)
    with pytest.raises(Refused, match="bfloat16 is not computed on arch 1001"):
        ascend_kernels.load(1001).plan_attention(**bfloat16)


def test_copying_plans_refuse_with_the_numbers(library: Library) -> None:
    k = np.zeros((2, 24, 1, 16), FLOAT16)
    with pytest.raises(Refused, match="page_size 24"):
        library.write(k[0], k[0], k, k, np.zeros(24, np.int32))
    none = np.zeros(0, np.int32)
    k = np.zeros((2, 16, 1, 16), FLOAT16)
    with pytest.raises(Refused, match="tokens 0"):
        library.write(k[0, :0], k[0, :0], k, k, none)
    with pytest.raises(Refused, match="num_sources 0 and num_dests 0"):
        library.copy(k, k, none, none, none)


def test_splits_are_for_few_items(library: Library) -> None:
    def splits(**change: float) -> int:
        return library.plan_attention(**{**PROBLEM, **change}).tiling.splits

    assert splits() == 1  # 32 items for 40 cores
    assert splits(slots=1) == 5  # 8 items
    assert splits(slots=1, max_tokens=300) == 2
    assert splits(slots=1, window=100) == 1
    # 820 tokens for each of 40 cores are 7 pages of 128.
    assert splits(slots=1, kv_heads=1, heads=1) == 37


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_what_just_fits_runs(library: Library, dim: int) -> None:
    """The largest group that the plan takes, and the largest tile for a group of 16."""
    heads = max(g for g in range(1, 256) if _fits(library, heads=g, head_dim=dim))
    Attention((5,), (heads, 1), dim=dim).check(library)
    tile = max(
        t for t in range(1, 65) if _fits(library, heads=16, head_dim=dim, tile_tokens=t)
    )
    Attention((70,), (16, 1), dim=dim, tile=tile).check(library)
    if tile < 64:
        q, k, v, table, lens = cases.make_attention(Attention((70,), (16, 1), dim=dim))
        with pytest.raises(KernelError, match="ub-capacity"):
            library.attend(q, k, v, table, lens, change={"tile_tokens": tile + 1})


def _fits(library: Library, **change: float) -> bool:
    try:
        library.plan_attention(**{**PROBLEM, "kv_heads": 1, **change})
    except Refused:
        return False
    return True


@pytest.mark.parametrize("arch", build.ARCHES)
def test_under_sanitizers(arch: int) -> None:
    """Kernels and simulator with every access of memory checked, in a process apart."""
    names = [
        subprocess.run(
            ["g++", f"-print-file-name={name}"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    if not all(Path(name).is_absolute() for name in names):
        pytest.skip("this g++ has no sanitizers")
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(names),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    program = Path(cases.__file__)
    flags = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    build.build_simulated(arch, flags=tuple(flags))  # without the preloaded libraries
    run = subprocess.run(
        [sys.executable, str(program), str(arch), *flags],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert f"{len(cases.SMALL)} cases" in run.stdout
