"""What the NNX and Linen attention layers share, on plain arrays.

A layer takes tokens packed, as the batch has them, or padded, as most models have
them. Padded tokens are packed first, so that the layer computes nothing for padding
and nothing of it reaches the pool::

    padded [S, L, E]     a5 a6 a7 | .. .. .. | c0 c1 ..      q_lens 3 0 2
    packed [T, E]        a5 a6 a7 c0 c1 .. ..
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pagedjax import _page_ops as ops
from pagedjax._kv_pool import KVPool
from pagedjax._ragged import RaggedBatch, attend

Rotate = Callable[[jax.Array, jax.Array], jax.Array]


def pack(x: jax.Array, batch: RaggedBatch) -> jax.Array:
    """Brings a layer's input to the packed form.

    Args:
      x: [T, E], returned as it is, or [S, L, E] with each slot's tokens first.
      batch: the batch of this step.

    Returns:
      [T, E]; zeros on padding if `x` was padded.

    Raises:
      ValueError: the shape of `x` does not go with the batch.
    """
    num_tokens, num_slots = batch.positions.shape[0], batch.seq_lens.shape[0]
    if x.ndim == 2:
        if x.shape[0] != num_tokens:
            raise ValueError(
                f"x of shape {x.shape} has {x.shape[0]} tokens, but the batch has "
                f"{num_tokens}"
            )
        return x
    if x.ndim != 3:
        raise ValueError(f"x must be [T, E] or [S, L, E], got shape {x.shape}")
    if x.shape[0] != num_slots:
        raise ValueError(
            f"x of shape {x.shape} has {x.shape[0]} rows, but the batch has "
            f"{num_slots} slots"
        )
    if batch.cu_q_lens is None:
        if x.shape[1] != 1:
            raise ValueError(
                f"x of shape {x.shape} has {x.shape[1]} tokens per slot, but a decode "
                "batch has one; pack a prefill with pack_ragged"
            )
        return x[:, 0]
    q_lens = batch.cu_q_lens[1:] - batch.cu_q_lens[:-1]
    ops.check_each(
        q_lens <= x.shape[1],
        f"slot {{i}} has {{v}} tokens in the batch, over the {x.shape[1]} of x",
        q_lens,
    )
    packed = jnp.zeros((num_tokens, x.shape[2]), x.dtype)
    return packed.at[_places(batch, x.shape[1])].set(x, mode="drop")


def unpack(y: jax.Array, batch: RaggedBatch, like: jax.Array) -> jax.Array:
    """Brings a layer's output [T, F] back to the form of its input `like`.

    Returns:
      [T, F] or [S, L, F]; zeros on padding if `like` is padded.
    """
    if like.ndim == 2:
        return y
    if batch.cu_q_lens is None:
        return y[:, None]
    return y.at[_places(batch, like.shape[1])].get(mode="fill", fill_value=0)


def attend_heads(
    pool: KVPool,
    layer: int | jax.Array | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    batch: RaggedBatch,
    *,
    rotate: Rotate | None,
    **options: Any,
) -> tuple[KVPool, jax.Array]:
    """Rotates the queries and keys of a layer, if it does, and attends.

    Args:
      pool: the pool.
      layer: which layer of the pool.
      q: [T, H, D]; queries.
      k: [T, K, D]; keys.
      v: [T, K, D]; values.
      batch: the batch of this step.
      rotate: `rotate(heads, positions)`, or None.
      **options: see `attend`.

    Returns:
      `(pool, out)`; out is [T, H, D].

    Raises:
      ValueError: the layer is missing or not in the pool, or the heads are not
        those of the pool.
      TypeError: the layer is not an integer.
    """
    if layer is None:
        raise ValueError(
            "layer is not given: pass layer=, the index of this layer in the pool, "
            "to the layer or to its call"
        )
    if not jnp.issubdtype(jnp.result_type(layer), jnp.integer):
        raise TypeError(f"layer must be an integer, got {layer!r}")
    if not isinstance(layer, jax.Array) and not 0 <= layer < pool.num_layers:
        raise ValueError(
            f"layer={layer} is not in the pool, which has {pool.num_layers} layers"
        )
    for name, heads in (("keys", k), ("values", v)):
        if heads.shape[1:] != (pool.num_kv_heads, pool.head_dim):
            raise ValueError(
                f"the layer's {name} have {heads.shape[1]} heads of width "
                f"{heads.shape[2]}, but the pool has num_kv_heads="
                f"{pool.num_kv_heads} of head_dim={pool.head_dim}"
            )
    if rotate is not None:
        q, k = rotate(q, batch.positions), rotate(k, batch.positions)
    return attend(pool, layer, q, k, v, batch, **options)


def _places(batch: RaggedBatch, width: int) -> jax.Array:
    """int32[S, L]; where each padded token is in the packed form; T on padding."""
    assert batch.cu_q_lens is not None
    starts, ends = batch.cu_q_lens[:-1, None], batch.cu_q_lens[1:, None]
    places = starts + jnp.arange(width, dtype=jnp.int32)[None, :]
    return jnp.where(places < ends, places, batch.positions.shape[0])
