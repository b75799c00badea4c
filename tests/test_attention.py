"""Attention over pages against a float64 loop, and what must not change its result."""

import dataclasses
import functools
import math
from collections.abc import Callable
from functools import partial

import attention_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Arrays, Case, make_arrays
from jax import lax
from jax.experimental import checkify
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from oracles import attention_oracle

from pagedjax import _attention, _attention_xla
from pagedjax._attention import (
    available_implementations,
    merge_attention,
    paged_attention,
    ragged_paged_attention,
)
from pagedjax._attention_call import describe_call

IMPLEMENTATIONS = list(available_implementations())
ALL_CASES = cases.pairwise_cases()
QUICK = [pytest.param(case, marks=pytest.mark.core) for case in ALL_CASES[:4]]
DECODE_CASES = QUICK + ALL_CASES[4:]
RAGGED_CASES = (
    QUICK
    + ALL_CASES[4:20]
    + [pytest.param(case, marks=pytest.mark.slow) for case in ALL_CASES[20:]]
)
# Relative rounding of the result's dtype: one unit in the last place.
ULP = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def attention_of(arrays: Arrays) -> Callable:
    """Return the function that the arrays are arguments of."""
    return paged_attention if arrays.cu_q_lens is None else ragged_paged_attention


@functools.cache
def compiled(attention: Callable, **options) -> Callable:
    """Return the jitted function; compiling is most of this file's time."""
    return jax.jit(
        partial(attention, return_lse=True, **options),
        compiler_options={"xla_backend_optimization_level": 0},
    )


def run(arrays: Arrays, **options) -> tuple[np.ndarray, np.ndarray]:
    """Return (out, lse) of a call as NumPy arrays."""
    out, lse = compiled(attention_of(arrays), **options)(*arrays.args())
    return np.asarray(out), np.asarray(lse)


def oracle(arrays: Arrays, **options) -> tuple[np.ndarray, np.ndarray]:
    """Return (out, lse) of the loop oracle."""
    return attention_oracle(
        arrays.q,
        arrays.k_pages,
        arrays.v_pages,
        arrays.page_indices,
        arrays.seq_lens,
        arrays.cu_q_lens,
        **options,
    )


def assert_matches_oracle(arrays: Arrays, out, lse, **options) -> None:
    """Compare with the oracle: within float32 sums and one rounding of the dtype."""
    expected, expected_lse = oracle(arrays, **options)
    np.testing.assert_allclose(
        out.astype(np.float64), expected, rtol=ULP[out.dtype.name], atol=4e-6
    )
    np.testing.assert_allclose(lse, expected_lse, rtol=4e-6, atol=4e-6)
    blind = np.isinf(expected_lse)
    assert np.all(out[blind] == 0)
    assert np.all(np.isneginf(lse[blind]))


def small_decode(**options) -> Arrays:
    """Decode with an empty slot, a full page, a partial page."""
    return make_arrays([0, 4, 7, 1, 12, 5], **options)


def small_ragged(**options) -> Arrays:
    """Prefill and decode mixed, idle slots, padding."""
    return make_arrays(
        [0, 4, 7, 9, 12, 30], q_lens=[0, 4, 3, 0, 1, 22], padding=5, **options
    )


BOTH = pytest.mark.parametrize("make", [small_decode, small_ragged])


# --- against the oracle --------------------------------------------------------------


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


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", DECODE_CASES, ids=str)
def test_decode_matches_oracle(case: Case, implementation: str) -> None:
    check_case(implementation, case, ragged=False)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
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
    one_each = _attention_xla.attend_one_row_each
    out, lse = jax.jit(partial(one_each, call, together=together))(*args)
    assert_matches_oracle(arrays, np.asarray(out), np.asarray(lse), window=5)


def test_large_scores_do_not_overflow() -> None:
    arrays = small_decode()
    arrays.q *= 1e4
    assert_matches_oracle(arrays, *run(arrays))


