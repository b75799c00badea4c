"""Choosing tokens: supports, distributions, ties, and the two paths of the filter."""

import functools
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compile_counter import count_compiled

from pagedjax import _sampling, init_sampling, sample, token_logprobs

DRAWS = 4096
BIG = 1000  # a vocabulary with more tokens than are sorted first


draw = jax.jit(sample)


@functools.cache
def sampler(*candidates):
    """Gives `sample` with so many tokens sorted first, second, ..."""

    def run(*args):
        with mock.patch.object(_sampling, "_CANDIDATES", candidates):
            return sample(*args)

    return jax.jit(run)


@jax.jit
def draw_many(logits, key, sampling):
    """Draws DRAWS tokens from one row of logits."""
    rows = jnp.broadcast_to(logits[None, :], (DRAWS, logits.shape[0]))
    return sample(rows, jax.random.split(key, DRAWS), sampling)


def counts_of(logits, *, seed=0, **options):
    """Counts each token among DRAWS draws."""
    logits = jnp.asarray(logits, jnp.float32)
    tokens = draw_many(logits, jax.random.key(seed), init_sampling(**options))
    return np.bincount(np.asarray(tokens), minlength=logits.shape[0])


def support(logits, **options):
    return set(np.flatnonzero(counts_of(logits, **options)).tolist())


def assert_drawn_from(counts, probs):
    """Checks counts by Pearson's chi-square against probabilities.

    The statistic of k cells has mean k - 1 and variance 2 (k - 1); five standard
    deviations with a fixed seed.
    """
    probs = np.asarray(probs, np.float64) / np.sum(probs)
    assert not counts[probs == 0].any()
    expected = probs[probs > 0] * counts.sum()
    assert expected.min() >= 5
    statistic = np.sum((counts[probs > 0] - expected) ** 2 / expected)
    cells = len(expected) - 1
    assert statistic < cells + 5 * np.sqrt(2 * cells), statistic


def padded(logits):
    """The same few tokens in a large vocabulary, where two paths choose."""
    return [*logits, *[-30.0] * (BIG - len(logits))]


@pytest.fixture(params=["small", "large"])
def place(request):
    """Puts logits into a vocabulary of that size."""
    return padded if request.param == "large" else list


# --- supports -----------------------------------------------------------------------


def test_top_k_keeps_exactly_k_and_the_lowest_ids_of_a_tie(place):
    """H4."""
    logits = place([1.0, 2.0, 2.0, 2.0, 3.0])
    assert support(logits, temperature=1.0, top_k=3) == {4, 1, 2}
    assert support(logits, temperature=1.0, top_k=2) == {4, 1}
    assert support(logits, temperature=1.0, top_k=1) == {4}


def test_top_k_of_zero_keeps_all():
    """H4: ties without a filter share evenly."""
    counts = counts_of([1.0] * 4, temperature=1.0)
    assert_drawn_from(counts, [1, 1, 1, 1])


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (0.8, {0, 1, 2}),
        (0.39, {0}),
        (0.41, {0, 1}),
        (0.69, {0, 1}),
        (0.71, {0, 1, 2}),
        (1.0, {0, 1, 2, 3}),
        (1e-9, {0}),
    ],
)
def test_top_p_keeps_the_token_that_crosses_the_limit(place, top_p, kept):
    """H5."""
    logits = place(np.log([0.4, 0.3, 0.2, 0.1]).tolist())
    assert support(logits, temperature=1.0, top_p=top_p) == kept


def test_top_p_finds_the_likeliest_wherever_it_is(place):
    """H5: also if it is not token 0."""
    logits = place(np.log([0.1, 0.2, 0.4, 0.3]).tolist())
    assert support(logits, temperature=1.0, top_p=1e-9) == {2}
    assert support(logits, temperature=1.0, top_p=0.6) == {2, 3}


