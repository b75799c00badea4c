"""`Llama.sharded` on a (data, tensor) mesh against the same model on one device."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

import pagedjax as pj
from pagedjax.models import Llama, LlamaConfig

P = PartitionSpec
CONFIG = LlamaConfig(
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    hidden_size=24,
    ffn_size=40,
    vocab_size=50,
    max_seq_len=64,
    qkv_bias=True,
    tied_embeddings=True,
)
PAGE_SIZE, PAGES, LENGTH, ROWS = 4, 8, 6, 4


def make_mesh(data, tensor):
    devices = np.array(jax.devices()[: data * tensor]).reshape(data, tensor)
    return Mesh(devices, ("data", "tensor"))


def logits_of(model, params, tokens):
    """Prefill all but the last token of each row and decode that one."""
    rows, length = tokens.shape
    table = pj.init_page_table(
        num_pages=PAGES, page_size=PAGE_SIZE, max_slots=rows, pages_per_slot=2
    )
    pool = pj.init_kv_pool(
        num_layers=model.num_layers,
        num_pages=PAGES,
        page_size=PAGE_SIZE,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
    )
    lens = jnp.full((rows,), length - 1, jnp.int32)
    table, _, _ = pj.append(table, lens)
    batch = pj.pack_ragged(table, lens, num_tokens=rows * (length - 1))
    pool, first = model.apply(params, pool, tokens[:, :-1].reshape(-1), batch, None)
    table, _, _ = pj.append(table, jnp.ones((rows,), jnp.int32), max_tokens=1)
    batch = pj.pack_decode(table, jnp.ones((rows,), bool))
    pool, last = model.apply(params, pool, tokens[:, -1], batch, None)
    first = first.reshape(rows, length - 1, -1)
    return jnp.concatenate([first, last[:, None]], axis=1), pool.k_pages


@pytest.fixture(scope="module")
def tokens():
    draw = np.random.default_rng(3)
    return draw.integers(0, CONFIG.vocab_size, (ROWS, LENGTH)).astype(np.int32)


@pytest.mark.core
@pytest.mark.parametrize("stacked", [False, True])
def test_logits_on_two_by_two_devices_equal_those_on_one(tokens, stacked):
    llama = Llama(CONFIG, rngs=nnx.Rngs(0), stacked=stacked)
    bias = jax.random.normal(jax.random.key(1), llama.qkv_bias.shape)
    llama.qkv_bias[...] = bias
    alone, params = llama.paged()
    want, want_keys = jax.jit(functools.partial(logits_of, alone))(params, tokens)

    mesh = make_mesh(2, 2)
    model, params, specs = llama.sharded(mesh)
    assert model.num_kv_heads == CONFIG.num_kv_heads // 2
    run = jax.shard_map(
        functools.partial(logits_of, model),
        mesh=mesh,
        in_specs=(specs, P("data")),
        out_specs=(P("data"), P("data", None, "tensor")),
    )
    compiled = jax.jit(run).lower(params, tokens).compile()
    got, keys = compiled(params, tokens)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    # Sums are all that crosses devices; no matrix or cache is put together.
    moved = set(re.findall(r" (all-[a-z]+|collective-permute)\(", compiled.as_text()))
    assert moved == {"all-reduce"}
    # Each half of the mesh numbers its pages from 0; a row takes two.
    by_layer = np.asarray(want_keys).reshape(CONFIG.num_layers, PAGES, -1)
    for half in (0, 1):
        mine = np.split(np.asarray(keys), 2)[half].reshape(by_layer.shape)
        theirs = by_layer[:, 4 * half : 4 * half + 4]
        np.testing.assert_allclose(mine[:, :4], theirs, rtol=0, atol=1e-5)
        assert np.abs(theirs).max() > 0.1


def test_each_device_holds_its_own_heads_and_columns():
    llama = Llama(CONFIG, rngs=nnx.Rngs(0))
    _, whole = llama.paged()
    _, params, specs = llama.sharded(make_mesh(1, 4))
    assert jax.tree.structure(params) == jax.tree.structure(whole)
    assert jax.tree.structure(
        specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    ) == jax.tree.structure(whole)
    rows, head = np.asarray(whole["qkv"][1]), CONFIG.head_dim
    gate, up = np.split(np.asarray(whole["gate_up"][1]), 2)
    for i in range(4):
        on_device = functools.partial(shard_of, device=jax.devices()[i])
        q, k, v = np.split(on_device(params["qkv"][1]), [2 * head, 3 * head])
        np.testing.assert_array_equal(q, rows[2 * i * head : (2 * i + 2) * head])
        np.testing.assert_array_equal(k, rows[(8 + i) * head : (9 + i) * head])
        np.testing.assert_array_equal(v, rows[(12 + i) * head : (13 + i) * head])
        columns = slice(10 * i, 10 * i + 10)
        both = np.concatenate([gate[columns], up[columns]])
        np.testing.assert_array_equal(on_device(params["gate_up"][1]), both)
        down = np.asarray(whole["down"][1])[:, columns]
        np.testing.assert_array_equal(on_device(params["down"][1]), down)
        np.testing.assert_array_equal(on_device(params["embed"]), whole["embed"])


def shard_of(array, device):
    (data,) = (s.data for s in array.addressable_shards if s.device == device)
    return np.asarray(data)


def test_equal_models_are_equal_and_differ_from_the_unsharded():
    one, two = (Llama(CONFIG, rngs=nnx.Rngs(i)) for i in range(2))
    mesh = make_mesh(2, 2)
    assert one.sharded(mesh)[0] == two.sharded(mesh)[0]
    assert hash(one.sharded(mesh)[0]) == hash(two.sharded(mesh)[0])
    assert one.sharded(mesh)[0] != one.paged()[0]
    assert one.tensor_axis is None


@pytest.mark.parametrize(
    ("change", "axis", "message"),
    [
        ({}, "model", "tensor_axis 'model' is not an axis of the mesh"),
        ({"num_kv_heads": 2}, "tensor", "num_kv_heads must be a multiple of the size"),
        ({"ffn_size": 42}, "tensor", "got 42 and 4"),
    ],
)
def test_what_cannot_be_split_is_refused(change, axis, message):
    llama = Llama(dataclasses.replace(CONFIG, **change), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=re.escape(message)):
        llama.sharded(make_mesh(1, 4), tensor_axis=axis)