def test_soft_cap_of_large_scores() -> None:
    # Case F8: scores of about 100, cap 30, before the mask, alone and with a window.
    for arrays in (small_decode(), small_ragged()):
        for window in (None, 3):
            options = {"scale": 30.0, "soft_cap": 30.0, "window": window}
            out, lse = run(arrays, **options)
            assert_matches_oracle(arrays, out, lse, **options)
            uncapped = run(arrays, scale=30.0, window=window)
            assert np.nanmax(np.abs(out - uncapped[0])) > 0.1


# --- what each row sees --------------------------------------------------------------


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


# --- what must not matter ------------------------------------------------------------


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
    # Case F16: alone or among eight, the same bits.
    arrays = make_arrays([5, 300, 1, 17, 0, 64, 33, 9], page_size=16)
    out, lse = run(arrays)
    for slot in range(8):
        solo = dataclasses.replace(
            arrays,
            q=arrays.q[slot : slot + 1],
            page_indices=arrays.page_indices[slot : slot + 1],
            seq_lens=arrays.seq_lens[slot : slot + 1],
        )
        np.testing.assert_array_equal(run(solo)[0][0], out[slot])
        np.testing.assert_array_equal(run(solo)[1][0], lse[slot])


@pytest.mark.parametrize("window", [None, 6])
def test_chunk_size_does_not_matter(window: int | None) -> None:
    whole = make_arrays([150], q_lens=[150], page_size=8)
    expected, _ = run(whole, window=window)
    for chunk in (7, 64, 149):
        parts = []
        for start in range(0, 150, chunk):
            end = min(start + chunk, 150)
            part = dataclasses.replace(
                whole,
                q=whole.q[start:end],
                seq_lens=np.array([end], np.int32),
                cu_q_lens=np.array([0, end - start], np.int32),
            )
            parts.append(run(part, window=window)[0])
        np.testing.assert_allclose(np.concatenate(parts), expected, atol=2e-6)


@pytest.mark.core
def test_decode_is_ragged_with_one_row_each() -> None:
    decode = make_arrays([4, 7, 1, 12], page_size=4)
    ragged = dataclasses.replace(decode, cu_q_lens=np.arange(5, dtype=np.int32))
    np.testing.assert_array_equal(run(decode)[0], run(ragged)[0])
    np.testing.assert_array_equal(run(decode)[1], run(ragged)[1])


# --- merging -------------------------------------------------------------------------


def parts_of(rng: np.random.Generator, n: int) -> list[tuple[jax.Array, jax.Array]]:
    """Return n random (out, lse) pairs, one row of them empty in the first."""
    parts = []
    for i in range(n):
        out, lse = rng.standard_normal((3, 2, 8)), rng.standard_normal((3, 2)) * 5
        if i == 0:
            out[1], lse[1] = 0, -np.inf
        parts.append((jnp.float32(out), jnp.float32(lse)))
    return parts


@pytest.mark.core
def test_merge_of_two_halves_is_the_whole() -> None:
    whole = make_arrays([12, 9], page_size=4)
    first = dataclasses.replace(whole, seq_lens=np.array([8, 8], np.int32))
    second = dataclasses.replace(
        whole,
        page_indices=whole.page_indices[:, 2:],
        seq_lens=whole.seq_lens - 8,
    )
    out, lse = merge_attention(run(first), run(second))
    expected, expected_lse = run(whole)
    np.testing.assert_allclose(out, expected, atol=1e-6)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-6)


