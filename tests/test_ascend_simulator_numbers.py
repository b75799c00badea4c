"""What instructions compute on the simulator of the Ascend C API, against NumPy."""

import functools
import shutil
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ascend_simulator import ARCHES, library

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="there is no C++ compiler"
)
both = pytest.mark.parametrize("arch", ARCHES)

random = np.random.default_rng(5)
FLOATS = (random.standard_normal(1024) * 3).astype(np.float32)
HALVES = (random.standard_normal(2048) * 3).astype(np.float16)


def run(arch: int, name: str, data: np.ndarray, dtype: type) -> np.ndarray:
    """Return array c of a kernel; the same in order and in other schedules."""
    results: list[np.ndarray] = []
    for seed in (0, 1, 5):
        result, errors = library(arch).run(f"number_{name}", data, seed=seed)
        assert not errors
        results.append(result[:4096].view(dtype))
        np.testing.assert_array_equal(
            results[0].view(np.uint8), results[-1].view(np.uint8)
        )
    return results[0]


@both
def test_count_form(arch: int) -> None:
    got = run(arch, "counts", FLOATS, np.float32)
    np.testing.assert_array_equal(got[:100], FLOATS[:100] + FLOATS[512:612])
    assert (got[100:] == -1).all()


@both
def test_masks(arch: int) -> None:
    got = run(arch, "masks", FLOATS, np.float32)
    want = np.full(1024, -1, np.float32)
    for repeat in range(3):
        want[repeat * 64 :][:10] = FLOATS[repeat * 64 :][:10]
    bits = [i for i in range(64) if 0x00FF00FF00000005 >> i & 1]
    for i in bits:
        want[256 + i] = FLOATS[256 + i]
    np.testing.assert_array_equal(got[:512], want[:512])
    halves, data = got.view(np.float16), FLOATS.view(np.float16)
    wide = want.view(np.float16).copy()
    wide[1024], wide[1024 + 127] = data[1024] + np.float16(0), data[1024 + 127]
    np.testing.assert_array_equal(halves[1024:1280], wide[1024:1280])


@both
def test_strides(arch: int) -> None:
    got = run(arch, "strides", FLOATS, np.float32)
    rows = FLOATS[:256].reshape(4, 64) * FLOATS[512:576]
    np.testing.assert_array_equal(got[:256].reshape(4, 64), rows)
    every_second = FLOATS[:256].reshape(2, 8, 2, 8)[:, :, 0].reshape(-1)
    np.testing.assert_array_equal(got[512:640], every_second)
    np.testing.assert_array_equal(got[768:832], np.tile(FLOATS[:8], 8))


@both
def test_half_arithmetic_rounds_as_ieee(arch: int) -> None:
    data = HALVES.copy()
    data[:8] = [65504, -65504, 6e-8, 1e-7, np.inf, 0, 300, 0.1]
    data[512:520] = [65504, 65504, 6e-8, 0.5, 1, 0, 300, 3]
    got = run(arch, "half", data, np.float16).reshape(4, 512)
    x, y = data[:512], data[512:1024]
    with np.errstate(all="ignore"):
        want = [x * y, x + y, x - y, x / y]
    for i in range(4):
        np.testing.assert_array_equal(got[i], want[i])


@both
def test_largest_and_smallest_carry_nan(arch: int) -> None:
    data = FLOATS.copy()
    data[3] = data[512 + 7] = np.nan
    got = run(arch, "largest", data, np.float32)
    np.testing.assert_array_equal(got[:512], np.maximum(data[:512], data[512:]))
    np.testing.assert_array_equal(got[512:], np.minimum(data[:512], data[512:]))


@both
def test_functions_of_one_number(arch: int) -> None:
    x = np.abs(FLOATS) + np.float32(0.1)
    got = run(arch, "unary", x, np.float32)[:896].reshape(7, 128)
    x = x[:128].astype(np.float64)
    want = [np.exp(x), np.log(x), x, np.sqrt(x), 1 / x, 3 * x, 1 / np.sqrt(x)]
    np.testing.assert_allclose(got, want, rtol=2e-7, atol=2e-7)


@both
def test_sums_in_place(arch: int) -> None:
    got = run(arch, "sums_in_place", FLOATS, np.float32)
    total = np.zeros(64, np.float32)
    for row in FLOATS[:512].reshape(8, 64):
        total = row + total
    np.testing.assert_array_equal(got[:64], total)
    np.testing.assert_array_equal(got[64:128], 1 + np.float32(2.5) * FLOATS[:64])
    halves = FLOATS.view(np.float16)[:64].astype(np.float32)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(got[128:192], 1 + np.float32(2.5) * halves)


