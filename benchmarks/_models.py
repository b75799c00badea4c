"""The real model, and its baselines: a dense contiguous cache; its products alone."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import pagedjax as pj
from pagedjax import models
from pagedjax.models import llama as llama_module

MODEL = "smollm2-135m"


def load() -> tuple[pj.PagedModel, Any, models.LoadedModel]:
    """Loads SmolLM2-135M in float32."""
    loaded = models.load_model(MODEL, dtype=jnp.float32)
    model, params = loaded.model.paged()
    return model, params, loaded


def random_prompts(batch: int, length: int, vocab_size: int) -> np.ndarray:
    """Draws token ids: what they say does not change what a step costs."""
    draw = np.random.default_rng(0)
    return draw.integers(17, vocab_size, (batch, length), dtype=np.int32)


def make_decode(
    llama: models.Llama, num_steps: int, implementation: str | None
) -> Callable[..., Any]:
    """Makes `(pool, table, tokens) -> (pool, tokens)`, greedy; donates the pool."""
    graph, params = nnx.split(llama)

    @functools.partial(jax.jit, donate_argnums=1)
    def decode(params: Any, pool: pj.KVPool, table: pj.PageTable, tokens: Any) -> Any:
        model = nnx.merge(graph, params)
        one = jnp.ones((table.max_slots,), jnp.int32)

        def step(_: jax.Array, carry: tuple) -> tuple:
            pool, table, tokens = carry
            table, _, ok = pj.append(table, one, max_tokens=1)
            batch = pj.pack_decode(table, ok)
            pool, logits = model(pool, tokens, batch, implementation=implementation)
            return pool, table, jnp.argmax(logits, axis=-1).astype(jnp.int32)

        carry = (pool, table, tokens)
        pool, _, tokens = jax.lax.fori_loop(0, num_steps, step, carry)
        return pool, tokens

    return functools.partial(decode, params)


def products_alone(
    llama: models.Llama, num_tokens: int, *, head_rows: int, steps: int
) -> dict[str, Callable[[], Any]]:
    """Makes functions that run a step's matrix products, and nothing else, in a chain.

    Each product takes the leading columns of the one before it.

    Args:
      llama: the model, with matrices of their own for each layer.
      num_tokens: rows of the products.
      head_rows: rows of the last one.
      steps: how many steps one call runs.

    Returns:
      Two arrangements: as the model has it, a scan over layers with a switch in it;
      and all layers one after the other.
    """
    layers, width = llama.config.num_layers, llama.config.hidden_size
    weights = [
        [w[...] for w in held]
        for held in (llama.qkv, llama.out, llama.gate_up, llama.down)
    ]
    head = (llama.embed if llama.head is None else llama.head)[...]
    inputs = [w[0].shape[1] for w in weights]

    def layer(x: jax.Array, weights: Any, index: Any) -> jax.Array:
        for matrix, columns in zip(weights, inputs, strict=True):
            x = llama_module._product(x[:, :columns], matrix, index)
        return x

    def scanned(x: jax.Array, weights: Any) -> jax.Array:
        index = jnp.arange(layers)
        return jax.lax.scan(lambda x, i: (layer(x, weights, i), None), x, index)[0]

    def unrolled(x: jax.Array, weights: Any) -> jax.Array:
        for i in range(layers):
            x = layer(x, [[held[i]] for held in weights], jnp.int32(0))
        return x

    def run(through: Callable[..., jax.Array]) -> Callable[[], Any]:
        @jax.jit
        def chain(x: jax.Array, weights: Any, head: jax.Array) -> jax.Array:
            def step(_: jax.Array, x: jax.Array) -> jax.Array:
                x = through(x, weights)
                y = llama_module._product(x[:head_rows], [head], jnp.int32(0))
                return x.at[:head_rows].set(y[:, :width])

            return jax.lax.fori_loop(0, steps, step, x)

        x = jnp.full((num_tokens, width), 1e-3)
        return lambda: jax.block_until_ready(chain(x, weights, head))

    return {"products, scanned": run(scanned), "products, unrolled": run(unrolled)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseCache:
    """Keys and values [L, B, length, K, D], one long block per sequence."""

    k: jax.Array
    v: jax.Array


def dense_from_pages(state: pj.GenerationState, length: int) -> DenseCache:
    """Copies what a generation holds into a dense cache."""

    def read(layer: int) -> tuple[jax.Array, jax.Array]:
        slots = jnp.arange(state.table.max_slots)
        gather = jax.vmap(
            lambda slot: pj.gather_kv(state.pool, layer, state.table, slot)
        )
        return gather(slots)

    layers = [jax.jit(read)(layer) for layer in range(state.pool.num_layers)]
    k, v = (jnp.stack(part) for part in zip(*layers, strict=True))
    pad = max(0, length - k.shape[2])
    widths = ((0, 0), (0, 0), (0, pad), (0, 0), (0, 0))
    return DenseCache(*(jnp.pad(part, widths)[:, :, :length] for part in (k, v)))


def dense_decode(
    model: pj.PagedModel,
    params: Any,
    cache: DenseCache,
    tokens: jax.Array,
    seq_lens: jax.Array,
    num_steps: int,
) -> jax.Array:
    """Decodes greedily: the same layers, the attention swapped while tracing."""

    def step(carry: tuple, _: None) -> tuple[tuple, jax.Array]:
        cache, tokens, seq_lens = carry
        batch = pj.RaggedBatch(
            page_indices=jnp.zeros((tokens.shape[0], 1), jnp.int32),
            seq_lens=seq_lens + 1,
            positions=seq_lens,
            pages=seq_lens,
            offsets=seq_lens,
        )
        cache, logits = model.apply(params, cache, tokens, batch, None)
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return (cache, tokens, seq_lens + 1), tokens

    with mock.patch("pagedjax.models.llama.attend", _attend_dense):
        _, chosen = jax.lax.scan(
            step, (cache, tokens, seq_lens), None, length=num_steps
        )
    return chosen.T


def _attend_dense(
    cache: DenseCache,
    layer: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    batch: pj.RaggedBatch,
    **_: Any,
) -> tuple[DenseCache, jax.Array]:
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    row = jnp.arange(rows)
    cache = DenseCache(
        cache.k.at[layer, row, batch.positions].set(k),
        cache.v.at[layer, row, batch.positions].set(v),
    )
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, dim)
    scores = jnp.einsum("bkgd,bskd->bkgs", grouped, cache.k[layer]) / np.sqrt(dim)
    seen = jnp.arange(cache.k.shape[2])[None, :] < batch.seq_lens[:, None]
    scores = jnp.where(seen[:, None, None, :], scores, -jnp.inf)
    out = jnp.einsum("bkgs,bskd->bkgd", jax.nn.softmax(scores), cache.v[layer])
    return cache, out.reshape(rows, heads, dim)
