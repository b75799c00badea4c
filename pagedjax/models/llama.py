"""The Llama family in Flax NNX, on a paged cache.

    tokens[T] -> embedding -> x[T, E]
       +-- lax.scan over the layer index; the carry is (pool, x) ------------------+
       |  RMSNorm -> q, k, v -> RoPE -> attend: write k, v to pages, read pages -> + |
       |  RMSNorm -> gate, up -> SwiGLU -> down --------------------------------> +  |
       +-----------------------------------------------------------------------------+
    x[rows] -> RMSNorm -> head -> logits[R, V]

Every matrix is stored as [out, in], the layout of the checkpoints, and multiplied
without a transpose. On CPU this is also the fastest one: equal to [in, out] at one
token, 8 to 18 percent faster at 8 to 32.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from pagedjax import _page_ops as ops
from pagedjax._kv_pool import KVPool
from pagedjax._paged_model import PagedModel
from pagedjax._ragged import RaggedBatch, attend
from pagedjax.models._tensor_parallel import shard_params
from pagedjax.models.config import LlamaConfig, rope_frequencies
from pagedjax.nnx import FunctionalModel, functional

__all__ = ["Llama", "weight_shapes"]

WeightReader = Callable[[str], np.ndarray]

_FEW_ROWS = 8  # measured: from 12 rows on there is nothing left to gain


class Llama(nnx.Module):
    """Compute next-token logits; keys and values live in the pool that is passed in.

    The parameters, with E the hidden size, F the SwiGLU width, V the vocabulary and
    A = (H + 2K) * D:

        embed [V, E], head [V, E] or None when tied, norm [E]
        attn_norm, ffn_norm [L, E], qkv_bias [L, A] or None
        qkv [A, E], out [E, H*D], gate_up [2F, E], down [E, F], once per layer

    The last four are either one array with a leading axis L (`stacked`), or L arrays.
    XLA:CPU copies the slice of a stacked matrix before it multiplies, which makes a
    decode step 2.2 times slower; L arrays, chosen inside the scan by a
    `lax.switch` that holds nothing but the product, are read in place. Elsewhere the
    usual stacked form is kept: there a branch costs more than a slice.

    Attributes:
        config: the `LlamaConfig`.
        tensor_axis: the mesh axis over which heads and FFN columns are split, in a
            model that `sharded` made; else None.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from pagedjax import init_kv_pool, init_page_table, append, pack_ragged
        >>> from pagedjax.models import Llama, LlamaConfig
        >>> config = LlamaConfig(2, 4, 2, 8, 32, 64, 100, 128)
        >>> model = Llama(config, rngs=nnx.Rngs(0))
        >>> table = init_page_table(
        ...     num_pages=4, page_size=4, max_slots=1, pages_per_slot=4
        ... )
        >>> pool = init_kv_pool(
        ...     num_layers=2, num_pages=4, page_size=4, num_kv_heads=2, head_dim=8,
        ...     dtype=jnp.float32,
        ... )
        >>> table, _, ok = append(table, jnp.array([3]))
        >>> batch = pack_ragged(table, jnp.array([3]), num_tokens=3)
        >>> pool, logits = model(pool, jnp.array([5, 6, 7]), batch)
        >>> logits.shape
        (3, 100)
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        rngs: nnx.Rngs | None = None,
        weights: WeightReader | None = None,
        dtype: jax.typing.DTypeLike = jnp.float32,
        stacked: bool | None = None,
    ):
        """Build the parameters, at random or from a checkpoint.

        Args:
            config: the sizes.
            rngs: draws random weights; give either this or `weights`.
            weights: returns the array of a name of `weight_shapes`; called once per
                name, so that a checkpoint is never held twice.
            dtype: of the parameters and the activations. Norms, softmax and logits
                are float32 always.
            stacked: see the class; None means everywhere but on CPU.

        Raises:
            ValueError: neither or both of `rngs` and `weights` are given.
        """
        if (rngs is None) == (weights is None):
            raise ValueError("give exactly one of rngs and weights")
        if weights is None:
            assert rngs is not None
            weights = _random_weights(config, rngs)
        if stacked is None:
            stacked = jax.default_backend() != "cpu"
        self.config = config
        self.tensor_axis: str | None = None

        def one(*names: str) -> nnx.Param:
            return nnx.Param(jnp.asarray(_fuse(weights, names, dtype)))

        def layer(i: int, names: tuple[str, ...]) -> list[str]:
            return [f"{i}.{name}" for name in names]

        def stack(*names: str) -> nnx.Param:
            # Filled in place: a list of layers would hold every matrix twice.
            first = _fuse(weights, layer(0, names), dtype)
            rows = np.empty((config.num_layers, *first.shape), first.dtype)
            rows[0] = first
            for i in range(1, config.num_layers):
                rows[i] = _fuse(weights, layer(i, names), dtype)
            return nnx.Param(jnp.asarray(rows))

        def per_layer(*names: str) -> nnx.Param | nnx.List:
            if stacked:
                return stack(*names)
            return nnx.List(one(*layer(i, names)) for i in range(config.num_layers))

        self.embed = one("embed")
        self.head = None if config.tied_embeddings else one("head")
        self.norm = one("norm")
        self.attn_norm = stack("attn_norm")
        self.ffn_norm = stack("ffn_norm")
        self.qkv_bias = stack("q_bias", "k_bias", "v_bias") if config.qkv_bias else None
        self.qkv = per_layer("q", "k", "v")
        self.out = per_layer("out")
        self.gate_up = per_layer("gate", "up")
        self.down = per_layer("down")

    def __call__(
        self,
        pool: KVPool,
        tokens: jax.Array,
        batch: RaggedBatch,
        rows: jax.Array | None = None,
        *,
        implementation: str | None = None,
    ) -> tuple[KVPool, jax.Array]:
        """Write the tokens' keys and values into the pool and return their logits.

        Args:
            pool: the paged cache of all layers.
            tokens: int[T], packed as `batch` says; padding may hold any id.
            batch: where each token belongs (`pack_ragged` or `pack_decode`).
            rows: int[R], indices into the T tokens whose logits are wanted; None for
                all. A prefill asks for the last token of each slot only, because the
                head is a tenth to a half of the work.
            implementation: of the attention, see `paged_attention`.

        Returns:
            The pool, and float32[R or T, V]. Rows of padding are meaningless.
        """
        config, axis = self.config, self.tensor_axis
        qkv, out, gate_up, down = (
            _arrays(w) for w in (self.qkv, self.out, self.gate_up, self.down)
        )
        num_shards = 1 if axis is None else lax.axis_size(axis)
        num_q, num_k = (
            heads // num_shards for heads in (config.num_heads, config.num_kv_heads)
        )
        cos, sin = _rope_tables(config, batch.positions)
        x = self.embed[...].at[tokens].get(mode="clip")
        # Under `shard_map` the carry of the scan has to vary from the start over what
        # it meets; `x` is summed over the shards and so equal on all of them.
        x = ops.vary_together(x, batch)
        pool = ops.vary_together(pool, x, qkv)

        def summed(y: jax.Array) -> jax.Array:
            return y if axis is None else lax.psum(y, axis)

        def layer(carry: tuple, xs: tuple) -> tuple[tuple, None]:
            pool, x = carry
            index, attn_norm, ffn_norm, qkv_bias = xs
            y = _product(_rms_norm(x, attn_norm, config.rms_eps), qkv, index)
            if qkv_bias is not None:
                y = y + qkv_bias[None, :]
            y = y.reshape(y.shape[0], -1, config.head_dim)
            qk = _rotate(y[:, : num_q + num_k], cos, sin)
            q, k, v = qk[:, :num_q], qk[:, num_q:], y[:, num_q + num_k :]
            pool, y = attend(
                *(pool, index, q, k, v, batch),
                window=config.window,
                implementation=implementation,
            )
            x = x + summed(_product(y.reshape(y.shape[0], -1), out, index))
            y = _product(_rms_norm(x, ffn_norm, config.rms_eps), gate_up, index)
            gate, up = jnp.split(y, 2, axis=1)
            y = _product(jax.nn.silu(gate) * up, down, index)
            return (pool, x + summed(y)), None

        layers = (
            jnp.arange(config.num_layers),
            self.attn_norm[...],
            self.ffn_norm[...],
            None if self.qkv_bias is None else self.qkv_bias[...],
        )
        (pool, x), _ = lax.scan(layer, (pool, x), layers)
        if rows is not None:
            x = x.at[rows].get(mode="clip")
        x = _rms_norm(x, self.norm[...], config.rms_eps)
        head = self.embed if self.head is None else self.head
        multiply = _matmul_few if isinstance(qkv, list) and _are_few(x) else _matmul
        return pool, multiply(x, head[...], jnp.float32)

    def paged(self) -> tuple[PagedModel, Any]:
        """Give the model as `generate` takes it.

        Returns:
            `(model, params)`: a hashable description, equal for equal configs, and
            the parameters. The cache has the dtype of the weights.

        Example:
            >>> import jax.numpy as jnp
            >>> from flax import nnx
            >>> from pagedjax import generate
            >>> from pagedjax.models import Llama, LlamaConfig
            >>> config = LlamaConfig(2, 4, 2, 8, 32, 64, 100, 128)
            >>> model, params = Llama(config, rngs=nnx.Rngs(0)).paged()
            >>> out = generate(model, params, jnp.array([[5, 6, 7]]), max_new_tokens=2)
            >>> out.tokens.shape
            (1, 1, 2)
        """
        apply, params = functional(self)
        return self._described(apply, self.config.num_kv_heads), params

    def sharded(
        self, mesh: Mesh, *, tensor_axis: str = "tensor"
    ) -> tuple[PagedModel, Any, Any]:
        """Split heads and FFN columns over a mesh axis, for use under `shard_map`.

        Each device holds the rows of q, k, v, gate and up for its own heads and
        columns, the matching columns of out and down, and the pages of its own kv
        heads. Two sums over the axis per layer make the activations equal on all.
        Embedding and head are whole on every device.

        Args:
            mesh: the devices. Its other axes, such as one for data, see the same
                parameters.
            tensor_axis: the name of the axis.

        Returns:
            `(model, params, specs)`: what `paged` gives, but for one device, so that
            the pool has `num_kv_heads / n` heads on it; the parameters, placed on the
            mesh; and the tree of their `PartitionSpec`s.

        Raises:
            ValueError: the mesh has no such axis, or its size does not divide the kv
                heads and the FFN columns.

        Example:
            >>> import jax, jax.numpy as jnp, numpy as np
            >>> from flax import nnx
            >>> from jax.sharding import Mesh
            >>> from pagedjax.models import Llama, LlamaConfig
            >>> config = LlamaConfig(2, 4, 2, 8, 32, 64, 100, 128)
            >>> mesh = Mesh(np.array(jax.devices()[:1]), ("tensor",))
            >>> llama = Llama(config, rngs=nnx.Rngs(0))
            >>> model, params, specs = llama.sharded(mesh)
            >>> tuple(specs["out"][0])
            (None, 'tensor')
        """
        if tensor_axis not in mesh.shape:
            raise ValueError(
                f"tensor_axis {tensor_axis!r} is not an axis of the mesh, which has "
                f"{', '.join(map(repr, mesh.axis_names))}"
            )
        num_shards = mesh.shape[tensor_axis]
        for name in ("num_kv_heads", "ffn_size"):
            if getattr(self.config, name) % num_shards:
                raise ValueError(
                    f"{name} must be a multiple of the size of {tensor_axis!r}, got "
                    f"{getattr(self.config, name)} and {num_shards}"
                )
        local = nnx.merge(*nnx.split(self))  # holds the same arrays
        local.tensor_axis = tensor_axis
        apply, params = functional(local)
        params, specs = shard_params(params, self.config, mesh, tensor_axis)
        model = self._described(apply, self.config.num_kv_heads // num_shards)
        return model, params, specs

    def _described(self, apply: FunctionalModel, num_kv_heads: int) -> PagedModel:
        config = self.config
        return PagedModel(
            apply,
            num_layers=config.num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            max_seq_len=config.max_seq_len,
            kv_dtype=self.embed.dtype.name,
        )


def weight_shapes(config: LlamaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """List the tensors of a checkpoint, by the names `Llama` asks for.

    Args:
        config: the sizes.

    Returns:
        An iterator of (name, shape), "0.q" being the query matrix of layer 0. Lazy:
        a damaged config may claim a billion layers.

    Example:
        >>> from pagedjax.models import CONFIGS, weight_shapes
        >>> list(weight_shapes(CONFIGS["smollm2-135m"]))[1:4]
        [('norm', (576,)), ('0.attn_norm', (576,)), ('0.q', (576, 576))]
    """
    width, ffn = config.hidden_size, config.ffn_size
    q_width = config.num_heads * config.head_dim
    k_width = config.num_kv_heads * config.head_dim
    yield "embed", (config.vocab_size, width)
    yield "norm", (width,)
    if not config.tied_embeddings:
        yield "head", (config.vocab_size, width)
    for i in range(config.num_layers):
        yield f"{i}.attn_norm", (width,)
        yield f"{i}.q", (q_width, width)
        yield f"{i}.k", (k_width, width)
        yield f"{i}.v", (k_width, width)
        if config.qkv_bias:
            yield f"{i}.q_bias", (q_width,)
            yield f"{i}.k_bias", (k_width,)
            yield f"{i}.v_bias", (k_width,)
        yield f"{i}.out", (width, q_width)
        yield f"{i}.ffn_norm", (width,)
        yield f"{i}.gate", (ffn, width)
        yield f"{i}.up", (ffn, width)
        yield f"{i}.down", (width, ffn)


def _product(
    x: jax.Array, weights: jax.Array | list[jax.Array], index: jax.Array
) -> jax.Array:
    """Multiply x[T, in] by the transpose of the matrix [out, in] of one layer."""
    if not isinstance(weights, list):
        return _matmul(x, weights[index], x.dtype)
    multiply = _matmul_few if _are_few(x) else _matmul
    products = [partial(multiply, weight=w, out_dtype=x.dtype) for w in weights]
    return lax.switch(index, products, x)


def _matmul(
    x: jax.Array, weight: jax.Array, out_dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Multiply x[T, in] by the transpose of weight[out, in].

    A dot that contracts both last axes: `x @ weight.T` makes XLA:CPU copy the
    transposed matrix in every step. HIGHEST keeps float32 products float32 on
    platforms that would round the inputs; it means nothing for narrower dtypes.
    """
    return lax.dot_general(
        *(x, weight, (((1,), (1,)), ((), ()))),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=out_dtype,
    )


def _matmul_few(
    x: jax.Array, weight: jax.Array, out_dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Do the same for a few rows on a CPU: the matrix is the left operand.

    XLA:CPU repacks the right operand of a product before it multiplies. With a
    matrix there this takes longer than the product of 2 to 8 rows. The barrier keeps
    XLA from turning the operands around again.
    """
    return lax.optimization_barrier(_matmul(weight, x, out_dtype)).T


def _are_few(x: jax.Array) -> bool:
    return 1 < x.shape[0] <= _FEW_ROWS


def _rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Scale each row of x[T, E] to mean square 1, in float32."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * weight[None, :]


def _rope_tables(
    config: LlamaConfig, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return cosine and sine of every rotary angle, float32[T, 1, D/2]."""
    frequencies = jnp.asarray(rope_frequencies(config))
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None, :]
    return jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the pairs (x[..., i], x[..., i + D/2]) of x[T, heads, D]."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return rotated.astype(x.dtype)


def _arrays(weight: nnx.Param | nnx.List) -> jax.Array | list[jax.Array]:
    """Return the array or the per-layer arrays of a matrix parameter."""
    if isinstance(weight, nnx.List):
        return [w[...] for w in weight]
    return weight[...]


def _fuse(
    weights: WeightReader, names: Sequence[str], dtype: jax.typing.DTypeLike
) -> np.ndarray:
    """Read tensors and join them along the first axis, always into fresh memory.

    A view of a mapped file would keep the file open for as long as the model lives.
    """
    return np.concatenate([np.asarray(weights(name), dtype) for name in names])


def _random_weights(config: LlamaConfig, rngs: nnx.Rngs) -> WeightReader:
    """Return a reader of random weights: norms near 1, matrices of unit gain."""
    shapes = dict(weight_shapes(config))

    def read(name: str) -> np.ndarray:
        shape = shapes[name]
        noise = np.asarray(jax.random.normal(rngs.params(), shape))
        if name.endswith("norm"):
            return 1 + 0.1 * noise
        return noise / np.sqrt(shape[-1])

    return read