def tied_floats(digits: int) -> np.ndarray:
    """Return floats on, beside and between neighbours of a format, and its extremes."""
    ulp = 2.0**-digits
    some = [1 + ulp / 2, 1 + 3 * ulp / 2, 1 + ulp * 0.4999, 1 + ulp * 0.5001, 1 + ulp]
    some += [70000.0, 65504.0, 65519.9, 65520.0, 0.0, 1e-8, 2.0**-25, 3 * 2.0**-25]
    some += [2.0**-24, 6.1e-5, 2.0**-14 - 2.0**-26, np.inf, 1e30, 3.0]
    values = np.array([*some, *(-np.array(some))], np.float32)
    return np.concatenate([values, FLOATS])[:1024]


@both
def test_half_and_float(arch: int) -> None:
    bits = np.arange(0, 65536, 32, dtype=np.uint16)  # of every exponent
    got = run(arch, "half_to_float", bits, np.float32)
    np.testing.assert_array_equal(got, bits[:1024].view(np.float16).astype(np.float32))
    data = tied_floats(10)
    with np.errstate(over="ignore"):
        want = data[:1000].astype(np.float16)
    got = run(arch, "float_to_half", data, np.float16)
    np.testing.assert_array_equal(got[:1000], want)
    got = run(arch, "float_to_half_odd", data, np.float16)[:1000]
    finite = np.abs(data[:1000]) <= 65504
    down = round_to(data[:1000], np.float16, "TRUNC")
    odd = np.where(down.astype(np.float32) == data[:1000], down.view(np.uint16), 0)
    odd = np.where(odd == 0, down.view(np.uint16) | 1, odd).astype(np.uint16)
    odd = np.where(data[:1000] == 0, down.view(np.uint16), odd).astype(np.uint16)
    np.testing.assert_array_equal(got.view(np.uint16)[finite], odd[finite])


def round_to(data: np.ndarray, dtype: Any, mode: str) -> np.ndarray:
    """Round finite floats to a 16-bit format by the definition of a mode.

    Starts from the nearest number and steps to the neighbour on the asked side.
    """
    with np.errstate(over="ignore"):
        near = data.astype(dtype)
    near = np.where(np.isinf(near), np.copysign(LARGEST[dtype], data), near).astype(
        dtype
    )
    bits = near.view(np.int16)
    back = near.astype(np.float64)
    exact = data.astype(np.float64)
    toward = np.where(np.abs(back) > np.abs(exact), bits - 1, bits).astype(np.int16)
    away = np.where(toward.view(dtype).astype(np.float64) == exact, toward, toward + 1)
    away = away.astype(np.int16)
    negative = np.signbit(data)
    low, high = toward.view(dtype), away.view(dtype)
    if mode == "TRUNC":
        return low
    if mode in ("FLOOR", "CEIL"):
        return np.where(negative == (mode == "FLOOR"), high, low).astype(dtype)
    middle = np.abs(low.astype(np.float64)) + np.abs(high.astype(np.float64))
    return np.where(2 * np.abs(exact) >= middle, high, low).astype(dtype)


LARGEST: dict[Any, float] = {np.float16: 65504.0}


@both
def test_cast_by_repeats(arch: int) -> None:
    """Half the elements of a repeat are read when the result is twice as wide."""
    got = run(arch, "cast_by_repeats", HALVES, np.float32)
    want = HALVES.reshape(-1, 128)[:4, :64].astype(np.float32)
    np.testing.assert_array_equal(got[:256].reshape(4, 64), want)


@both
def test_half_to_integers(arch: int) -> None:
    data = HALVES.copy()
    data[:10] = [0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 65504, np.inf, -np.inf, np.nan]
    got = run(arch, "half_to_integers", data, np.int32)[:640].reshape(5, 128)
    x = data[:128].astype(np.float64)
    nearest = np.copysign(np.floor(np.abs(x) + 0.5), x)
    for i, want in enumerate(
        [np.rint(x), np.floor(x), np.ceil(x), nearest, np.trunc(x)]
    ):
        want = np.clip(np.nan_to_num(want, nan=0), -(2**31), 2**31 - 1)
        np.testing.assert_array_equal(got[i], want.astype(np.int64))