def test_top_p_is_of_what_top_k_keeps():
    # After top-k 2: 4/7 and 3/7.
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert support(logits, temperature=1.0, top_k=2, top_p=0.5) == {0}
    assert support(logits, temperature=1.0, top_k=2, top_p=0.6) == {0, 1}


def test_defaults_with_a_temperature_are_not_greedy():
    """H7."""
    assert len(support([0.0] * 8, temperature=1.0)) == 8


# --- distributions ------------------------------------------------------------------

PROBS = np.array([5, 1, 8, 2, 4, 3, 7, 6]) / 36


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature(place, temperature):
    counts = counts_of(place(np.log(PROBS).tolist()), temperature=temperature)
    assert_drawn_from(counts[:8], PROBS ** (1 / temperature))


def test_filters_at_a_temperature(place):
    """The kept tokens have the odds they had; temperature comes before the filters."""
    squared = PROBS**2 / np.sum(PROBS**2)
    order = np.argsort(-squared)
    reach = np.cumsum(squared[order])
    kept = order[: np.searchsorted(reach, 0.7) + 1]
    want = np.where(np.isin(np.arange(8), kept), squared, 0)
    assert 1 < len(kept) < 8
    logits = place(np.log(PROBS).tolist())
    counts = counts_of(logits, temperature=0.5, top_p=0.7)
    assert_drawn_from(counts[:8], want)


def test_a_large_vocabulary_is_drawn_evenly():
    """Two levels of search: no block and no place in it is favoured."""
    counts = sum(counts_of([0.0] * BIG, temperature=1.0, seed=i) for i in range(4))
    assert_drawn_from(counts, np.ones(BIG))
    weights = np.linspace(0.5, 1.5, BIG)
    counts = sum(counts_of(np.log(weights), temperature=1.0, seed=i) for i in range(4))
    assert_drawn_from(counts, weights)


def test_the_ends_of_the_uniform_number():
    """The smallest and the largest draw give the first and the last token."""
    for size in (3, 256, 257, BIG):
        weights = jnp.ones((2, size)).at[:, 1].set(0.0)
        uniform = jnp.array([0.0, 1.0 - 2.0**-24])
        assert _sampling._draw(weights, uniform).tolist() == [0, size - 1]
        ends = weights.at[:, 0].set(0.0).at[:, -1].set(0.0)
        assert (
            _sampling._draw(ends, uniform).tolist()
            == ([2, size - 2] if size > 3 else [2, 2])
            or size == 3
        )


# --- the two paths of the filter ----------------------------------------------------


@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [(5, 1.0), (0, 0.6), (200, 0.9), (256, 1.0), (0, 0.05), (17, 0.5)],
)
def test_candidates_and_whole_vocabulary_agree(top_k, top_p):
    logits = 3 * jax.random.normal(jax.random.key(1), (64, BIG))
    keys = jax.random.split(jax.random.key(2), 64)
    sampling = init_sampling(temperature=0.9, top_k=top_k, top_p=top_p)
    want = sampler()(logits, keys, sampling).tolist()
    assert sampler(256)(logits, keys, sampling).tolist() == want
    assert sampler(4, 128)(logits, keys, sampling).tolist() == want


def test_filters_that_need_more_than_the_candidates():
    logits = [0.0] * 600 + [-30.0] * 400
    kept = support(logits, temperature=1.0, top_k=500)
    assert len(kept) > 256 and max(kept) < 500  # the lowest ids of the tie
    kept = support(logits, temperature=1.0, top_p=0.75)
    assert len(kept) > 256 and max(kept) < 450
    # Each filter off, through the program that filters.
    kept = support(logits, temperature=jnp.float32(1.0), top_k=0, top_p=1.0)
    assert max(kept) > 550