def test_merge_is_associative_and_commutative() -> None:
    a, b, c = parts_of(np.random.default_rng(0), 3)
    expected = merge_attention(a, b, c)
    for other in (
        merge_attention(merge_attention(a, b), c),
        merge_attention(a, merge_attention(b, c)),
        merge_attention(c, a, b),
    ):
        np.testing.assert_allclose(other[0], expected[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(other[1], expected[1], rtol=1e-6, atol=1e-6)


@pytest.mark.core
def test_merge_with_nothing_is_exact() -> None:
    # Case F2. The empty part may even hold NaN: its weight is zero.
    _, part = parts_of(np.random.default_rng(0), 2)
    nothing = (jnp.full_like(part[0], jnp.nan), jnp.full_like(part[1], -jnp.inf))
    for merged in (
        merge_attention(part),
        merge_attention(part, nothing),
        merge_attention(nothing, part, nothing),
    ):
        np.testing.assert_array_equal(merged[0], part[0])
        np.testing.assert_array_equal(merged[1], part[1])
    out, lse = merge_attention(nothing, nothing)
    assert np.all(np.asarray(out) == 0) and np.all(np.isneginf(lse))


def test_merge_has_finite_gradients_with_empty_rows() -> None:
    parts = parts_of(np.random.default_rng(0), 2)
    grads = jax.grad(lambda p: jnp.sum(jnp.square(merge_attention(*p)[0])))(parts)
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(grads))


def test_merge_keeps_dtype_and_checks_shapes() -> None:
    out, lse = jnp.ones((2, 3, 4), jnp.bfloat16), jnp.zeros((2, 3))
    assert merge_attention((out, lse), (out, lse))[0].dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="at least one"):
        merge_attention()
    with pytest.raises(ValueError, match=r"part 1 .*\(2, 3, 5\)"):
        merge_attention((out, lse), (jnp.ones((2, 3, 5)), lse))


# --- transformations -----------------------------------------------------------------


@BOTH
def test_vmap_is_a_loop(make: Callable) -> None:
    many = [make(seed=seed) for seed in range(3)]
    stacked = [jnp.stack(x) for x in zip(*(a.args() for a in many), strict=True)]
    attention = partial(attention_of(many[0]), return_lse=True, window=6)
    out, lse = jax.vmap(attention)(*stacked)
    for i, arrays in enumerate(many):
        expected = attention(*arrays.args())
        np.testing.assert_allclose(out[i], expected[0], atol=2e-6)
        np.testing.assert_allclose(lse[i], expected[1], atol=2e-6)
    # Queries batched, pool and table shared.
    out, _ = jax.vmap(attention, in_axes=(0, *[None] * (len(stacked) - 1)))(
        stacked[0], *many[0].args()[1:]
    )
    np.testing.assert_allclose(out[0], attention(*many[0].args())[0], atol=2e-6)


@pytest.mark.core
@BOTH
def test_inside_scan_and_while_loop(make: Callable) -> None:
    # A flat pool of three layers; the layer is a traced offset of the page ids.
    arrays = make()
    layers = [make(seed=0) for _ in range(3)]
    num_pages = len(arrays.k_pages)
    k_pages = jnp.concatenate([x.k_pages * (i + 1) for i, x in enumerate(layers)])
    v_pages = jnp.concatenate([x.v_pages - i for i, x in enumerate(layers)])
    q, _, _, page_indices, *lens = arrays.args()
    live = (page_indices >= 0) & (page_indices < num_pages)
    attention = attention_of(arrays)

    def layer(i):
        ids = jnp.where(live, page_indices + i * num_pages, 3 * num_pages)
        return attention(q, k_pages, v_pages, ids, *lens)

    _, scanned = jax.jit(
        lambda: lax.scan(lambda c, i: (c, layer(i)), 0, jnp.arange(3))
    )()
    for i in range(3):
        expected = attention(
            q,
            k_pages[i * num_pages : (i + 1) * num_pages],
            v_pages[i * num_pages : (i + 1) * num_pages],
            page_indices,
            *lens,
        )
        np.testing.assert_allclose(scanned[i], expected, atol=2e-6)

    def step(state):
        i, total = state
        return i + 1, total + layer(i)

    _, total = jax.jit(
        lambda: lax.while_loop(lambda s: s[0] < 3, step, (0, jnp.zeros_like(q)))
    )()
    np.testing.assert_allclose(total, scanned.sum(0), atol=1e-5)