def tree_sum(values: np.ndarray, width: int) -> np.ndarray:
    """Add pairs, then pairs of sums, of rows padded with zeros to `width`."""
    padded = np.zeros((len(values), width), values.dtype)
    padded[:, : values.shape[1]] = values
    while padded.shape[1] > 1:
        padded = padded[:, 0::2] + padded[:, 1::2]
    return padded[:, 0]


@both
def test_half_sums(arch: int) -> None:
    got = run(arch, "half_sums", HALVES, np.float16)
    rows = HALVES[:1024].reshape(8, 128)
    np.testing.assert_array_equal(got[:8], tree_sum(rows, 128))
    np.testing.assert_array_equal(got[64:72:2], tree_sum(rows[:4, :100], 128))
    blocks = HALVES[:256].reshape(16, 16)
    np.testing.assert_array_equal(got[128:144], tree_sum(blocks, 16))
    # 40 elements: three blocks, the last of them in part; no result for the others.
    for repeat in range(2):
        row = HALVES[repeat * 128 :][:40]
        want = [row[:16].max(), row[16:32].max(), row[32:].max()]
        np.testing.assert_array_equal(got[192 + repeat * 8 :][:3], want)
    untouched = np.full(2, -1, np.float32).view(np.float16)
    np.testing.assert_array_equal(got[196:200], untouched)
    padded = np.concatenate([HALVES[:1000], np.zeros(24, np.float16)]).reshape(8, 128)
    sums = tree_sum(padded, 128)
    in_order = functools.reduce(np.add, sums)
    assert got[256] == (in_order if arch == 2201 else tree_sum(sums[None], 8)[0])


@both
def test_half_maxima_and_places(arch: int) -> None:
    data = HALVES.copy()
    data[5] = data[70] = 60  # the first of equals
    got = run(arch, "half_maxima", data, np.float16)
    rows = data[:1024].reshape(8, 128)
    np.testing.assert_array_equal(got[:16:2], rows.max(1))
    np.testing.assert_array_equal(got[1:16:2].view(np.uint16), rows.argmax(1))
    np.testing.assert_array_equal(got[64:80:2], rows[:, :100].min(1))
    np.testing.assert_array_equal(got[65:80:2].view(np.uint16), rows[:, :100].argmin(1))
    assert got[128] == 60 and got[129:130].view(np.uint16)[0] == 5


@both
def test_select_by_one_mask(arch: int) -> None:
    got = run(arch, "selects", FLOATS, np.float32)
    chosen = np.tile(FLOATS[:64] >= FLOATS[64:128], 2)
    np.testing.assert_array_equal(
        got[:128], np.where(chosen, FLOATS[:128], FLOATS[128:256])
    )


@both
def test_integers_wrap(arch: int) -> None:
    data = random.integers(-(2**31), 2**31, 1024).astype(np.int32)
    got = run(arch, "integers", data, np.int32)[:768].reshape(3, 256)
    x, y = data[:256], data[256:512]
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got[0], x + y)
        np.testing.assert_array_equal(got[1], x * y)
    np.testing.assert_array_equal(got[2], np.maximum(x, y))


@both
def test_strided_copies(arch: int) -> None:
    got = run(arch, "strided_copies", FLOATS, np.float32)
    want = np.full(1024, -1, np.float32)
    for block in range(3):
        want[block * 48 :][:16] = FLOATS[block * 24 :][:16]
    np.testing.assert_array_equal(got, want)


# Only arch 2201 has these -------------------------------------------------------------


def test_float_sums_and_places() -> None:
    got = run(2201, "float_sums", FLOATS, np.float32)
    rows = FLOATS[:512].reshape(8, 64)
    np.testing.assert_array_equal(got[:8], tree_sum(rows, 64))
    np.testing.assert_array_equal(got[64:80], tree_sum(FLOATS[:128].reshape(16, 8), 8))
    np.testing.assert_array_equal(got[128:136], rows.max(1))
    np.testing.assert_array_equal(got[192:200].view(np.uint32), rows.argmax(1))
    np.testing.assert_array_equal(got[256:272:2].view(np.uint32), rows.argmax(1))
    np.testing.assert_array_equal(got[257:272:2], rows.max(1))
    np.testing.assert_array_equal(got[320:328], rows.min(1))
    padded = np.concatenate([FLOATS[:777], np.zeros(55, np.float32)]).reshape(13, 64)
    assert got[384] == functools.reduce(np.add, tree_sum(padded, 64))
    assert got[448] == FLOATS[:777].max()
    assert got[449:450].view(np.uint32)[0] == FLOATS[:777].argmax()
    assert got[512] == FLOATS[:777].min()


