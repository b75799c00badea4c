"""The Linen layer and adapter against dense Flax."""

import flax.linen as nn
import flax_decoding as decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.linen import PagedAttention, functional

FEATURES, HEADS, LAYERS = 24, 4, 2


class Decoder(nn.Module):
    """A small decoder; dense without a batch, paged with one."""

    @nn.compact
    def __call__(self, tokens):
        _, logits = decoder(None, tokens, jnp.arange(tokens.shape[1])[None], attend_all)
        return logits


class PagedDecoder(nn.Module):
    """The same decoder on the paged cache."""

    @nn.compact
    def __call__(self, pool, tokens, batch, rows=None):
        def attend(pool, x, i):
            return PagedAttention(HEADS, layer=i, name=f"attention_{i}")(pool, x, batch)

        positions = decoding.positions_like(tokens, batch)
        pool, logits = decoder(pool, tokens, positions, attend)
        return pool, logits if rows is None else logits[rows]


def attend_all(pool, x, i):
    layer = nn.MultiHeadDotProductAttention(HEADS, name=f"attention_{i}")
    return pool, layer(x, mask=nn.make_causal_mask(x[..., 0]))


def decoder(pool, tokens, positions, attend):
    """What both have in common; called in their compact methods."""
    embed = nn.Embed(decoding.VOCAB, FEATURES, name="embed")
    x = embed(tokens) + nn.Embed(decoding.MAX_LEN, FEATURES, name="places")(positions)
    for i in range(LAYERS):
        pool, y = attend(pool, nn.LayerNorm(name=f"norm_{i}")(x), i)
        x = x + y
        y = nn.gelu(nn.Dense(2 * FEATURES, name=f"up_{i}")(x))
        x = x + nn.Dense(FEATURES, name=f"down_{i}")(y)
    return pool, embed.attend(x)


def stir(variables):
    """Moves every parameter off its initial value: zeros and ones hide mistakes."""
    rng = np.random.default_rng(3)
    return jax.tree.map(
        lambda p: p + jnp.asarray(0.2 * rng.standard_normal(p.shape), p.dtype),
        variables,
    )


def inputs():
    rng = np.random.default_rng(7)
    return rng.standard_normal((decoding.SLOTS, 9, FEATURES)).astype(np.float32)


def bound(layer, variables):
    return lambda pool, x, batch: layer.apply(variables, pool, x, batch)


def dense_and_variables(**options):
    dense = nn.MultiHeadDotProductAttention(HEADS, **options)
    return dense, stir(dense.init(jax.random.key(0), jnp.zeros((1, 1, FEATURES))))


def apply_dense(dense, variables, x):
    return dense.apply(variables, x, mask=nn.make_causal_mask(x[..., 0]))


@pytest.mark.core
@pytest.mark.parametrize(("page_size", "padded"), [(1, True), (5, False), (16, True)])
def test_generates_what_the_dense_model_generates(page_size, padded):
    dense = Decoder()
    variables = stir(dense.init(jax.random.key(1), jnp.zeros((1, 1), jnp.int32)))
    apply, params = functional(PagedDecoder(), variables)
    run = decoding.PagedRun(apply, params, padded=padded)
    sequences = run.generate(*decoding.make_cache(page_size=page_size))
    decoding.assert_equals_dense(
        jax.jit(lambda tokens: dense.apply(variables, tokens)), sequences
    )


