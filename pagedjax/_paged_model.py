"""What generation needs to know of a model."""

import dataclasses
from collections.abc import Callable

import jax

from pagedjax import _page_ops as ops
from pagedjax._kv_pool import KVPool, init_kv_pool


@dataclasses.dataclass(frozen=True)
class PagedModel:
    """What generation needs to know of a model. Hashable: a static argument.

    Attributes:
      apply: `(params, pool, tokens[T], batch, rows) -> (pool, logits[R, V])`, where
        `rows` is int32[R], the tokens whose logits are wanted, or None for all.
        Equal models must compare equal, or each call compiles anew; `functional`
        in `pagedjax.nnx` and `pagedjax.linen` makes one.
        Where `jax.shard_map` splits the model over a mesh axis, its logits are equal
        along that axis (`psum`), and the other attributes are those of one shard.
      num_layers: layers with a KV cache.
      num_kv_heads: key-value heads of each.
      head_dim: their width.
      vocab_size: logits per token.
      max_seq_len: the longest sequence the model can take; None = no limit.
      kv_dtype: name of the dtype of the cache.
    """

    apply: Callable[..., tuple[KVPool, jax.Array]]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_seq_len: int | None = None
    kv_dtype: str = "float32"

    def __post_init__(self) -> None:
        ops.set_sizes(self, "num_layers", "num_kv_heads", "head_dim", "vocab_size")
        if self.max_seq_len is not None:
            ops.set_sizes(self, "max_seq_len")


def init_model_pool(model: PagedModel, *, num_pages: int, page_size: int) -> KVPool:
    """Makes the pool that a model's cache needs."""
    return init_kv_pool(
        num_layers=model.num_layers,
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=model.kv_dtype,
    )