def test_float_to_half_in_every_mode() -> None:
    data = tied_floats(10)[:1024]
    data = np.where(np.abs(data) <= 65504, data, 1).astype(np.float32)
    got = run(2201, "float_to_half_modes", data, np.float16)
    x = data[:200]
    np.testing.assert_array_equal(got[:200], x.astype(np.float16))
    for i, mode in enumerate(["FLOOR", "CEIL", "ROUND", "TRUNC"], 1):
        want = round_to(x, np.float16, mode)
        np.testing.assert_array_equal(got[i * 256 :][:200], want, err_msg=mode)


def test_bfloat16() -> None:
    data = tied_floats(7)
    got = run(2201, "bfloat16", data, np.uint16)
    want = data[:512].astype(ml_dtypes.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(got[:512], want)
    cut = (data[:512].view(np.uint32) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(got[512:1024], cut)
    wide = data.view(np.uint16)[:512].astype(np.uint32) << 16
    np.testing.assert_array_equal(got[1024:].view(np.uint32), wide)


def test_floats_to_integers_and_back() -> None:
    data = FLOATS.copy()
    data[:6] = [0.5, 1.5, 2.5, 3e9, -3e9, -0.5]
    got = run(2201, "to_integers", data, np.int32)
    want = np.clip(np.rint(data[:512].astype(np.float64)), -(2**31), 2**31 - 1)
    np.testing.assert_array_equal(got[:512], want.astype(np.int64))
    back = data.view(np.int32)[:512].astype(np.float32)
    np.testing.assert_array_equal(got[512:].view(np.float32), back)


def test_mask_registers() -> None:
    got = run(2201, "counter", FLOATS, np.float32)
    want = np.full(1024, -1, np.float32)
    want[:64], want[64:70] = FLOATS[:64], FLOATS[128:134]
    for repeat in range(2):
        want[512 + repeat * 64 + 4 :][:4] = FLOATS[repeat * 64 + 4 :][:4]
    np.testing.assert_array_equal(got, want)


def test_spreading_and_filling() -> None:
    got = run(2201, "spread", FLOATS, np.float32)
    np.testing.assert_array_equal(
        got[:128].reshape(16, 8), FLOATS[:16, None] + [[0] * 8]
    )
    halves = got.view(np.float16)[512:768].reshape(8, 2, 16)[:, 0]
    source = FLOATS.view(np.float16)[:8, None]
    np.testing.assert_array_equal(halves, np.broadcast_to(source, (8, 16)))
    np.testing.assert_array_equal(got[512:612], 5 + np.arange(100, dtype=np.float32))
    np.testing.assert_array_equal(got[640:704], FLOATS[:64])
    np.testing.assert_array_equal(got[704:768], FLOATS[128:192])
    np.testing.assert_array_equal(got[768:832], np.maximum(FLOATS[:64], 0.5))
    np.testing.assert_array_equal(got[832:896], np.minimum(FLOATS[:64], 0.5))
    np.testing.assert_array_equal(got[896:960], 1 + FLOATS[:64] * FLOATS[64:128])


def test_compares_and_selects() -> None:
    data = FLOATS.copy()
    data[:4] = [0, -0.0, np.nan, np.inf]
    got = run(2201, "compares", data, np.uint8)
    x = data[:128]
    relations: list[Callable[[np.ndarray, float], np.ndarray]] = [
        np.less,
        np.greater,
        np.equal,
        np.less_equal,
        np.greater_equal,
        np.not_equal,
    ]
    for i, relation in enumerate(relations):
        want = np.packbits(relation(x, 0), bitorder="little")
        np.testing.assert_array_equal(got[i * 32 :][:16], want)
    floats = got.view(np.float32)
    np.testing.assert_array_equal(floats[512:640], np.where(x < 0, x, 7))
    np.testing.assert_array_equal(floats[640:768], np.where(x < 0, x, data[128:256]))


def test_padded_copies() -> None:
    got = run(2201, "padded_copies", FLOATS, np.uint8)
    want = np.zeros(4096, np.uint8)
    rows = np.full((3, 8), 9.5, np.float32)
    for row in range(3):
        rows[row, 1:6] = FLOATS[row * 7 :][:5]
        blob = np.ascontiguousarray(rows[row, :7]).view(np.uint8)
        want[row * 33 :][:28] = blob
    np.testing.assert_array_equal(got, want)
