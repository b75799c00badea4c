"""The NNX layer and adapter against dense Flax."""

import pickle
import runpy
from pathlib import Path
from unittest import mock

import flax_decoding as decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import checkify

from pagedjax import _heads
from pagedjax.nnx import PagedAttention, functional

FEATURES, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 24, 4, 2, 6, 2


class Block(nnx.Module):
    def __init__(self, attention, rngs):
        self.norm = nnx.LayerNorm(FEATURES, rngs=rngs)
        self.attention = attention
        self.up = nnx.Linear(FEATURES, 2 * FEATURES, rngs=rngs)
        self.down = nnx.Linear(2 * FEATURES, FEATURES, rngs=rngs)


class Decoder(nnx.Module):
    """A small decoder with dense attention."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(decoding.VOCAB, FEATURES, rngs=rngs)
        self.places = nnx.Embed(decoding.MAX_LEN, FEATURES, rngs=rngs)
        self.blocks = nnx.List(
            Block(make_dense(rngs, num_kv_heads=KV_HEADS), rngs) for _ in range(LAYERS)
        )

    def __call__(self, tokens):
        x = self.embed(tokens) + self.places(jnp.arange(tokens.shape[1])[None])
        for block in self.blocks:
            x = x + block.attention(block.norm(x), is_causal=True)
            x = x + block.down(nnx.gelu(block.up(x)))
        return self.embed.attend(x)


class PagedDecoder(nnx.Module):
    """The same decoder, the same parameters, on the paged cache."""

    def __init__(self, dense):
        self.embed, self.places = dense.embed, dense.places
        self.blocks = nnx.clone(dense.blocks, variables=False)
        for i, block in enumerate(self.blocks):
            block.attention = PagedAttention.from_dense(block.attention, layer=i)

    def __call__(self, pool, tokens, batch, rows=None):
        x = self.embed(tokens) + self.places(decoding.positions_like(tokens, batch))
        for block in self.blocks:
            pool, y = block.attention(pool, block.norm(x), batch)
            x = x + y
            x = x + block.down(nnx.gelu(block.up(x)))
        return pool, self.embed.attend(x if rows is None else x[rows])


def make_dense(rngs, **options):
    options = {"num_heads": HEADS, "in_features": FEATURES, "decode": False} | options
    dense = nnx.MultiHeadAttention(**options, rngs=rngs)
    stir(dense, seed=len(options))
    return dense


def compiled(dense):
    graphdef, state = nnx.split(dense)
    return jax.jit(lambda tokens: nnx.merge(graphdef, state)(tokens))


def stir(module, seed):
    """Moves every parameter off its initial value: zeros and ones hide mistakes."""
    rng = np.random.default_rng(seed)
    for _, param in nnx.iter_graph(module):
        if isinstance(param, nnx.Param):
            noise = 0.2 * rng.standard_normal(param.shape)
            param[...] = param[...] + jnp.asarray(noise, param.dtype)


def inputs(features=FEATURES, length=9):
    rng = np.random.default_rng(7)
    return rng.standard_normal((decoding.SLOTS, length, features)).astype(np.float32)


@pytest.mark.core
@pytest.mark.parametrize(("page_size", "padded"), [(1, False), (5, True), (16, False)])
def test_generates_what_the_dense_model_generates(page_size, padded):
    dense = Decoder(nnx.Rngs(0))
    apply, params = functional(PagedDecoder(dense))
    cache = decoding.make_cache(page_size=page_size, num_kv_heads=KV_HEADS)
    run = decoding.PagedRun(apply, params, padded=padded)
    sequences = run.generate(*cache)
    decoding.assert_equals_dense(compiled(dense), sequences)


@pytest.mark.core
@pytest.mark.parametrize(
    "options",
    [
        {"use_bias": False, "qkv_features": 32, "out_features": 10},
        {"normalize_qk": True, "num_kv_heads": 1},
        {"dropout_rate": 0.5, "deterministic": True, "decode": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_layer_equals_the_dense_layer(options):
    dense = make_dense(nnx.Rngs(0), **options)
    layer = PagedAttention.from_dense(dense, layer=1)
    _, pool = decoding.make_cache(
        num_kv_heads=dense.num_kv_heads, head_dim=dense.head_dim
    )
    x = inputs()
    got = decoding.run_layer(layer, pool, x)
    want = dense(x, is_causal=True, decode=False)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.core
def test_options_do_what_they_say():
    options = {"rotate": decoding.rope, "window": 3, "soft_cap": 0.6, "scale": 0.7}
    dense = make_dense(
        nnx.Rngs(0),
        num_kv_heads=KV_HEADS,
        attention_fn=decoding.oracle_attention(**options),
    )
    layer = PagedAttention(
        dense.query, dense.key, dense.value, dense.out, layer=0, **options
    )
    _, pool = decoding.make_cache(num_kv_heads=KV_HEADS)
    x = inputs()
    got = decoding.run_layer(layer, pool, x)
    np.testing.assert_allclose(got, dense(x), rtol=1e-5, atol=1e-5)
    for name in options:  # each of them matters here
        fewer = {key: value for key, value in options.items() if key != name}
        dense.attention_fn = decoding.oracle_attention(**fewer)
        assert np.abs(got - dense(x)).max() > 1e-3, name


def test_from_dense_passes_its_options_on():
    layer = PagedAttention.from_dense(
        make_dense(nnx.Rngs(0)),
        layer=3,
        rotate=decoding.rope,
        window=4,
        soft_cap=5.0,
        implementation="xla",
    )
    assert (layer.layer, layer.rotate) == (3, decoding.rope)
    assert dict(layer.options) == {
        "scale": None,
        "window": 4,
        "soft_cap": 5.0,
        "implementation": "xla",
    }


@pytest.mark.core
def test_bfloat16_is_as_close_to_float32_as_the_dense_layer():
    dense = make_dense(nnx.Rngs(0), dtype=jnp.bfloat16)
    layer = PagedAttention.from_dense(dense, layer=0)
    exact = make_dense(nnx.Rngs(0))
    nnx.update(exact, jax.tree.map(lambda p: p.astype(jnp.float32), nnx.state(dense)))
    _, pool = decoding.make_cache(dtype=jnp.bfloat16)
    x = inputs()
    want = np.asarray(exact(x, is_causal=True))
    dense_error = np.abs(np.asarray(dense(x, is_causal=True), np.float32) - want).max()
    got = decoding.run_layer(layer, pool, x)
    assert got.dtype == jnp.bfloat16
    assert 0 < np.abs(got.astype(np.float32) - want).max() <= 1.5 * dense_error


def test_shares_the_parameters_of_the_dense_layer():
    dense = make_dense(nnx.Rngs(0), normalize_qk=True)
    layer = PagedAttention.from_dense(dense, layer=0)
    assert layer.query.kernel is dense.query.kernel
    assert layer.out.bias is dense.out.bias
    dense_state, state = (nnx.to_flat_state(nnx.state(m)) for m in (dense, layer))
    assert [path for path, _ in state] == [path for path, _ in dense_state]


def test_layer_may_be_traced():
    dense = [make_dense(nnx.Rngs(i)) for i in range(LAYERS)]
    paged = [PagedAttention.from_dense(d) for d in dense]
    graphdef, _ = nnx.split(paged[0])
    stacked = jax.tree.map(
        lambda *p: jnp.stack(p), *(nnx.to_pure_dict(nnx.state(p)) for p in paged)
    )

    def call(pool, x, batch):
        def body(carry, xs):
            pool, x = carry
            params, i = xs
            return nnx.merge(graphdef, params)(pool, x, batch, layer=i), None

        xs = (stacked, jnp.arange(LAYERS))
        return jax.lax.scan(body, (pool, x), xs)[0]

    _, pool = decoding.make_cache()
    x = inputs()
    got = decoding.run_layer(call, pool, x)
    want = dense[1](dense[0](x, is_causal=True), is_causal=True)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.core
def test_pool_is_updated_in_place():
    layer = PagedAttention.from_dense(make_dense(nnx.Rngs(0)), layer=1)
    table, pool = decoding.make_cache()
    table = decoding.append(table, [3] * decoding.SLOTS)
    batch = decoding.pack_decode(table, jnp.ones((decoding.SLOTS,), bool))
    graphdef, params = nnx.split(layer)

    def step(params, pool, x, batch):
        return nnx.merge(graphdef, params)(pool, x, batch)

    step = jax.jit(step, donate_argnums=1)
    where = [pages.unsafe_buffer_pointer() for pages in jax.tree.leaves(pool)]
    pool, _ = step(params, pool, jnp.asarray(inputs()[:, 0]), batch)
    assert [p.unsafe_buffer_pointer() for p in jax.tree.leaves(pool)] == where


@pytest.mark.core
def test_padding_is_finite_and_never_stored():
    layer = PagedAttention.from_dense(make_dense(nnx.Rngs(0)), layer=0)
    table, pool = decoding.make_cache()
    q_lens = jnp.array([2, 0, 3, 0, 1])
    table = decoding.append(table, q_lens.tolist())
    batch = decoding.pack(table, q_lens, num_tokens=8)
    x = jnp.asarray(inputs()[:, :4])
    real = jnp.arange(4)[None] < q_lens[:, None]
    x = jnp.where(real[..., None], x, jnp.nan)
    pool, y = jax.jit(layer)(pool, x, batch)
    assert y.shape == x.shape
    assert np.isfinite(y).all()
    stored = np.isfinite(np.asarray(pool.k_pages)).all(axis=(2, 3))
    assert stored.sum() == q_lens.sum()


@pytest.mark.core
def test_equal_models_share_a_program():
    traces = []

    def step(apply, params, pool, tokens, batch):
        traces.append(apply)
        return apply(params, pool, tokens, batch)

    step = jax.jit(step, static_argnums=0)
    table, pool = decoding.make_cache(num_kv_heads=KV_HEADS)
    table = decoding.append(table, [1] * decoding.SLOTS)
    batch = decoding.pack_decode(table, jnp.ones((decoding.SLOTS,), bool))
    tokens = jnp.arange(decoding.SLOTS)
    results = []
    for seed in (0, 1):
        apply, params = functional(PagedDecoder(Decoder(nnx.Rngs(seed))))
        results.append(step(apply, params, pool, tokens, batch)[1])
    assert np.abs(results[0] - results[1]).max() > 1e-2
    assert len(traces) == 1
    assert apply != functional(Decoder(nnx.Rngs(0)))[0]
    assert apply != "apply"


@pytest.mark.core
def test_a_pickled_function_hashes_anew():
    """In another process strings hash differently, and so do the equal models there."""
    apply, _ = functional(PagedDecoder(Decoder(nnx.Rngs(0))))
    here = hash(apply)
    stored = pickle.dumps(apply)
    with mock.patch.object(type(apply.graphdef), "__hash__", lambda _: here + 1):
        loaded = pickle.loads(stored)
        other, _ = functional(PagedDecoder(Decoder(nnx.Rngs(0))))
        assert loaded == other
        assert hash(loaded) == hash(other) == here + 1


def test_functional_gives_plain_arrays_and_takes_rows():
    model = PagedDecoder(Decoder(nnx.Rngs(0)))
    apply, params = functional(model)
    assert type(params) is dict
    assert all(type(leaf) is type(jnp.ones(())) for leaf in jax.tree.leaves(params))
    kernel = params["blocks"][0]["attention"]["query"]["kernel"]
    held = model.blocks[0].attention.query.kernel[...]
    assert kernel.unsafe_buffer_pointer() == held.unsafe_buffer_pointer()
    table, pool = decoding.make_cache(num_kv_heads=KV_HEADS)
    table = decoding.append(table, [3, 0, 2, 0, 0])
    batch = decoding.pack(table, table.seq_lens, num_tokens=6)
    tokens = jnp.arange(6)
    run = jax.jit(apply)
    _, every = run(params, pool, tokens, batch)
    _, some = run(params, pool, tokens, batch, batch.last_rows[jnp.array([0, 2])])
    np.testing.assert_array_equal(some, every[jnp.array([2, 4])])


@pytest.mark.parametrize("deterministic", [None, False])
def test_dropout_is_refused(deterministic):
    dense = make_dense(nnx.Rngs(0), dropout_rate=0.25, deterministic=deterministic)
    with pytest.raises(ValueError, match=r"dropout_rate=0\.25.*call eval\(\)"):
        PagedAttention.from_dense(dense, layer=0)
    dense.eval()
    PagedAttention.from_dense(dense, layer=0)


def test_from_dense_refuses_what_it_cannot_do():
    rngs = nnx.Rngs(0)
    with pytest.raises(TypeError, match="must be an nnx.MultiHeadAttention, got Linea"):
        PagedAttention.from_dense(nnx.Linear(2, 2, rngs=rngs))
    with pytest.raises(ValueError, match="in_features=24 and in_kv_features=8"):
        PagedAttention.from_dense(make_dense(rngs, in_kv_features=8))
    with pytest.raises(ValueError, match="attention_fn=.*oracle_attention"):
        PagedAttention.from_dense(
            make_dense(rngs, attention_fn=decoding.oracle_attention())
        )


@pytest.mark.core
def test_errors_name_the_numbers():
    dense = make_dense(nnx.Rngs(0))
    layer = PagedAttention.from_dense(dense, layer=0)
    table, pool = decoding.make_cache()
    slots = decoding.SLOTS
    table = decoding.append(table, [2] * slots)
    ragged = decoding.pack(table, table.seq_lens, num_tokens=12)
    decode = decoding.pack_decode(table, jnp.ones((slots,), bool))
    x = jnp.zeros((slots, 2, FEATURES))
    token = x[:, 0]

    with pytest.raises(ValueError, match="layer is not given: pass layer="):
        PagedAttention.from_dense(dense)(pool, x, ragged)
    with pytest.raises(ValueError, match="layer=2 is not in the pool, which has 2"):
        layer(pool, token, decode, layer=2)
    with pytest.raises(ValueError, match="layer=-1 is not in the pool"):
        layer(pool, token, decode, layer=-1)
    with pytest.raises(TypeError, match=r"layer must be an integer, got 0\.5"):
        layer(pool, token, decode, layer=0.5)
    _, other = decoding.make_cache(num_kv_heads=1, head_dim=16)
    message = "keys have 4 heads of width 6, .* num_kv_heads=1 of head_dim=16"
    with pytest.raises(ValueError, match=message):
        layer(other, token, decode)
    with pytest.raises(ValueError, match="has 10 tokens, but the batch has 12"):
        layer(pool, x.reshape(10, FEATURES), ragged)
    with pytest.raises(ValueError, match="has 3 rows, but the batch has 5 slots"):
        layer(pool, x[:3], ragged)
    with pytest.raises(ValueError, match="2 tokens per slot, but a decode batch has"):
        layer(pool, x, decode)
    with pytest.raises(
        ValueError, match=r"must be \[T, E\] or \[S, L, E\], got .*24\)"
    ):
        layer(pool, x[None], ragged)
    named = PagedAttention.from_dense(dense, layer=0, implementation="abacus")
    with pytest.raises(ValueError, match="unknown implementation 'abacus'"):
        named(pool, token, decode)


def test_checkify_reports_a_row_that_is_too_short():
    table, _ = decoding.make_cache()
    table = decoding.append(table, [2, 3, 1, 0, 0])
    batch = decoding.pack(table, table.seq_lens, num_tokens=8)
    x = jnp.zeros((decoding.SLOTS, 2, FEATURES))
    error, _ = checkify.checkify(_heads.pack)(x, batch)
    with pytest.raises(checkify.JaxRuntimeError, match="slot 1 has 3 tokens .* the 2"):
        error.throw()


def test_the_example_runs(capsys):
    example = Path(__file__).parents[1] / "examples" / "custom_flax_model.py"
    runpy.run_path(str(example), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.count("paged == dense: True") == 2
