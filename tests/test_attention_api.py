"""Merging attention, choosing an implementation, and the caller's mistakes."""

import dataclasses
import math
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    assert_matches_oracle,
    compiled,
    make_arrays,
    run,
    small_decode,
    small_ragged,
)
from jax.experimental import checkify

from pagedjax import (
    _attention,
    available_implementations,
    merge_attention,
    paged_attention,
    ragged_paged_attention,
)

# --- merging --------------------------------------------------------------------------


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


# --- the choice of an implementation --------------------------------------------------


def test_available_implementations_say_why() -> None:
    for name, (usable, reason) in available_implementations().items():
        assert isinstance(usable, bool) and reason, name
    assert available_implementations()["xla"][0]


def test_unknown_implementation_lists_the_names() -> None:
    with pytest.raises(ValueError, match=r"unknown implementation 'fast'.*xla"):
        run(small_decode(), implementation="fast")


@pytest.mark.usefixtures("nothing_compiled")
def test_a_call_that_nothing_supports_lists_the_reasons(monkeypatch) -> None:
    refusal = dataclasses.replace(
        _attention._IMPLEMENTATIONS["xla"], supports=lambda call: (False, "too new")
    )
    monkeypatch.setattr(_attention, "_IMPLEMENTATIONS", {"xla": refusal})
    for implementation in (None, "xla"):
        with pytest.raises(NotImplementedError, match="xla.*too new"):
            paged_attention(*small_decode().args(), implementation=implementation)


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """Forget compiled calls, before and after: the choice is made when tracing."""
    compiled.cache_clear()
    yield
    compiled.cache_clear()


@pytest.mark.usefixtures("nothing_compiled")
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
    arrays = small_decode()
    assert np.all(run(arrays, implementation=None)[0] == 3.0)
    assert np.all(run(arrays, implementation="late")[0] == 4.0)
    assert_matches_oracle(arrays, *run(arrays, implementation="xla"))
    for name, reason in (("broken", "no library"), ("picky", "page_size 4")):
        with pytest.raises(NotImplementedError, match=f"'{name}'.*{reason}"):
            run(arrays, implementation=name)
    lowered = jax.jit(lambda *x: paged_attention(*x)).trace(*arrays.args())
    assert "5.0" in lowered.lower(lowering_platforms=("tpu",)).as_text()
    grad = jax.grad(lambda q: paged_attention(q, *arrays.args()[1:]).sum())
    assert np.all(np.isfinite(grad(arrays.args()[0])))


# --- mistakes -------------------------------------------------------------------------


def test_numpy_arguments_and_result_types() -> None:
    arrays = small_decode(dtype="bfloat16")
    values = dataclasses.astuple(arrays)[:-1]
    out, lse = paged_attention(*values, return_lse=True)
    assert out.shape == arrays.q.shape and out.dtype == jnp.bfloat16
    assert lse.shape == arrays.q.shape[:2] and lse.dtype == jnp.float32
    assert isinstance(paged_attention(*values), jax.Array)
    weak = jnp.full(arrays.q.shape, 1.0)
    assert weak.weak_type
    out = paged_attention(weak, *small_decode().args()[1:])
    assert not out.weak_type


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


# Of "xla", which checks nothing itself: what is refused is refused before the choice.
refused_decode = partial(paged_attention, implementation="xla")
refused_ragged = partial(ragged_paged_attention, implementation="xla")


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
        refused_decode(*args.values())


