"""Generation under `jax.shard_map` over prompts: a table and a pool per device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_model import HEAD_DIM, KV_HEADS, LAYERS, VOCAB, WIDTH, make_params, paged
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as Spec

import pagedjax as pj

MODEL, PARAMS = paged(), make_params()
PROMPTS = [[7, 3, 9, 1, 30, 2], [11], [], [], [5, 6, 7, 8, 9, 10], [1], [2, 3], [4] * 4]
KEY = jax.random.key(3)
SAMPLES = dict(temperature=1.0, num_samples=2)
KINDS = {
    "samples": SAMPLES,
    "beams": dict(num_beams=3, num_samples=3),
    "lookup": dict(temperature=1.0, draft=pj.PromptLookup()),
    "model": dict(draft=pj.DraftModel(MODEL, 3), draft_params=PARAMS),
}


def arguments():
    """Gives prompts, their lengths, and their seeds."""
    tokens = np.zeros((8, 6), np.int32)
    for row, prompt in zip(tokens, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    lens = jnp.array([len(prompt) for prompt in PROMPTS])
    return jnp.asarray(tokens), lens, jnp.arange(8)


def generate(model, params, tokens, lens, seeds, **options):
    options = dict(max_new_tokens=9, page_size=4, eos_ids=[4, 38]) | options
    return pj.generate(model, params, tokens, lens, KEY, seeds=seeds, **options)


def generate_sharded(mesh, model, specs, **options):
    """Runs one `generate` per device; gives its result, and statistics by device."""

    def local(*args):
        out = generate(model, *args, **options)
        # What is one number per device gets an axis for the devices.
        stats = jax.tree.map(lambda x: x[None], out.stats)
        return (out.tokens, out.lengths, out.status, out.logprobs), stats

    sharded = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs, *[Spec("data")] * 3),
        out_specs=Spec("data"),
    )
    return jax.jit(sharded)(PARAMS, *arguments())


def same(got, want):
    tokens, lengths, status, logprobs = got
    assert tokens.tolist() == want.tokens.tolist()
    assert lengths.tolist() == want.lengths.tolist()
    assert status.tolist() == want.status.tolist()
    np.testing.assert_allclose(logprobs, want.logprobs, atol=1e-4)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("samples", marks=pytest.mark.core),
        "beams",
        "lookup",
        pytest.param("model", marks=pytest.mark.slow),
    ],
)
def test_sharded_over_prompts(kind):
    """One device has no prompt at all, and the others end at different steps."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    got, stats = generate_sharded(mesh, MODEL, Spec(), **KINDS[kind])
    want = generate(MODEL, PARAMS, *arguments(), **KINDS[kind])
    same(got, want)
    steps = stats.num_steps.tolist()
    assert steps[1] == 0 and max(steps) == int(want.stats.num_steps)
    assert int(jnp.sum(stats.pages_copied)) == int(want.stats.pages_copied)


def apply_heads(params, pool, tokens, batch, rows=None):
    """Runs the model with this device's heads; the logits are equal on all."""
    x = params["embed"][tokens] + params["place"][batch.positions]
    for i, layer in enumerate(params["layers"]):
        q, k, v = (jnp.einsum("te,ehd->thd", x, layer[name]) for name in "qkv")
        pool, out = pj.attend(pool, i, q, k, v, batch)
        size = out.shape[1] * HEAD_DIM
        first = jax.lax.axis_index("tensor") * size
        columns = first + jnp.arange(size, dtype=jnp.int32)
        own = jnp.zeros((out.shape[0], WIDTH), out.dtype)
        own = own.at[:, columns].set(out.reshape(-1, size))
        x = jnp.tanh(x + jax.lax.psum(own, "tensor"))
    x = x if rows is None else x[rows]
    return pool, x @ params["head"]


def test_sharded_over_prompts_and_heads():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))
    model = pj.PagedModel(apply_heads, LAYERS, KV_HEADS // 2, HEAD_DIM, VOCAB)
    heads = {name: Spec(None, "tensor") for name in "qkv"}
    specs = {name: Spec() for name in ("embed", "place", "head")}
    specs["layers"] = [heads] * LAYERS
    got, _ = generate_sharded(mesh, model, specs, **SAMPLES)
    same(got, generate(MODEL, PARAMS, *arguments(), **SAMPLES))


@pytest.mark.core
def test_sharded_without_end_tokens() -> None:
    """An empty array among the constants crashes the compiler of jaxlib 0.11.2."""

    def count(params, pool, tokens, batch, rows):
        tokens = tokens if rows is None else tokens[rows]
        return pool, jax.nn.one_hot(tokens + 1, 100)

    model = pj.PagedModel(
        count, num_layers=1, num_kv_heads=1, head_dim=8, vocab_size=100
    )

    def local(prompts):
        return pj.generate(model, None, prompts, max_new_tokens=3, page_size=4).tokens

    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    run = jax.shard_map(local, mesh=mesh, in_specs=Spec("data"), out_specs=Spec("data"))
    out = jax.jit(run)(jnp.arange(4)[:, None])
    assert out[:, 0].tolist() == [[i + 1, i + 2, i + 3] for i in range(4)]
