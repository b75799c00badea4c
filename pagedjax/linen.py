"""Flax Linen on the paged cache: an attention layer, and models as pure functions.

The cache is never a collection of variables. Pool and batch are plain pytrees, passed
to each call; the new pool is returned::

    dense   y = attention.apply(variables, x, mask=causal)
    paged   pool, y = attention.apply(variables, pool, x, batch)
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
from flax.core import unfreeze

from pagedjax import _heads
from pagedjax import _page_ops as ops
from pagedjax._kv_pool import KVPool
from pagedjax._ragged import RaggedBatch


class PagedAttention(nn.MultiHeadDotProductAttention):
    """Causal self-attention whose keys and values live in a paged pool.

    Has the attributes of `nn.MultiHeadDotProductAttention` and the same parameter
    tree, so an existing checkpoint applies unchanged. One call serves prefill, chunks
    of it, and decode: the batch says which.

    A submodule without a name is called after its class. To keep the paths of a
    checkpoint whose attention had no name, name the paged one after the dense one:
    `PagedAttention(..., name="MultiHeadDotProductAttention_0")`.

    Attributes:
      num_kv_heads: key-value heads, K, a divisor of `num_heads`; default all of
        them, as in the dense layer.
      layer: index of this layer in the pool, or None to give it in each call.
      rotate: `rotate(heads[T, H or K, D], positions[T])`, applied to queries and
        keys, or None for no rotary embedding.
      scale: factor of the scores; default 1/sqrt(D).
      window: how many tokens a token sees, itself included; default all.
      soft_cap: scores become `soft_cap * tanh(score / soft_cap)`.
      implementation: as in `paged_attention`.

    Example:
      >>> import flax.linen as nn
      >>> import jax, jax.numpy as jnp, pagedjax as pj
      >>> from pagedjax.linen import PagedAttention
      >>> dense = nn.MultiHeadDotProductAttention(num_heads=2)
      >>> x = jax.random.normal(jax.random.key(0), (1, 6, 16))
      >>> variables = dense.init(jax.random.key(1), x)
      >>> table = pj.init_page_table(
      ...     num_pages=8, page_size=4, max_slots=1, pages_per_slot=4
      ... )
      >>> pool = pj.init_kv_pool(
      ...     num_layers=1, num_pages=8, page_size=4, num_kv_heads=2, head_dim=8
      ... )
      >>> table, _, _ = pj.append(table, jnp.array([6]))
      >>> batch = pj.pack_ragged(table, jnp.array([6]), num_tokens=6)
      >>> paged = PagedAttention(num_heads=2, layer=0)
      >>> pool, y = paged.apply(variables, pool, x, batch)
      >>> want = dense.apply(variables, x, mask=nn.make_causal_mask(x[..., 0]))
      >>> bool(jnp.allclose(y, want, atol=1e-5))
      True
    """

    num_kv_heads: int | None = None
    layer: int | None = None
    rotate: _heads.Rotate | None = None
    scale: float | None = None
    window: int | None = None
    soft_cap: float | None = None
    implementation: str | None = None

    @nn.compact
    def __call__(  # type: ignore[override]  # the cache comes first and goes back
        self,
        pool: KVPool,
        x: jax.Array,
        batch: RaggedBatch,
        *,
        layer: int | jax.Array | None = None,
        deterministic: bool | None = None,
    ) -> tuple[KVPool, jax.Array]:
        """Stores the keys and values of some tokens and lets each token attend.

        Args:
          pool: the pool; donate it.
          x: [T, E], packed as the batch is; or [S, L, E], row s holding the tokens
            of slot s first and padding after (L = 1 for a decode batch).
          batch: which tokens these are (`pack_ragged`, `pack_decode`).
          layer: index in the pool instead of the layer's own; may be traced, as in
            a scan over layers.
          deterministic: overrides the attribute. Must come out True if there is a
            dropout rate.

        Returns:
          `(pool, y)`; y has the form of `x`, [T, F] or [S, L, F]. Padding is finite
          and means nothing.

        Raises:
          ValueError: the layer is missing or not in the pool, the heads are not
            those of the pool, `x` does not go with the batch, or an attribute asks
            for what a paged layer does not do.
          TypeError: the layer is not an integer.
        """
        self._check(deterministic)
        tokens = _heads.pack(x, batch)
        qkv_features = self.qkv_features or tokens.shape[-1]
        num_kv_heads = self.num_heads
        if self.num_kv_heads is not None:
            num_kv_heads = ops.as_size("num_kv_heads", self.num_kv_heads)
        if qkv_features % self.num_heads or self.num_heads % num_kv_heads:
            raise ValueError(
                f"qkv_features={qkv_features} must be a multiple of num_heads="
                f"{self.num_heads}, and that of num_kv_heads={num_kv_heads}"
            )
        head_dim = qkv_features // self.num_heads
        common: dict[str, Any] = dict(
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
        )
        project = functools.partial(
            nn.DenseGeneral,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
            dot_general=self.qkv_dot_general,
            dot_general_cls=self.qkv_dot_general_cls,
            **common,
        )
        q = project(features=(self.num_heads, head_dim), name="query")(tokens)
        k = project(features=(num_kv_heads, head_dim), name="key")(tokens)
        v = project(features=(num_kv_heads, head_dim), name="value")(tokens)
        if self.normalize_qk:
            normalize = functools.partial(
                nn.LayerNorm,
                use_bias=False,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
            )
            q = normalize(name="query_ln")(q)
            k = normalize(name="key_ln")(k)
        pool, attended = _heads.attend_heads(
            pool,
            self.layer if layer is None else layer,
            q,
            k,
            v,
            batch,
            rotate=self.rotate,
            scale=self.scale,
            window=self.window,
            soft_cap=self.soft_cap,
            implementation=self.implementation,
        )
        y = nn.DenseGeneral(
            self.out_features or tokens.shape[-1],
            axis=(-2, -1),
            kernel_init=self.out_kernel_init or self.kernel_init,
            bias_init=self.out_bias_init or self.bias_init,
            dot_general=self.out_dot_general,
            dot_general_cls=self.out_dot_general_cls,
            name="out",
            **common,
        )(attended)
        return pool, _heads.unpack(y, batch, like=x)

    def _check(self, deterministic: bool | None) -> None:
        """Raises where an attribute asks for what a paged layer does not do."""
        if deterministic is None:
            deterministic = self.deterministic
        if self.dropout_rate > 0 and not deterministic:
            raise ValueError(
                f"dropout_rate={self.dropout_rate} with deterministic="
                f"{deterministic}, and a paged layer has no dropout: pass "
                "deterministic=True"
            )
        if self.attention_fn is not nn.dot_product_attention:
            raise ValueError(
                f"attention_fn={self.attention_fn} would not be called by a paged "
                "layer: give what it does as rotate=, window= or soft_cap="
            )
        for name in ("qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} would not be called by a paged layer")


def functional(
    module: nn.Module, variables: Any
) -> tuple["FunctionalModel", dict[str, Any]]:
    """Splits a model into a hashable function and a plain pytree of parameters.

    What a jitted program wants: the function is static, the parameters are an
    argument.

    Args:
      module: called as `module(pool, tokens, batch, rows) -> (pool, logits)`.
      variables: its variables, `{"params": ...}` and other collections it reads.

    Returns:
      `(apply, params)` with `apply(params, pool, tokens, batch, rows)` the module's
      result. `params` is `variables`, as a nested dict of the same arrays.

    Example:
      >>> import flax.linen as nn
      >>> import jax, jax.numpy as jnp
      >>> from pagedjax.linen import functional
      >>> class Bigram(nn.Module):  # a model that needs no cache
      ...     @nn.compact
      ...     def __call__(self, pool, tokens, batch, rows=None):
      ...         return pool, nn.Embed(5, 5)(tokens)
      >>> tokens = jnp.array([1, 2])
      >>> variables = Bigram().init(jax.random.key(0), None, tokens, None)
      >>> apply, params = functional(Bigram(), variables)
      >>> _, logits = jax.jit(apply)(params, None, tokens, None)
      >>> logits.shape
      (2, 5)
      >>> apply == functional(Bigram(), variables)[0]
      True
    """
    return FunctionalModel(module), unfreeze(variables)


@dataclasses.dataclass(frozen=True)
class FunctionalModel:
    """A module without its parameters: hashable, so that it can be static in jit.

    Two are equal when their modules are. Changes that a call makes to variables,
    such as counters, are not kept.

    Attributes:
      module: the module.
    """

    module: nn.Module

    def __call__(
        self,
        params: dict[str, Any],
        pool: KVPool,
        tokens: jax.Array,
        batch: RaggedBatch,
        rows: jax.Array | None = None,
    ) -> tuple[KVPool, jax.Array]:
        """Runs the module with these parameters."""
        result: tuple[KVPool, jax.Array]
        result = self.module.apply(params, pool, tokens, batch, rows)  # type: ignore
        return result