@BOTH
def test_shard_map_over_kv_heads(make: Callable) -> None:
    arrays = make(heads=(8, 4))
    mesh = jax.make_mesh((4,), ("kv",), axis_types=(AxisType.Auto,))
    by_head, whole = P(None, "kv"), P()
    in_specs = (by_head, P(None, None, "kv"), P(None, None, "kv"), whole, whole)
    if arrays.cu_q_lens is not None:
        in_specs = (*in_specs, whole)
    attention = partial(attention_of(arrays), return_lse=True, window=9)
    sharded = jax.jit(
        jax.shard_map(
            attention, mesh=mesh, in_specs=in_specs, out_specs=(by_head, by_head)
        )
    )
    expected = attention(*arrays.args())
    out = sharded(*arrays.args())
    np.testing.assert_allclose(out[0], expected[0], atol=2e-6)
    np.testing.assert_allclose(out[1], expected[1], atol=2e-6)

    def loss(attention, q, k_pages, v_pages):
        return jnp.sum(jnp.sin(attention(q, k_pages, v_pages, *arrays.args()[3:])[0]))

    grads = [
        jax.grad(partial(loss, f), argnums=(0, 1, 2))(*arrays.args()[:3])
        for f in (sharded, attention)
    ]
    for mine, theirs in zip(*grads, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=4e-6)


# --- gradients -----------------------------------------------------------------------


def dense_attention(q, k_pages, v_pages, arrays: Arrays, *, window=None, soft_cap=None):
    """Return (out, lse) by the plain formula, row by row; differentiable."""
    page_size, num_kv_heads = k_pages.shape[1:3]
    group = q.shape[1] // num_kv_heads
    outs, lses = [], []
    num_slots = len(arrays.seq_lens)
    cu_q_lens = arrays.cu_q_lens
    if cu_q_lens is None:
        cu_q_lens = np.arange(num_slots + 1)
    for row in range(len(q)):
        slot = int(np.searchsorted(cu_q_lens[1:], row, side="right"))
        length = int(arrays.seq_lens[slot]) if slot < num_slots else 0
        place = length - int(cu_q_lens[slot + 1]) + row if length else -1
        first = 0 if window is None else max(0, place - window + 1)
        seen = np.arange(first, place + 1)
        if seen.size == 0:
            outs.append(jnp.zeros_like(q[row]))
            lses.append(jnp.full(q.shape[1], -jnp.inf))
            continue
        at = arrays.page_indices[slot, seen // page_size], seen % page_size
        keys = jnp.repeat(k_pages[at], group, axis=1)
        values = jnp.repeat(v_pages[at], group, axis=1)
        scores = jnp.einsum("hd,nhd->hn", q[row], keys) / math.sqrt(q.shape[-1])
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        outs.append(jnp.einsum("hn,nhd->hd", jax.nn.softmax(scores), values))
        lses.append(jax.nn.logsumexp(scores, axis=-1))
    return jnp.stack(outs), jnp.stack(lses)


def loss_of(out: jax.Array, lse: jax.Array) -> jax.Array:
    """Return a number that depends on every element of both, and on no -inf."""
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(jnp.where(lse > -jnp.inf, lse, 0)))


@pytest.mark.core
@BOTH
@pytest.mark.parametrize(
    "options", [{}, {"window": 3}, {"soft_cap": 1.5}, {"window": 5, "soft_cap": 2.0}]
)
def test_gradients_are_those_of_the_formula(make: Callable, options: dict) -> None:
    arrays = make()
    # Slots 2 and 4 share their first page, whose gradient is the sum over both.
    arrays.page_indices[2, 0] = arrays.page_indices[4, 0]
    args = arrays.args()

    def mine(q, k_pages, v_pages):
        attention = partial(attention_of(arrays), return_lse=True, **options)
        return loss_of(*attention(q, k_pages, v_pages, *args[3:]))

    def theirs(q, k_pages, v_pages):
        return loss_of(*dense_attention(q, k_pages, v_pages, arrays, **options))

    grads = jax.jit(jax.grad(mine, argnums=(0, 1, 2)))(*args[:3])
    # NaN pages stay out of the plain formula, so its gradient there is 0, not NaN.
    expected = jax.grad(theirs, argnums=(0, 1, 2))(*args[:3])
    for grad, other in zip(grads, expected, strict=True):
        np.testing.assert_allclose(grad, other, atol=4e-6)
        assert np.any(np.asarray(other) != 0)