@pytest.mark.core
@pytest.mark.parametrize(
    "options",
    [
        {"use_bias": False, "qkv_features": 32, "out_features": 10},
        {"normalize_qk": True},
        {"dropout_rate": 0.5, "deterministic": True, "decode": False},
    ],
    ids=lambda options: "-".join(options),
)
def test_layer_equals_the_dense_layer(options):
    dense, variables = dense_and_variables(**options)
    _, pool = decoding.make_cache(head_dim=options.get("qkv_features", 24) // HEADS)
    layer = PagedAttention(HEADS, layer=1, **options)
    x = inputs()
    got = decoding.run_layer(bound(layer, variables), pool, x)
    want = apply_dense(dense, variables, x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.core
@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "normalize_qk": True,
            "use_bias": False,
            "qkv_features": 32,
            "out_features": 7,
            "param_dtype": jnp.bfloat16,
            "kernel_init": nn.initializers.normal(0.3),
            "out_kernel_init": nn.initializers.ones,
        },
        {"bias_init": nn.initializers.ones, "out_bias_init": nn.initializers.normal()},
    ],
    ids=["default", "kernels", "biases"],
)
def test_init_gives_the_parameters_of_the_dense_layer(options):
    key = jax.random.key(5)
    x = jnp.ones((decoding.SLOTS, FEATURES))
    want = nn.MultiHeadDotProductAttention(HEADS, **options).init(key, x[:, None])
    _, batch = decoding.lay_out_batches(9, 5)
    _, pool = decoding.make_cache(head_dim=options.get("qkv_features", 24) // HEADS)
    layer = PagedAttention(HEADS, layer=0, **options)
    got = jax.jit(layer.init)(key, pool, x, batch)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_allclose(
            np.asarray(mine, np.float32), np.asarray(theirs, np.float32), rtol=1e-6
        )


def test_a_nameless_layer_takes_the_name_of_the_dense_one():
    class Dense(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.MultiHeadDotProductAttention(HEADS)(x)

    class Paged(nn.Module):
        @nn.compact
        def __call__(self, pool, x, batch):
            name = "MultiHeadDotProductAttention_0"
            return PagedAttention(HEADS, layer=0, name=name)(pool, x, batch)

    x = inputs()
    variables = Dense().init(jax.random.key(0), x)
    _, batch = decoding.lay_out_batches(9, 5)
    _, pool = decoding.make_cache()
    jax.eval_shape(Paged().apply, variables, pool, x[:, -1], batch)


@pytest.mark.core
def test_options_do_what_they_say():
    options = {"rotate": decoding.rope, "window": 3, "soft_cap": 0.6, "scale": 0.7}

    def dense(**chosen):
        oracle = decoding.oracle_attention(**chosen)
        return nn.MultiHeadDotProductAttention(HEADS, attention_fn=oracle)

    _, variables = dense_and_variables()
    _, pool = decoding.make_cache()
    layer = PagedAttention(HEADS, layer=0, **options)
    x = inputs()
    got = decoding.run_layer(bound(layer, variables), pool, x)
    want = dense(**options).apply(variables, x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    for name in options:  # each of them matters here
        fewer = {key: value for key, value in options.items() if key != name}
        assert np.abs(got - dense(**fewer).apply(variables, x)).max() > 1e-3, name


@pytest.mark.core
def test_grouped_heads_equal_repeated_ones():
    _, variables = dense_and_variables()
    params = variables["params"]
    grouped = params | {
        name: jax.tree.map(lambda p: p[..., ::2, :], params[name])
        for name in ("key", "value")
    }
    repeated = params | {
        name: jax.tree.map(lambda p: jnp.repeat(p, 2, axis=-2), grouped[name])
        for name in ("key", "value")
    }
    _, pool = decoding.make_cache(num_kv_heads=2)
    layer = PagedAttention(HEADS, num_kv_heads=2, layer=0)
    x = inputs()
    got = decoding.run_layer(bound(layer, {"params": grouped}), pool, x)
    dense = nn.MultiHeadDotProductAttention(HEADS)
    want = apply_dense(dense, {"params": repeated}, x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.core
def test_bfloat16_is_as_close_to_float32_as_the_dense_layer():
    exact, variables = dense_and_variables()
    dense = nn.MultiHeadDotProductAttention(HEADS, dtype=jnp.bfloat16)
    layer = PagedAttention(HEADS, layer=0, dtype=jnp.bfloat16)
    _, pool = decoding.make_cache(dtype=jnp.bfloat16)
    x = inputs()
    want = np.asarray(apply_dense(exact, variables, x))
    theirs = np.asarray(apply_dense(dense, variables, x), np.float32)
    got = decoding.run_layer(bound(layer, variables), pool, x)
    assert got.dtype == jnp.bfloat16
    error = np.abs(got.astype(np.float32) - want).max()
    assert 0 < error <= 1.5 * np.abs(theirs - want).max()


def test_layer_may_be_traced():
    class Stack(nn.Module):
        @nn.compact
        def __call__(self, pool, x, batch):
            def body(layer, carry, i):
                pool, x = carry
                return layer(pool, x, batch, layer=i), None

            scan = nn.scan(
                body, variable_axes={"params": 0}, split_rngs={"params": True}
            )
            layer = PagedAttention(HEADS, name="layer")
            return scan(layer, (pool, x), jnp.arange(LAYERS))[0]

    dense = nn.MultiHeadDotProductAttention(HEADS)
    each = [stir(dense.init(jax.random.key(i), inputs())) for i in range(LAYERS)]
    stacked = jax.tree.map(lambda *p: jnp.stack(p), *(v["params"] for v in each))
    _, pool = decoding.make_cache()
    x = inputs()
    variables = {"params": {"layer": stacked}}
    got = decoding.run_layer(bound(Stack(), variables), pool, x)
    want = apply_dense(dense, each[1], apply_dense(dense, each[0], x))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.core
def test_pool_is_updated_in_place():
    _, variables = dense_and_variables()
    layer = PagedAttention(HEADS, layer=1)
    _, batch = decoding.lay_out_batches(9, 5)
    _, pool = decoding.make_cache()
    step = jax.jit(layer.apply, donate_argnums=1)
    where = [pages.unsafe_buffer_pointer() for pages in jax.tree.leaves(pool)]
    pool, _ = step(variables, pool, jnp.asarray(inputs()[:, 0]), batch)
    assert [p.unsafe_buffer_pointer() for p in jax.tree.leaves(pool)] == where


@pytest.mark.core
def test_equal_models_share_a_program():
    traces = []

    def step(apply, params, pool, tokens, batch):
        traces.append(apply)
        return apply(params, pool, tokens, batch)

    step = jax.jit(step, static_argnums=0)
    _, batch = decoding.lay_out_batches(9, 5)
    _, pool = decoding.make_cache()
    pool = jax.tree.map(jnp.zeros_like, pool)  # the step sees tokens nobody wrote
    tokens = jnp.arange(decoding.SLOTS)
    results = []
    for seed in (0, 1):
        variables = Decoder().init(jax.random.key(seed), tokens[None])
        apply, params = functional(PagedDecoder(), variables)
        results.append(step(apply, params, pool, tokens, batch)[1])
    assert np.abs(results[0] - results[1]).max() > 1e-2
    assert len(traces) == 1
    assert apply != functional(Decoder(), variables)[0]


@pytest.mark.core
def test_errors_name_the_numbers():
    _, variables = dense_and_variables()
    _, batch = decoding.lay_out_batches(9, 5)
    _, pool = decoding.make_cache()
    x = jnp.zeros((decoding.SLOTS, FEATURES))

    def call(pool=pool, x=x, **options):
        options = {"layer": 0} | options
        PagedAttention(HEADS, **options).apply(variables, pool, x, batch)

    with pytest.raises(ValueError, match=r"dropout_rate=0\.25 with deterministic=None"):
        call(dropout_rate=0.25)
    with pytest.raises(ValueError, match="attention_fn=.*oracle_attention"):
        call(attention_fn=decoding.oracle_attention())
    with pytest.raises(ValueError, match="qk_attn_weights_einsum_cls would not be"):
        call(qk_attn_weights_einsum_cls=lambda: jnp.einsum)
    with pytest.raises(ValueError, match="layer is not given: pass layer="):
        call(layer=None)
    with pytest.raises(ValueError, match="layer=2 is not in the pool, which has 2"):
        call(layer=2)
    with pytest.raises(ValueError, match="num_heads=4, and that of num_kv_heads=3"):
        call(num_kv_heads=3)
    with pytest.raises(ValueError, match="num_kv_heads must be a whole number >= 1"):
        call(num_kv_heads=0)
    with pytest.raises(ValueError, match="qkv_features=22 must be a multiple of"):
        call(qkv_features=22)
    _, other = decoding.make_cache(num_kv_heads=1, head_dim=16)
    message = "keys have 4 heads of width 6, .* num_kv_heads=1 of head_dim=16"
    with pytest.raises(ValueError, match=message):
        call(pool=other)
    with pytest.raises(ValueError, match="has 3 tokens, but the batch has 5"):
        call(x=x[:3])
    with pytest.raises(ValueError, match="unknown implementation 'abacus'"):
        call(implementation="abacus")


def test_deterministic_may_be_given_in_the_call():
    _, variables = dense_and_variables()
    _, batch = decoding.lay_out_batches(9, 5)
    _, pool = decoding.make_cache()
    x = jnp.zeros((decoding.SLOTS, FEATURES))
    layer = PagedAttention(HEADS, layer=0, dropout_rate=0.25)

    def shapes(**call):
        return jax.eval_shape(
            lambda *args: layer.apply(variables, *args, **call), pool, x, batch
        )

    assert shapes(deterministic=True)[1].shape == x.shape
    with pytest.raises(ValueError, match="deterministic=False"):
        shapes(deterministic=False)