# --- rows and numbers ---------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.8},
        {"temperature": 0.8, "top_k": 40},
        {"temperature": 0.8, "top_p": 0.9},
    ],
    ids=["greedy", "plain", "top_k", "top_p"],
)
def test_a_row_does_not_depend_on_the_others(options):
    """H4: alone or among eight, one of which needs the whole vocabulary."""
    logits = 2 * jax.random.normal(jax.random.key(3), (8, BIG))
    logits = logits.at[5].set(0.0)
    keys = jax.random.split(jax.random.key(4), 8)
    sampling = init_sampling(**options)
    together = draw(logits, keys, sampling)
    alone = [draw(logits[i : i + 1], keys[i : i + 1], sampling) for i in range(8)]
    assert together.tolist() == jnp.concatenate(alone).tolist()


def test_traced_numbers_do_what_the_same_numbers_do():
    logits = 2 * jax.random.normal(jax.random.key(5), (16, BIG))
    keys = jax.random.split(jax.random.key(6), 16)

    @jax.jit
    def run(temperature, top_k, top_p):
        sampling = init_sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        assert sampling.mode == "filtered"
        return sample(logits, keys, sampling)

    for t, k, p in itertools.product((0.0, 0.7), (0, 5), (1.0, 0.5)):
        sampling = init_sampling(temperature=t, top_k=k, top_p=p)
        if sampling.mode != "plain":  # draws other tokens from the same distribution
            want = draw(logits, keys, sampling)
            assert run(t, k, p).tolist() == want.tolist(), (t, k, p)
    assert run(0.0, 0, 1.0).tolist() == jnp.argmax(logits, axis=1).tolist()
    with count_compiled() as compiled:
        run(0.3, 7, 0.2)
    assert not compiled


def test_modes():
    for options, mode in (
        ({}, "greedy"),
        ({"temperature": 0.0, "top_k": 3, "top_p": 0.5}, "greedy"),
        ({"temperature": 1.0}, "plain"),
        ({"temperature": 1.0, "top_k": 3}, "filtered"),
        ({"temperature": 1.0, "top_p": 0.5}, "filtered"),
    ):
        assert init_sampling(**options).mode == mode


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature must be finite and >= 0, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be finite"),
        ({"temperature": float("inf")}, "temperature must be finite"),
        ({"top_k": -1}, "top_k must be a whole number >= 0, got -1"),
        ({"top_k": 1.5}, "top_k must be a whole number"),
        ({"top_k": 2**31}, "top_k must be a whole number"),
        ({"top_k": float("inf")}, "top_k must be a whole number"),
        ({"top_k": jnp.float32(1.5)}, "top_k must be a whole number"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.1}, r"top_p must be in \(0, 1\]"),
        ({"top_p": float("nan")}, r"top_p must be in \(0, 1\]"),
    ],
)
def test_numbers_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        init_sampling(**options)


def test_numbers_may_be_arrays():
    """And what is made of them is the sampling's own, to be donated or kept."""
    half, three = jnp.asarray(0.5, jnp.float32), jnp.int32(3)
    sampling = init_sampling(temperature=half, top_k=three, top_p=half)
    assert sampling.mode == "filtered" and int(sampling.top_k) == 3
    arrays = [half, three, *jax.tree.leaves(sampling)]
    assert len({array.unsafe_buffer_pointer() for array in arrays}) == 5


