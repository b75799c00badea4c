"""The parameters of a `Llama`, split over one axis of a mesh.

A fused matrix holds whole parts one after the other. Cut in even pieces it would not
give each device its own heads, so its rows are dealt out first::

    rows      q0 q1 q2 q3 | k0 k1 | v0 v1        for 2 devices
    dealt     q0 q1 k0 v0 | q2 q3 k1 v1

After that every parameter is cut along one axis, or not at all. The split is that of
section 3 of https://arxiv.org/abs/1909.08053.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pagedjax.models.config import LlamaConfig

# The axis that is cut, from the end: the layers of a stacked parameter come first.
_CUT_AXES = {"qkv": -2, "gate_up": -2, "qkv_bias": -1, "out": -1, "down": -1}


def shard_params(
    params: dict[Any, Any], config: LlamaConfig, mesh: Mesh, tensor_axis: str
) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Deal the rows of the fused matrices out and place every array on the mesh.

    One array after the other, so that no more than one is held twice.

    Args:
        params: what `functional` gives for a `Llama`.
        config: its sizes; kv heads and FFN columns divide by the size of the axis.
        mesh: the devices.
        tensor_axis: the name of the axis.

    Returns:
        `(params, specs)`, trees of one form: arrays and `PartitionSpec`s.

    Example:
        See `Llama.sharded`.

        >>> from pagedjax.models._tensor_parallel import shard_params
        >>> shard_params.__name__
        'shard_params'
    """
    num_shards = mesh.shape[tensor_axis]
    q_rows, k_rows = (
        heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads)
    )
    parts = {
        "qkv": (q_rows, k_rows, k_rows),
        "qkv_bias": (q_rows, k_rows, k_rows),
        "gate_up": (config.ffn_size, config.ffn_size),
    }

    def spec_of(name: str, array: jax.Array) -> PartitionSpec:
        if name not in _CUT_AXES:
            return PartitionSpec()
        axes: list[str | None] = [None] * array.ndim
        axes[_CUT_AXES[name]] = tensor_axis
        return PartitionSpec(*axes)

    def place(name: str, array: jax.Array) -> jax.Array:
        if name in parts:
            array = _deal(array, parts[name], num_shards, _CUT_AXES[name])
        return jax.device_put(array, NamedSharding(mesh, spec_of(name, array)))

    return _map_named(place, params), _map_named(spec_of, params)


def _map_named(
    function: Callable[[str, jax.Array], Any], params: dict[Any, Any]
) -> dict[Any, Any]:
    """Call `function(name, array)` for each array under a parameter's name."""
    return {
        name: jax.tree.map(lambda array, name=name: function(name, array), held)
        for name, held in params.items()
    }


def _deal(
    array: jax.Array, parts: Sequence[int], num_shards: int, axis: int
) -> jax.Array:
    """Reorder an axis of several parts so that each piece has its share of all."""
    axis %= array.ndim
    ends = [sum(parts[:i]) for i in range(1, len(parts))]
    shape = array.shape
    shares = [
        part.reshape(*shape[:axis], num_shards, -1, *shape[axis + 1 :])
        for part in jnp.split(array, ends, axis=axis)
    ]
    return jnp.concatenate(shares, axis=axis + 1).reshape(shape)