BAD_OPTIONS = [
    ({"window": 0}, ValueError, "window must be at least 1.*got 0"),
    ({"window": -3}, ValueError, "got -3"),
    ({"window": 2.5}, TypeError, "window must be an int or None, got 2.5"),
    ({"window": "3"}, TypeError, "window must be an int or None, got '3'"),
    ({"window": True}, TypeError, "window must be an int or None, got True"),
    ({"soft_cap": 0.0}, ValueError, "soft_cap must be positive and finite, got 0.0"),
    ({"soft_cap": math.inf}, ValueError, "got inf"),
    ({"soft_cap": True}, TypeError, "soft_cap must be a number, got True"),
    ({"scale": math.nan}, ValueError, "scale must be finite, got nan"),
    ({"scale": "1"}, TypeError, "scale must be a number, got '1'"),
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
        refused_decode(*args, **options)


def test_quantised_pages_need_scales_of_the_right_shape() -> None:
    q, k_pages, v_pages, *rest = small_decode().args()
    k_pages, v_pages = (jnp.zeros_like(x, jnp.int8) for x in (k_pages, v_pages))
    with pytest.raises(ValueError, match="int8 and the scales are missing"):
        refused_decode(q, k_pages, v_pages, *rest)
    short, half = jnp.ones(k_pages.shape[:2]), jnp.ones(k_pages.shape[:3], jnp.bfloat16)
    for bad, error, message in (
        (short, ValueError, "k_scales must have shape"),
        (half, TypeError, "k_scales must be float32, got bfloat16"),
    ):
        with pytest.raises(error, match=message):
            refused_decode(q, k_pages, v_pages, *rest, k_scales=bad, v_scales=bad)


def test_cu_q_lens_is_checked() -> None:
    *args, cu_q_lens = small_ragged().args()
    with pytest.raises(ValueError, match=r"cu_q_lens must have shape \(7,\).*\(6,\)"):
        refused_ragged(*args, cu_q_lens[1:])
    with pytest.raises(TypeError, match="cu_q_lens must hold integers"):
        refused_ragged(*args, cu_q_lens.astype(jnp.float32))


def test_traced_options_are_named() -> None:
    args = small_decode().args()
    for option in ("window", "soft_cap", "scale"):
        with pytest.raises(TypeError, match=f"{option} must be a Python"):
            jax.jit(lambda x, o=option: refused_decode(*args, **{o: x}))(2)


@pytest.mark.parametrize("implementation", ["xla", None])
def test_ids_of_other_integer_types(implementation: str | None) -> None:
    """Ids past int32 name no page: they must not wrap to one; int8 reaches any pool."""
    pages = jnp.arange(400.0 * 2).reshape(400, 2, 1, 1)
    q, lens = jnp.zeros((2, 1, 1)), np.array([2, 2])

    def attend(table: np.ndarray) -> jax.Array:
        return paged_attention(
            q, pages, pages, table, lens, implementation=implementation
        )[:, 0, 0]

    want = attend(np.array([[3], [7]], np.int32))
    for dtype in (np.int8, np.uint8, np.uint32, np.int64):
        np.testing.assert_array_equal(attend(np.array([[3], [7]], dtype)), want)
    far = attend(np.array([[2**32 + 3], [7]]))
    assert far[1] == want[1] and far[0] != want[0]
    checked = checkify.checkify(attend, errors=checkify.user_checks)
    checked(np.array([[3], [7]], np.int8))[0].throw()
    with pytest.raises(checkify.JaxRuntimeError, match="page id 2147483647"):
        checked(np.array([[2**32 + 3], [7]]))[0].throw()


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
    np.testing.assert_allclose(out, expected, atol=1e-6)


@pytest.mark.core
@pytest.mark.parametrize(
    "implementation",
    [name for name, (usable, _) in available_implementations().items() if usable],
)
def test_nan_that_a_row_sees_is_not_hidden(implementation: str) -> None:
    """0 and -inf mean "saw no key"; a model that diverged must not look like that."""
    pages = jnp.ones((4, 2, 1, 8))
    args = (pages, pages, jnp.array([[1, 0], [2, 3]]), jnp.array([3, 3]))
    q = jnp.ones((2, 2, 8)).at[0].set(jnp.nan)
    out, lse = paged_attention(q, *args, return_lse=True, implementation=implementation)
    assert jnp.isnan(out[0]).all() and jnp.isnan(lse[0]).all()
    assert jnp.isfinite(out[1]).all()


@pytest.mark.core
def test_merging_keeps_nan() -> None:
    ones = jnp.ones((1, 2))
    out, lse = merge_attention((ones, jnp.array([jnp.nan])), (ones, jnp.array([2.0])))
    assert jnp.isnan(out).all() and jnp.isnan(lse).all()


@pytest.mark.core
@pytest.mark.parametrize(
    "options",
    [{"soft_cap": 1e-46}, {"soft_cap": 1e39}, {"scale": 1e39}],
)
def test_an_option_that_is_no_float32_is_named(options: dict[str, float]) -> None:
    pages = jnp.ones((4, 2, 1, 8))
    with pytest.raises(ValueError, match=next(iter(options))):
        paged_attention(
            jnp.ones((1, 1, 8)),
            pages,
            pages,
            jnp.array([[0]]),
            jnp.array([1]),
            **options,
        )


@pytest.mark.core
def test_a_window_longer_than_the_table_is_no_window() -> None:
    pages = jax.random.normal(jax.random.key(0), (4, 2, 1, 8))
    args = (jnp.ones((1, 1, 8)), pages, pages, jnp.array([[0, 3]]), jnp.array([4]))
    np.testing.assert_array_equal(
        paged_attention(*args, window=2**40), paged_attention(*args)
    )