@pytest.mark.parametrize("mode", ["greedy", "plain", "filtered"])
@pytest.mark.parametrize(
    ("shape", "keys", "error", "message"),
    [
        ((4, 50), 1, ValueError, r"keys must be one for each of the 4 rows.*\(1,\)"),
        ((1, 50), 4, ValueError, r"keys must be one for each of the 1 rows.*\(4,\)"),
        ((6, 50), 3, ValueError, r"keys must be one for each of the 6 rows.*\(3,\)"),
        ((2, 50), (), ValueError, r"keys must be one for each of the 2 rows.*\(\)"),
        ((2, 50), (2, 1), ValueError, r"keys must be one for each .*\(2, 1\)"),
        (
            (50,),
            (),
            ValueError,
            r"logits must have shape \[rows, tokens\], got \(50,\)",
        ),
        ((2, 0), 2, ValueError, r"logits must have shape .* got \(2, 0\)"),
        (
            (2, 50),
            jnp.zeros((2,), jnp.uint32),
            ValueError,
            r"keys .*\(2,\) of raw keys",
        ),
        ((2, 50), jnp.zeros((2, 2)), TypeError, r"keys must be random keys.*float32"),
        ((2, 50), None, TypeError, "keys must be random keys.*None"),
    ],
)
def test_keys_that_do_not_go_with_the_logits(shape, keys, error, message, mode):
    """One key for all rows would draw alike in each of them."""
    if isinstance(keys, int | tuple):
        keys = jax.random.split(jax.random.key(0), keys)
    sampling = {
        "greedy": init_sampling(),
        "plain": init_sampling(temperature=1.0),
        "filtered": init_sampling(temperature=1.0, top_k=5),
    }[mode]
    with pytest.raises(error, match=message):
        jax.eval_shape(sample, jnp.zeros(shape), keys, sampling)


def test_raw_keys_draw_what_the_keys_themselves_do():
    logits = jnp.zeros((4, BIG))
    raw = jax.random.split(jax.random.PRNGKey(3), 4)
    plain = init_sampling(temperature=1.0)
    got = draw(logits, raw, plain)
    assert got.dtype == jnp.int32 and len(set(got.tolist())) == 4
    assert got.tolist() == draw(logits, jax.random.wrap_key_data(raw), plain).tolist()


@pytest.mark.parametrize("vocab", [7, 256, 768, BIG])
def test_greedy_takes_the_first_of_the_largest(vocab):
    """Ties inside a block and across blocks; NaN and infinity before all else."""
    logits = np.array(jax.random.normal(jax.random.key(8), (9, vocab)))
    last = vocab - 1
    places = [(last,), (0, last), (1, 2), (vocab // 2, last), (3,), (4, 5), (6,)]
    for row, where in enumerate(places):
        logits[row, list(where)] = 9.0
    logits[4, 3], logits[5, 4:6] = np.inf, np.nan
    logits[6], logits[7] = -np.inf, np.nan
    logits[8, last] = np.nan
    keys = jax.random.split(jax.random.key(9), 9)
    want = np.argmax(logits, axis=1).tolist()
    assert draw(jnp.asarray(logits), keys, init_sampling()).tolist() == want
    assert want[8] == last


def test_log_probabilities():
    """H11: log-softmax of the raw logits, also for large ones and in bfloat16."""
    logits = 50 * jax.random.normal(jax.random.key(7), (6, BIG))
    tokens = jnp.array([0, 1, BIG - 1, 500, 7, 8])
    for dtype, tolerance in ((jnp.float32, 1e-4), (jnp.bfloat16, 1e-4)):
        values = logits.astype(dtype)
        exact = np.asarray(values, np.float64)
        want = exact - exact.max(1, keepdims=True)
        want -= np.log(np.sum(np.exp(want), axis=1, keepdims=True))
        got = token_logprobs(values, tokens)
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(
            got, want[np.arange(6), np.asarray(tokens)], rtol=1e-5, atol=tolerance
        )


@pytest.mark.parametrize(
    ("shape", "tokens", "error", "message"),
    [
        ((4, 7), [1], ValueError, r"shape \(1,\) .*tokens"),
        ((1, 7), [1, 2], ValueError, r"shape \(2,\) .*tokens"),
        ((2, 7), [[1], [2]], ValueError, r"shape \(2, 1\) .*tokens"),
        ((7,), 1, ValueError, r"logits must have shape .* got \(7,\)"),
        ((2, 7), [1.0, 2.0], TypeError, "tokens must be int32"),
    ],
)
def test_tokens_that_do_not_go_with_the_logits(shape, tokens, error, message):
    with pytest.raises(error, match=message):
        token_logprobs(jnp.zeros(shape), jnp.asarray(tokens))
