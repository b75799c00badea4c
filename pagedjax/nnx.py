"""Flax NNX on the paged cache: an attention layer, and models as pure functions.

The cache is never part of a module. Pool and batch are plain pytrees, passed to each
call; the new pool is returned::

    dense   y = attention(x, mask=causal)
    paged   pool, y = attention(pool, x, batch)
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self

import jax
from flax import nnx

from pagedjax import _heads
from pagedjax._kv_pool import KVPool
from pagedjax._ragged import RaggedBatch

Projection = Callable[[jax.Array], jax.Array]


class PagedAttention(nnx.Module):
    """Causal self-attention whose keys and values live in a paged pool.

    Takes the place of `nnx.MultiHeadAttention` (`from_dense`), or of any attention
    that is four projections, with the same parameters. One call serves prefill,
    chunks of it, and decode: the batch says which.

    Attributes:
      query, key, value: projections, [T, E] to [T, H, D] or [T, K, D]; H is any
        multiple of K.
      out: projection, [T, H, D] to [T, F].
      query_ln, key_ln: normalisations of queries and keys over D, or None.
      layer: index of this layer in the pool, or None to give it in each call.
      rotate: `rotate(heads[T, H or K, D], positions[T])`, applied to queries and
        keys, or None for no rotary embedding.
      options: (name, value) pairs of the options of `paged_attention`.

    Example:
      >>> import jax, jax.numpy as jnp, pagedjax as pj
      >>> from flax import nnx
      >>> from pagedjax.nnx import PagedAttention
      >>> dense = nnx.MultiHeadAttention(2, 16, decode=False, rngs=nnx.Rngs(0))
      >>> paged = PagedAttention.from_dense(dense, layer=0)
      >>> table = pj.init_page_table(
      ...     num_pages=8, page_size=4, max_slots=1, pages_per_slot=4
      ... )
      >>> pool = pj.init_kv_pool(
      ...     num_layers=1, num_pages=8, page_size=4, num_kv_heads=2, head_dim=8
      ... )
      >>> x = jax.random.normal(jax.random.key(0), (1, 6, 16))
      >>> table, _, _ = pj.append(table, jnp.array([6]))
      >>> batch = pj.pack_ragged(table, jnp.array([6]), num_tokens=6)
      >>> pool, y = paged(pool, x, batch)
      >>> bool(jnp.allclose(y, dense(x, is_causal=True), atol=1e-5))
      True
    """

    def __init__(
        self,
        query: Projection,
        key: Projection,
        value: Projection,
        out: Projection,
        *,
        query_ln: Projection | None = None,
        key_ln: Projection | None = None,
        layer: int | None = None,
        rotate: _heads.Rotate | None = None,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
        implementation: str | None = None,
    ):
        """Makes the layer of four projections, which it holds and does not copy.

        Args:
          query: see the attributes of the class.
          key: see there.
          value: see there.
          out: see there.
          query_ln: see there.
          key_ln: see there.
          layer: see there.
          rotate: see there.
          scale: factor of the scores; default 1/sqrt(D).
          window: how many tokens a token sees, itself included; default all.
          soft_cap: scores become `soft_cap * tanh(score / soft_cap)`.
          implementation: as in `paged_attention`.
        """
        self.query, self.key, self.value, self.out = query, key, value, out
        self.query_ln, self.key_ln = query_ln, key_ln
        self.layer = layer
        self.rotate = rotate
        # A tuple is hashable, so the options stay in the static part of the module.
        self.options = (
            ("scale", scale),
            ("window", window),
            ("soft_cap", soft_cap),
            ("implementation", implementation),
        )

    @classmethod
    def from_dense(
        cls,
        dense: nnx.MultiHeadAttention,
        *,
        layer: int | None = None,
        rotate: _heads.Rotate | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
        implementation: str | None = None,
    ) -> Self:
        """Makes a paged layer of a dense one; both hold the same `Param` objects.

        The state of the result has the paths of the state of `dense`, so an existing
        checkpoint fits. A key-value cache inside `dense` is not taken over.

        Args:
          dense: self-attention, without dropout or with dropout switched off.
          layer: index of this layer in the pool.
          rotate: see the attributes of the class.
          window: how many tokens a token sees, itself included; default all.
          soft_cap: scores become `soft_cap * tanh(score / soft_cap)`.
          implementation: as in `paged_attention`.

        Returns:
          The layer.

        Raises:
          TypeError: `dense` is not an `nnx.MultiHeadAttention`.
          ValueError: it does what a paged layer does not: dropout, cross-attention,
            or an `attention_fn` of its own.

        Example:
          Make every attention of a model paged, in place:

          >>> from flax import nnx
          >>> from pagedjax.nnx import PagedAttention
          >>> class Block(nnx.Module):
          ...     def __init__(self, rngs):
          ...         self.attention = nnx.MultiHeadAttention(2, 16, rngs=rngs)
          >>> blocks = nnx.List(Block(nnx.Rngs(0)) for _ in range(2))
          >>> for i, block in enumerate(blocks):
          ...     block.attention = PagedAttention.from_dense(
          ...         block.attention, layer=i
          ...     )
        """
        if not isinstance(dense, nnx.MultiHeadAttention):
            raise TypeError(
                f"dense must be an nnx.MultiHeadAttention, got {type(dense).__name__}"
            )
        if dense.dropout_rate > 0 and not dense.deterministic:
            raise ValueError(
                f"dense has dropout_rate={dense.dropout_rate} and deterministic="
                f"{dense.deterministic}, and a paged layer has no dropout: call "
                "eval() on the model, or make the layer with deterministic=True"
            )
        if dense.in_kv_features != dense.in_features:
            raise ValueError(
                f"dense has in_features={dense.in_features} and in_kv_features="
                f"{dense.in_kv_features}: it is cross-attention, and a paged layer "
                "is self-attention"
            )
        if dense.attention_fn is not nnx.dot_product_attention:
            raise ValueError(
                f"dense has attention_fn={dense.attention_fn}, which a paged layer "
                "would not call: give what it does as rotate=, window= or soft_cap= "
                "to PagedAttention(dense.query, dense.key, dense.value, dense.out)"
            )
        return cls(
            dense.query,
            dense.key,
            dense.value,
            dense.out,
            query_ln=dense.query_ln,
            key_ln=dense.key_ln,
            layer=layer,
            rotate=rotate,
            window=window,
            soft_cap=soft_cap,
            implementation=implementation,
        )

    def __call__(
        self,
        pool: KVPool,
        x: jax.Array,
        batch: RaggedBatch,
        *,
        layer: int | jax.Array | None = None,
    ) -> tuple[KVPool, jax.Array]:
        """Stores the keys and values of some tokens and lets each token attend.

        Args:
          pool: the pool; donate it.
          x: [T, E], packed as the batch is; or [S, L, E], row s holding the tokens
            of slot s first and padding after (L = 1 for a decode batch).
          batch: which tokens these are (`pack_ragged`, `pack_decode`).
          layer: index in the pool instead of the layer's own; may be traced, as in
            a scan over layers.

        Returns:
          `(pool, y)`; y has the form of `x`, [T, F] or [S, L, F]. Padding is finite
          and means nothing.

        Raises:
          ValueError: the layer is missing or not in the pool, the heads are not
            those of the pool, or `x` does not go with the batch.
          TypeError: the layer is not an integer.
        """
        tokens = _heads.pack(x, batch)
        q, k, v = self.query(tokens), self.key(tokens), self.value(tokens)
        if self.query_ln is not None:
            q = self.query_ln(q)
        if self.key_ln is not None:
            k = self.key_ln(k)
        pool, attended = _heads.attend_heads(
            pool,
            self.layer if layer is None else layer,
            q,
            k,
            v,
            batch,
            rotate=self.rotate,
            **dict(self.options),
        )
        return pool, _heads.unpack(self.out(attended), batch, like=x)


def functional(model: nnx.Module) -> tuple["FunctionalModel", dict[Any, Any]]:
    """Splits a model into a hashable function and a plain pytree of parameters.

    What a jitted program wants: the function is static, the parameters are an
    argument. Keep both; splitting walks the whole model.

    Args:
      model: called as `model(pool, tokens, batch, rows) -> (pool, logits)`.

    Returns:
      `(apply, params)` with `apply(params, pool, tokens, batch, rows)` the model's
      result. `params` is a nested dict of arrays: every `nnx.Variable` of the model,
      shared ones once. The arrays are the model's own, not copies: do not donate
      them while the model is in use.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> from pagedjax.nnx import functional
      >>> class Bigram(nnx.Module):  # a model that needs no cache
      ...     def __init__(self, rngs):
      ...         self.table = nnx.Embed(5, 5, rngs=rngs)
      ...
      ...     def __call__(self, pool, tokens, batch, rows=None):
      ...         return pool, self.table(tokens)
      >>> apply, params = functional(Bigram(nnx.Rngs(0)))
      >>> run = jax.jit(apply)
      >>> _, logits = run(params, None, jnp.array([1, 2]), None)
      >>> logits.shape
      (2, 5)
      >>> other, _ = functional(Bigram(nnx.Rngs(1)))
      >>> apply == other  # so a program compiled for one serves the other
      True
    """
    graphdef, state = nnx.split(model)
    return FunctionalModel(graphdef), nnx.to_pure_dict(state)


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionalModel:
    """A model without its parameters: hashable, so that it can be static in jit.

    Two are equal when their models have the same structure. Changes that a call
    makes to variables of the model, such as counters, are dropped.

    Attributes:
      graphdef: the structure of the model, as `nnx.split` gives it.
    """

    graphdef: nnx.GraphDef[Any]

    def __call__(
        self,
        params: dict[Any, Any],
        pool: KVPool,
        tokens: jax.Array,
        batch: RaggedBatch,
        rows: jax.Array | None = None,
    ) -> tuple[KVPool, jax.Array]:
        """Runs the model with these parameters."""
        return nnx.merge(self.graphdef, params)(pool, tokens, batch, rows)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, FunctionalModel) and self.graphdef == other.graphdef

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        # The hash of another process would not be that of an equal model here.
        return {"graphdef": self.graphdef}

    @functools.cached_property
    def _hash(self) -> int:
        # Every call of a jitted function hashes its static arguments, and walking
        # the graph of a deep model takes longer than a small step.
        return hash(self.graphdef)