def test_gradients_over_many_blocks() -> None:
    arrays = make_arrays([290, 150], q_lens=[140, 1], padding=3, page_size=16)
    args = arrays.args()

    def loss(attention, *qkv):
        return loss_of(*attention(*qkv))

    grads = jax.jit(
        jax.grad(
            partial(
                loss, lambda *x: ragged_paged_attention(*x, *args[3:], return_lse=True)
            ),
            argnums=(0, 1, 2),
        )
    )(*args[:3])
    expected = jax.jit(
        jax.grad(
            partial(loss, lambda *x: dense_attention(*x, arrays)), argnums=(0, 1, 2)
        )
    )(*args[:3])
    for grad, other in zip(grads, expected, strict=True):
        np.testing.assert_allclose(grad, other, atol=2e-5)


def test_gradients_of_bfloat16_and_of_rows_that_see_nothing() -> None:
    arrays = small_decode(dtype="bfloat16")
    args = arrays.args()

    def loss(*qkv):
        out, lse = paged_attention(*qkv, *args[3:], return_lse=True)
        # The cotangent of the empty slot is NaN: 0 * inf.
        return jnp.sum(out.astype(jnp.float32)) + jnp.sum(lse * 0)

    grads = jax.grad(loss, argnums=(0, 1, 2))(*args[:3])
    for grad, arg in zip(grads, args, strict=False):
        assert grad.dtype == arg.dtype and grad.shape == arg.shape
        assert np.all(np.isfinite(np.asarray(grad).astype(np.float32)))


# --- cost ----------------------------------------------------------------------------


@BOTH
def test_memory_does_not_grow_with_the_table(make: Callable) -> None:
    def program(pages_per_slot):
        arrays = make(pages_per_slot=pages_per_slot, page_size=16)
        return jax.jit(attention_of(arrays)).lower(*arrays.args()).compile()

    narrow, wide = program(64), program(512)
    extra = (
        wide.memory_analysis().temp_size_in_bytes
        - narrow.memory_analysis().temp_size_in_bytes
    )
    # At most a copy of the table itself: six rows of 448 more cells.
    assert extra <= 6 * 448 * 4
    # And no copy of the pages.
    pool = f"f32[{','.join(map(str, make(page_size=16).k_pages.shape))}]"
    copies = [s for s in wide.as_text().splitlines() if " copy(" in s and pool in s]
    assert not copies


@pytest.mark.core
@BOTH
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_lowers_for_every_platform(make: Callable, platform: str) -> None:
    arrays = make()
    traced = jax.jit(attention_of(arrays)).trace(*arrays.args())
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo.while" in text
    assert "custom_call" not in text


# --- the choice of an implementation -------------------------------------------------


def test_available_implementations_say_why() -> None:
    for name, (usable, reason) in available_implementations().items():
        assert isinstance(usable, bool) and reason, name
    assert available_implementations()["xla"][0]


def test_unknown_implementation_lists_the_names() -> None:
    with pytest.raises(ValueError, match=r"unknown implementation 'fast'.*xla"):
        run(small_decode(), implementation="fast")


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_quantised_pages_are_refused_with_a_reason(implementation: str | None) -> None:
    q, k_pages, v_pages, *rest = small_decode().args()
    scales = jnp.ones(k_pages.shape[:3])
    with pytest.raises(NotImplementedError, match="int8 pages with scales"):
        paged_attention(
            q,
            jnp.zeros_like(k_pages, jnp.int8),
            jnp.zeros_like(v_pages, jnp.int8),
            *rest,
            k_scales=scales,
            v_scales=scales,
            implementation=implementation,
        )


