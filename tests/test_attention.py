"""Attention over pages against a float64 loop, and what must not change its result."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import attention_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    Case,
    assert_matches_oracle,
    make_arrays,
    run,
    small_decode,
    small_ragged,
)

from pagedjax import _attention, _attention_xla, available_implementations
from pagedjax._attention_call import describe_call

IMPLEMENTATIONS = [
    # The processor's own runs whole on both versions of jax.
    pytest.param(name, marks=pytest.mark.core if name == "host" else [])
    for name in available_implementations()
]
ALL_CASES = cases.pairwise_cases()
QUICK = [pytest.param(case, marks=pytest.mark.core) for case in ALL_CASES[:4]]
DECODE_CASES = QUICK + ALL_CASES[4:]
RAGGED_CASES = (
    QUICK
    + ALL_CASES[4:20]
    + [pytest.param(case, marks=pytest.mark.slow) for case in ALL_CASES[20:]]
)


@pytest.fixture(autouse=True, params=IMPLEMENTATIONS)
def implementation(request, monkeypatch) -> str:
    """Run every test of this file on every implementation that is usable here."""
    usable, reason = available_implementations()[request.param]
    if not usable:
        pytest.skip(reason)
    monkeypatch.setattr(cases, "IMPLEMENTATION", request.param)
    return request.param


BOTH = pytest.mark.parametrize("make", [small_decode, small_ragged])


# --- against the oracle ---------------------------------------------------------------


def check_case(implementation: str, case: Case, *, ragged: bool) -> None:
    """Check one case, or that what is not supported says so."""
    arrays = cases.case_arrays(case, ragged=ragged)
    call = describe_call(
        *(arrays.args() if ragged else (*arrays.args(), None)),
        **case.options,
        scale=None,
        k_scales=None,
        v_scales=None,
    )
    entry = _attention._IMPLEMENTATIONS[implementation]
    options = {**case.options, "implementation": implementation}
    if not (entry.usable()[0] and entry.supports(call)[0]):
        with pytest.raises(NotImplementedError, match=implementation):
            run(arrays, **options)
        return
    assert_matches_oracle(arrays, *run(arrays, **options), **case.options)


@pytest.mark.parametrize("case", DECODE_CASES, ids=str)
def test_decode_matches_oracle(case: Case, implementation: str) -> None:
    check_case(implementation, case, ragged=False)


@pytest.mark.parametrize("case", RAGGED_CASES, ids=str)
def test_ragged_matches_oracle(case: Case, implementation: str) -> None:
    check_case(implementation, case, ragged=True)


def test_pairwise_cases_meet_every_pair() -> None:
    for a, b in [("page_size", "heads"), ("heads", "dtype"), ("window", "soft_cap")]:
        met = {(getattr(c, a), getattr(c, b)) for c in ALL_CASES}
        assert len(met) == len(cases.AXES[a]) * len(cases.AXES[b])


def test_default_scale_and_given_scale() -> None:
    arrays = small_decode()
    assert_matches_oracle(arrays, *run(arrays))
    assert_matches_oracle(arrays, *run(arrays, scale=0.5), scale=0.5)
    same = run(arrays, scale=1 / math.sqrt(arrays.q.shape[-1]))
    np.testing.assert_array_equal(run(arrays)[0], same[0])


@pytest.mark.parametrize("together", [False, True])
def test_slots_in_turn_and_together(together: bool) -> None:
    # Only one of the two is lowered on this platform; both are checked here.
    arrays = small_decode()
    args = arrays.args()
    call = describe_call(
        *args, None, scale=None, window=5, soft_cap=None, k_scales=None, v_scales=None
    )
    q, k_pages, v_pages, *rest = args
    stored = ((k_pages, None), (v_pages, None))
    one_each = _attention_xla.attend_one_row_each
    out, lse = jax.jit(partial(one_each, call, together=together))(q, *stored, *rest)
    assert_matches_oracle(arrays, np.asarray(out), np.asarray(lse), window=5)


def test_large_scores_do_not_overflow() -> None:
    arrays = small_decode()
    arrays.q *= 1e4
    assert_matches_oracle(arrays, *run(arrays), score=3e4)


def test_soft_cap_of_large_scores() -> None:
    # Case F8: scores of about 100, cap 30, before the mask, alone and with a window.
    for arrays in (small_decode(), small_ragged()):
        for window in (None, 3):
            options = {"scale": 30.0, "soft_cap": 30.0, "window": window}
            out, lse = run(arrays, **options)
            assert_matches_oracle(arrays, out, lse, score=30.0, **options)
            uncapped = run(arrays, scale=30.0, window=window)
            assert np.nanmax(np.abs(out - uncapped[0])) > 0.1


# --- what each row sees ---------------------------------------------------------------


def seen_keys(seq_len: int, rows: int, *, page_size: int, window: int | None):
    """Return bool[rows, seq_len]: the keys with weight, read off one-hot values."""
    arrays = make_arrays(
        [seq_len], q_lens=[rows], page_size=page_size, heads=(1, 1), head_dim=seq_len
    )
    for position in range(seq_len):
        page = arrays.page_indices[0, position // page_size]
        arrays.v_pages[page, position % page_size, 0] = np.eye(seq_len)[position]
    return run(arrays, window=window)[0][:, 0] > 0


@pytest.mark.core
def test_causal_mask_is_aligned_bottom_right() -> None:
    # Case F4: 3 queries, 7 keys: query i sees keys 0 .. i + 4.
    expected = np.arange(7) <= np.arange(3)[:, None] + 4
    np.testing.assert_array_equal(seen_keys(7, 3, page_size=4, window=None), expected)


@pytest.mark.parametrize("delta", [-1, 0, 1])
def test_lengths_around_a_block_of_keys_and_of_rows(delta: int) -> None:
    # Case F4: lengths block - 1, block, block + 1; the second run equals the first.
    keys = _attention_xla._MAX_BLOCK_TOKENS + delta
    rows = _attention_xla._MANY_ROWS + delta
    arrays = make_arrays([keys, 20], q_lens=[rows, 16 + delta], page_size=16)
    out, lse = run(arrays)
    assert_matches_oracle(arrays, out, lse)
    np.testing.assert_array_equal(run(arrays)[0], out)


@pytest.mark.core
def test_window_counts_the_token_itself() -> None:
    # Case F5: 16 tokens, window 4: row i sees min(i + 1, 4) keys, the latest ones.
    seen = seen_keys(16, 16, page_size=4, window=4)
    i, j = np.arange(16)[:, None], np.arange(16)
    np.testing.assert_array_equal(seen, (j <= i) & (j > i - 4))


def test_rows_before_the_first_key_see_nothing() -> None:
    # More rows than tokens is the caller's mistake; the surplus rows come first.
    arrays = make_arrays([2], q_lens=[4], page_size=4)
    out, lse = run(arrays)
    assert np.all(out[:2] == 0) and np.all(np.isneginf(lse[:2]))
    assert np.all(np.isfinite(lse[2:]))


def test_key_walk_skips_what_no_row_sees() -> None:
    arrays = make_arrays([600], page_size=16, heads=(4, 4), head_dim=64)
    call = describe_call(
        *arrays.args(),
        None,
        scale=None,
        window=None,
        soft_cap=None,
        k_scales=None,
        v_scales=None,
    )
    block = _attention_xla.block_pages(call) * 16
    windowed = dataclasses.replace(call, window=32)

    def blocks(call, length, rows=1):
        walk = _attention_xla.KeyWalk(call, rows, jnp.int32(length - rows), rows)
        return int(walk.num_blocks)

    assert blocks(call, 0, 0) == 0
    assert blocks(call, 1) == 1
    assert blocks(call, block) == 1
    assert blocks(call, block + 1) == 2
    assert blocks(call, 600) == -(-600 // block)
    assert blocks(windowed, 600) == 1  # 32 keys of 600
    assert blocks(call, 10**6) == -(-608 // block)  # the table has 38 pages


# --- what must not matter -------------------------------------------------------------


@pytest.mark.core
@BOTH
@pytest.mark.parametrize("window", [None, 3])
def test_poison_does_not_matter(make: Callable, window: int | None) -> None:
    # Cases F1 and E4: NaN, infinities and 1e30 at every place nobody owns.
    arrays = make()
    out, lse = run(arrays, window=window)
    assert np.all(np.isfinite(out)) and not np.any(np.isnan(lse))
    unowned = ~arrays.owned()
    for poison in (1e30, -1e30, np.inf, 0.0):
        arrays.k_pages[unowned] = poison
        arrays.v_pages[unowned] = poison
        again = run(arrays, window=window)
        np.testing.assert_array_equal(again[0], out)
        np.testing.assert_array_equal(again[1], lse)


@pytest.mark.parametrize("page_size", [1, 5, 8])
def test_poison_at_every_length_around_a_page(page_size: int) -> None:
    # Case F1, lengths 1, page - 1, page, page + 1, 3 pages - 1.
    lengths = [1, page_size - 1, page_size, page_size + 1, 3 * page_size - 1]
    arrays = make_arrays(lengths, page_size=page_size)
    out, lse = run(arrays)
    assert_matches_oracle(arrays, out, lse)


@BOTH
def test_order_of_physical_pages_does_not_matter(make: Callable) -> None:
    # Case F16.
    arrays = make()
    out, lse = run(arrays)
    num_pages = len(arrays.k_pages)
    moved = np.random.default_rng(1).permutation(num_pages)
    inverse = np.argsort(moved)
    inside = (arrays.page_indices >= 0) & (arrays.page_indices < num_pages)
    ids = np.where(inside, arrays.page_indices, 0)
    other = dataclasses.replace(
        arrays,
        k_pages=arrays.k_pages[moved],
        v_pages=arrays.v_pages[moved],
        page_indices=np.where(inside, inverse[ids], arrays.page_indices),
    )
    again = run(other)
    np.testing.assert_array_equal(again[0], out)
    np.testing.assert_array_equal(again[1], lse)


@BOTH
@pytest.mark.parametrize("garbage", [-1, -(2**31), 2**31 - 1, 10**6, 0])
def test_ids_past_the_live_length_do_not_matter(make: Callable, garbage: int) -> None:
    # Case E2, and NULL is among the garbage that make_arrays draws.
    arrays = make(pages_per_slot=11)
    out, _ = run(arrays)
    needs = -(-arrays.seq_lens // 4)
    past = np.arange(11) >= needs[:, None]
    assert past.any()
    arrays.page_indices = np.where(past, np.int32(garbage), arrays.page_indices)
    np.testing.assert_array_equal(run(arrays)[0], out)


@pytest.mark.parametrize("extra_pages", [0, 1, 70])
def test_width_of_the_table_does_not_matter(extra_pages: int) -> None:
    # Cases D14 and E7: a table as wide as the length needs, one with a reserved page
    # of NaN at its end, and one wider than a block; 12 tokens fill 3 pages exactly.
    arrays = make_arrays([12, 3], page_size=4)
    expected, _ = run(arrays)
    poisoned = np.flatnonzero(~arrays.owned().any(axis=1))[0]
    more = np.full((2, extra_pages), poisoned, np.int32)
    wide = dataclasses.replace(
        arrays, page_indices=np.concatenate([arrays.page_indices, more], axis=1)
    )
    assert wide.page_indices.shape == (2, 3 + extra_pages)
    np.testing.assert_allclose(run(wide)[0], expected, rtol=1e-6, atol=1e-6)


def test_batch_mates_do_not_matter() -> None:
    # Case F16: alone or among eight. Groups of slots share products, so not the bits.
    arrays = make_arrays([5, 300, 1, 17, 0, 64, 33, 9], page_size=16)
    out, lse = run(arrays)
    for slot in range(8):
        solo = dataclasses.replace(
            arrays,
            q=arrays.q[slot : slot + 1],
            page_indices=arrays.page_indices[slot : slot + 1],
            seq_lens=arrays.seq_lens[slot : slot + 1],
        )
        np.testing.assert_allclose(run(solo)[0][0], out[slot], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(run(solo)[1][0], lse[slot], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("window", [None, 6])
def test_chunk_size_does_not_matter(window: int | None) -> None:
    whole = make_arrays([150], q_lens=[150], page_size=8)
    expected, _ = run(whole, window=window)
    for chunk in (7, 64):
        parts = []
        for start in range(0, 150, chunk):
            end = min(start + chunk, 150)
            rows = np.zeros((chunk, *whole.q.shape[1:]), np.float32)
            rows[: end - start] = whole.q[start:end]
            part = dataclasses.replace(
                whole,
                q=rows,
                seq_lens=np.array([end], np.int32),
                cu_q_lens=np.array([0, end - start], np.int32),
            )
            parts.append(run(part, window=window)[0][: end - start])
        np.testing.assert_allclose(np.concatenate(parts), expected, atol=2e-6)


@pytest.mark.core
def test_decode_is_ragged_with_one_row_each() -> None:
    decode = make_arrays([4, 7, 1, 12], page_size=4)
    ragged = dataclasses.replace(decode, cu_q_lens=np.arange(5, dtype=np.int32))
    np.testing.assert_array_equal(run(decode)[0], run(ragged)[0])
    np.testing.assert_array_equal(run(decode)[1], run(ragged)[1])
