"""Quantised pages: what is stored, what is read back, what attention makes of it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import make_arrays, small_decode, small_ragged
from oracles import attention_oracle

import pagedjax as pj

pytestmark = pytest.mark.core

DTYPES = ["int8", "float8_e4m3fn"]
# Largest error of one stored number: half a step of int8 at the token's largest
# value; half a unit in the last of float8's 3 bits, of the number itself.
ABSOLUTE = {"int8": 0.5 / 127, "float8_e4m3fn": 2.0**-10 / 448}
RELATIVE = {"int8": 0.0, "float8_e4m3fn": 2.0**-4}
LAYERS, PAGES, SIZE, HEADS, DIM = 2, 5, 4, 2, 8


def new_pool(dtype: str) -> pj.KVPool:
    return pj.init_kv_pool(
        num_layers=LAYERS,
        num_pages=PAGES,
        page_size=SIZE,
        num_kv_heads=HEADS,
        head_dim=DIM,
        dtype=dtype,
    )


def stored(dtype: str, values: Any) -> tuple[np.ndarray, np.ndarray]:
    """What a pool gives back of tokens [T, K, D], and its k_pages."""
    values = jnp.asarray(values)
    table = pj.init_page_table(
        num_pages=PAGES, page_size=SIZE, max_slots=1, pages_per_slot=PAGES
    )
    table, _, _ = pj.append(table, jnp.array([len(values)]))
    batch = pj.pack_ragged(table, jnp.array([len(values)]), num_tokens=len(values))
    pool = jax.jit(pj.write_kv)(
        new_pool(dtype), 1, values, -values, batch.pages, batch.offsets
    )
    k, v = pj.gather_kv(pool, 1, table, 0)
    np.testing.assert_array_equal(v, -k)
    return np.asarray(k)[: len(values)], np.asarray(pool.k_pages)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_stay_visible(dtype: str, bad: float) -> None:
    """In arrays large enough for the vectorised maximum of XLA on CPU."""
    k = np.ones((8, 8, 128), np.float32)
    clean, spoiled = jnp.asarray(k), jnp.asarray(k).at[7, 7, 3].set(bad)
    pool = pj.init_kv_pool(
        num_layers=1,
        num_pages=1,
        page_size=8,
        num_kv_heads=8,
        head_dim=128,
        dtype=dtype,
    )
    places = jnp.zeros((8,), jnp.int32), jnp.arange(8)
    want = pj.write_kv(pool, 0, clean, clean, *places)
    got = pj.write_kv(pool, 0, clean, spoiled, *places)
    np.testing.assert_array_equal(got.k_scales, want.k_scales)
    differs = np.argwhere(np.asarray(got.v_scales) != np.asarray(want.v_scales))
    assert [row[1:].tolist() for row in differs] == [[7, 7]]
    back = np.asarray(got.v_pages[0, 7, 7], np.float32) * got.v_scales[0, 7, 7]
    assert np.isnan(back[3])
    out = pj.paged_attention(
        jnp.ones((1, 8, 128)),
        got.k_pages,
        got.v_pages,
        jnp.zeros((1, 1), jnp.int32),
        jnp.array([8]),
        k_scales=got.k_scales,
        v_scales=got.v_scales,
    )
    assert np.isnan(np.asarray(out)[0, 7, 3]) and np.isfinite(out[0, :7]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_comes_back_within_half_a_step(dtype: str) -> None:
    rng = np.random.default_rng(0)
    sizes = 10.0 ** rng.integers(-20, 20, (SIZE * PAGES, HEADS, 1))
    values = (rng.standard_normal((SIZE * PAGES, HEADS, DIM)) * sizes).astype("f4")
    back, _ = stored(dtype, values)
    largest = np.abs(values).max(axis=-1, keepdims=True)
    bound = ABSOLUTE[dtype] * largest + RELATIVE[dtype] * np.abs(values)
    assert np.all(np.abs(back - values) <= bound * (1 + 1e-5))
    # The largest of each token is exact up to the rounding of its scale.
    peak = np.abs(values) == largest
    np.testing.assert_allclose(back[peak], values[peak], rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_what_is_too_small_come_back_as_zeros(dtype: str) -> None:
    values = np.zeros((2, HEADS, DIM), np.float32)
    values[1] = 1e-39
    back, pages = stored(dtype, values)
    assert np.all(back == 0) and not np.isnan(pages.astype(np.float32)).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows_in_its_own_head_alone(dtype: str, bad: float) -> None:
    values = np.ones((2, HEADS, DIM), np.float32)
    values[0, 1, 3] = bad
    back, _ = stored(dtype, values)
    assert not np.isfinite(back[0, 1]).any()
    np.testing.assert_allclose(back[0, 0], 1, rtol=1e-6)
    np.testing.assert_allclose(back[1], 1, rtol=1e-6)


def test_large_numbers_saturate_nowhere() -> None:
    """500 cast to float8_e4m3fn is NaN; a scale and a clip keep it."""
    assert np.isnan(np.float32(jnp.float32(500).astype(jnp.float8_e4m3fn)))
    values = np.full((1, HEADS, DIM), 500, np.float32)
    values[0, 0, 0] = 3e38
    back, _ = stored("float8_e4m3fn", values)
    np.testing.assert_allclose(back[0, 1], 500, rtol=1e-6)
    np.testing.assert_allclose(back[0, 0, 0], 3e38, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scale_is_written_where_its_token_is_and_nowhere_else(dtype: str) -> None:
    pool = new_pool(dtype)
    kv = jnp.ones((3, HEADS, DIM))
    pages, offsets = jnp.array([PAGES, 2, -1]), jnp.array([0, 3, 0])
    pool = jax.jit(pj.write_kv)(pool, 0, kv, 2 * kv, pages, offsets)
    for scales, value in ((pool.k_scales, 1.0), (pool.v_scales, 2.0)):
        scales = np.array(scales)
        largest = 127 if dtype == "int8" else 448
        np.testing.assert_allclose(scales[2, 3], value / largest, rtol=1e-6)
        scales[2, 3] = 0
        assert not scales.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_pool_is_updated_in_place(dtype: str) -> None:
    pool = new_pool(dtype)
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pool)]
    assert len(set(before)) == 4
    step = jax.jit(pj.write_kv, donate_argnums=0)
    kv = jnp.ones((1, HEADS, DIM))
    pool = step(pool, jnp.int32(1), kv, kv, jnp.array([0]), jnp.array([0]))
    after = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pool)]
    assert before == after


def quantised_call(arrays: Any, dtype: str) -> tuple[dict, dict]:
    """Arguments of a call on quantised pages, and the pages as float64."""
    rng = np.random.default_rng(3)
    args = dict(
        zip(("q", "k", "v", "table", "lens", "cu"), arrays.args(), strict=False)
    )
    whole = {}
    for name in ("k", "v"):
        owned = arrays.owned()
        values = np.where(owned[..., None, None], np.asarray(args[name]), 0)
        small = np.asarray(jnp.asarray(np.round(values * 20), dtype))
        scales = rng.uniform(0.01, 0.1, small.shape[:3]).astype("f4")
        whole[name] = small.astype("f8") * scales[..., None]
        # Nobody may read what nobody owns: scales of NaN, and float8 pages too.
        scales[~owned] = np.nan
        if dtype != "int8":
            small = small.copy()
            small[~owned] = np.nan
        args[name], args[f"{name}_scales"] = jnp.asarray(small), jnp.asarray(scales)
    return args, whole


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ragged", [False, True], ids=["decode", "ragged"])
@pytest.mark.parametrize("options", [{}, {"window": 5, "soft_cap": 2.0}], ids=str)
def test_xla_attention_matches_the_oracle(
    dtype: str, ragged: bool, options: dict
) -> None:
    arrays = (small_ragged if ragged else small_decode)(head_dim=DIM)
    args, whole = quantised_call(arrays, dtype)
    attention = pj.ragged_paged_attention if ragged else pj.paged_attention
    positional = [args[n] for n in ("q", "k", "v", "table", "lens", "cu") if n in args]
    out, lse = attention(
        *positional,
        k_scales=args["k_scales"],
        v_scales=args["v_scales"],
        return_lse=True,
        implementation="xla",
        **options,
    )
    want = attention_oracle(
        arrays.q,
        whole["k"],
        whole["v"],
        arrays.page_indices,
        arrays.seq_lens,
        arrays.cu_q_lens,
        **options,
    )
    np.testing.assert_allclose(out, want[0], rtol=3e-6, atol=3e-6)
    np.testing.assert_allclose(lse, want[1], rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ragged", [False, True], ids=["decode", "ragged"])
def test_gradients_are_those_of_the_same_pages_in_float(
    dtype: str, ragged: bool
) -> None:
    """Of queries and scales: pages are whole numbers, without a gradient."""
    arrays = (small_ragged if ragged else small_decode)(head_dim=DIM)
    args, _ = quantised_call(arrays, dtype)
    attention = pj.ragged_paged_attention if ragged else pj.paged_attention
    places = [args[name] for name in ("table", "lens", "cu") if name in args]
    owned = arrays.owned()[..., None]

    def loss(out: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(out))

    def stored(q: jax.Array, k_scales: jax.Array, v_scales: jax.Array) -> jax.Array:
        scales = {"k_scales": k_scales, "v_scales": v_scales}
        return loss(attention(q, args["k"], args["v"], *places, **scales))

    def whole(q: jax.Array, k_scales: jax.Array, v_scales: jax.Array) -> jax.Array:
        k, v = (
            jnp.where(owned[..., None], pages.astype(jnp.float32), 0.0)
            * jnp.where(owned, scales, 0.0)[..., None]
            for pages, scales in ((args["k"], k_scales), (args["v"], v_scales))
        )
        return loss(attention(q, k, v, *places))

    given = [args[name] for name in ("q", "k_scales", "v_scales")]
    got, want = (jax.grad(f, argnums=(0, 1, 2))(*given) for f in (stored, whole))
    for mine, theirs in zip(got, want, strict=True):
        assert np.abs(theirs).max() > 0.01
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_generation_runs_on_quantised_pages(dtype: str) -> None:
    """A model that must find its token in the pages: the one it saw first."""

    def recall(params: None, pool: Any, tokens: Any, batch: Any, rows: Any) -> Any:
        powers = 2 ** jnp.arange(DIM)[None]
        code = jnp.where(tokens[:, None] // powers % 2, 1.0, -1.0)
        value = jnp.broadcast_to(code[:, None], (len(tokens), HEADS, DIM))
        # Equal scores for all but the first token, which weighs the most.
        first = jnp.where(batch.positions == 0, 50.0, 0.0)[:, None, None]
        key = jnp.broadcast_to(first, value.shape)
        pool, out = pj.attend(pool, 1, jnp.ones_like(value), key, value, batch)
        bits = (out[:, 0] > 0).astype(jnp.int32)
        found = jnp.sum(bits * powers, axis=1)
        logits = jax.nn.one_hot(found, 2**DIM)
        return pool, logits if rows is None else logits[rows]

    model = pj.PagedModel(
        recall,
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=DIM,
        vocab_size=2**DIM,
        kv_dtype=dtype,
    )
    prompts = np.array([[201, 7, 9, 3], [44, 1, 2, 250]], np.int32)
    out = pj.generate(
        model, None, prompts, max_new_tokens=6, num_samples=2, page_size=SIZE
    )
    assert (out.tokens == jnp.array([201, 44])[:, None, None]).all()


def test_arrays_of_a_case_have_unowned_places() -> None:
    """What `quantised_call` poisons must exist."""
    assert (~make_arrays([3, 5]).owned()).any()