def test_best_supported_implementation_of_the_platform_is_taken(monkeypatch) -> None:
    def constant(value):
        def attend(call, q, *rest):
            return jnp.full_like(q, value), jnp.zeros(q.shape[:2])

        return attend

    def entry(platforms, value, supports=(True, ""), usable=(True, "here")):
        return _attention._Implementation(
            platforms, lambda call: supports, lambda: usable, constant(value)
        )

    table = {
        "broken": entry(("cpu",), 1.0, usable=(False, "no library")),
        "picky": entry(("cpu",), 2.0, supports=(False, "page_size 4")),
        "mine": entry(("cpu",), 3.0),
        "late": entry(("cpu",), 4.0),
        "other": entry(("tpu",), 5.0),
        **_attention._IMPLEMENTATIONS,
    }
    monkeypatch.setattr(_attention, "_IMPLEMENTATIONS", table)
    compiled.cache_clear()  # traced with the table as it was
    arrays = small_decode()
    assert np.all(run(arrays)[0] == 3.0)
    assert np.all(run(arrays, implementation="late")[0] == 4.0)
    assert_matches_oracle(arrays, *run(arrays, implementation="xla"))
    for name, reason in (("broken", "no library"), ("picky", "page_size 4")):
        with pytest.raises(NotImplementedError, match=f"'{name}'.*{reason}"):
            run(arrays, implementation=name)
    lowered = jax.jit(lambda *x: paged_attention(*x)).trace(*arrays.args())
    assert "5.0" in lowered.lower(lowering_platforms=("tpu",)).as_text()
    grad = jax.grad(lambda q: paged_attention(q, *arrays.args()[1:]).sum())
    assert np.all(np.isfinite(grad(arrays.args()[0])))


# --- mistakes ------------------------------------------------------------------------


def test_numpy_arguments_and_result_types() -> None:
    arrays = small_decode(dtype="bfloat16")
    values = dataclasses.astuple(arrays)[:-1]
    out, lse = paged_attention(*values, return_lse=True)
    assert out.shape == arrays.q.shape and out.dtype == jnp.bfloat16
    assert lse.shape == arrays.q.shape[:2] and lse.dtype == jnp.float32
    assert isinstance(paged_attention(*values), jax.Array)


