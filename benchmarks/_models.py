"""The real model, and the same model on a dense contiguous cache as the baseline."""

import dataclasses
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import pagedjax as pj
from pagedjax import models

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