BAD_ARGUMENTS = [
    ({"q": (6, 4)}, ValueError, r"q must be \[tokens, heads, head_dim\].*\(6, 4\)"),
    ({"q": (6, 3, 8)}, ValueError, "3 heads of q must be a multiple of the 2 kv"),
    ({"q": (6, 4, 16)}, ValueError, "k_pages has head_dim 8 but q has head_dim 16"),
    ({"q": (5, 4, 8)}, ValueError, "q has 5 rows but page_indices has 6 slots"),
    ({"q": "int32"}, TypeError, "q must be one of float32.*got int32"),
    ({"k_pages": "int32"}, TypeError, "v_pages must have the dtype of k_pages"),
    ({"k_pages": (9, 4, 2)}, ValueError, "k_pages must be"),
    ({"v_pages": (9, 4, 2, 8)}, ValueError, "v_pages must have the shape of k_pages"),
    ({"page_indices": (6,)}, ValueError, "page_indices must be"),
    ({"page_indices": "float32"}, TypeError, "page_indices must hold integers"),
    ({"seq_lens": (5,)}, ValueError, "seq_lens has 5 slots but page_indices has 6"),
    ({"seq_lens": (6, 1)}, ValueError, "seq_lens must be"),
    ({"seq_lens": "float32"}, TypeError, "seq_lens must hold integers, got float32"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_ARGUMENTS)
def test_bad_arguments_are_named(change: dict, error: type, message: str) -> None:
    names = ("q", "k_pages", "v_pages", "page_indices", "seq_lens")
    args = dict(zip(names, small_decode().args(), strict=True))
    for name, value in change.items():
        old = args[name]
        args[name] = (
            jnp.zeros(old.shape, value)
            if isinstance(value, str)
            else jnp.zeros(value, old.dtype)
        )
    with pytest.raises(error, match=message):
        paged_attention(*args.values())


BAD_OPTIONS = [
    ({"window": 0}, ValueError, "window must be at least 1.*got 0"),
    ({"window": -3}, ValueError, "got -3"),
    ({"window": 2.5}, TypeError, "float"),
    ({"soft_cap": 0.0}, ValueError, "soft_cap must be positive and finite, got 0.0"),
    ({"soft_cap": math.inf}, ValueError, "got inf"),
    ({"scale": math.nan}, ValueError, "scale must be finite, got nan"),
    ({"k_scales": 1}, ValueError, "must be given together"),
    ({"k_scales": 1, "v_scales": 1}, ValueError, "k_pages is float32.*given"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD_OPTIONS)
def test_bad_options_are_named(options: dict, error: type, message: str) -> None:
    args = small_decode().args()
    shape = args[1].shape[:3]
    options = {
        name: jnp.ones(shape) if name.endswith("_scales") else value
        for name, value in options.items()
    }
    with pytest.raises(error, match=message):
        paged_attention(*args, **options)


def test_quantised_pages_need_scales_of_the_right_shape() -> None:
    q, k_pages, v_pages, *rest = small_decode().args()
    k_pages, v_pages = (jnp.zeros_like(x, jnp.int8) for x in (k_pages, v_pages))
    with pytest.raises(ValueError, match="int8 and the scales are missing"):
        paged_attention(q, k_pages, v_pages, *rest)
    short = jnp.ones(k_pages.shape[:2])
    with pytest.raises(ValueError, match="k_scales must have shape"):
        paged_attention(q, k_pages, v_pages, *rest, k_scales=short, v_scales=short)


def test_cu_q_lens_is_checked() -> None:
    *args, cu_q_lens = small_ragged().args()
    with pytest.raises(ValueError, match=r"cu_q_lens must have shape \(7,\).*\(6,\)"):
        ragged_paged_attention(*args, cu_q_lens[1:])
    with pytest.raises(TypeError, match="cu_q_lens must hold integers"):
        ragged_paged_attention(*args, cu_q_lens.astype(jnp.float32))


def test_traced_options_are_named() -> None:
    args = small_decode().args()
    for option in ("window", "soft_cap", "scale"):
        with pytest.raises(TypeError, match=f"{option} must be a Python"):
            jax.jit(lambda x, o=option: paged_attention(*args, **{o: x}))(2)


@pytest.mark.parametrize("bad", [-1, 100, 2**31 - 1])
def test_live_cells_without_a_page_are_reported_under_checkify(bad: int) -> None:
    # Case E2; F14 has no counterpart: lengths are given, never the last page's.
    arrays = small_decode()
    checked = jax.jit(checkify.checkify(paged_attention, errors=checkify.user_checks))
    error, out = checked(*arrays.args())
    error.throw()
    np.testing.assert_allclose(out, run(arrays)[0], atol=1e-6)
    arrays.page_indices[4, 2] = bad
    error, _ = checked(*arrays.args())
    with pytest.raises(
        checkify.JaxRuntimeError,
        match=f"slot 4 has page id {bad} at logical page 2",
    ):
        error.throw()


def test_released_cells_before_the_window_are_not_reported() -> None:
    arrays = make_arrays([30], page_size=4)
    expected, _ = run(arrays, window=5)
    arrays.page_indices[0, :6] = len(arrays.k_pages)  # 24 of 30 tokens released
    attention = partial(paged_attention, window=5)
    error, out = checkify.checkify(attention)(*arrays.args())
    error.throw()
    np.testing.assert_array_equal(out, expected)
