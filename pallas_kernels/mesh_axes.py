"""Kernels under `shard_map`: over which mesh axes operands and results vary."""

from typing import Any

import jax
from jax import lax


def vary_alike(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Under shard_map, make all operands vary over the axes that any varies over."""
    held = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    every = frozenset().union(*held)
    return tuple(
        lax.pcast(x, tuple(sorted(every - axes)), to="varying") if every - axes else x
        for x, axes in zip(arrays, held, strict=True)
    )


def result(shape: tuple[int, ...], dtype: Any, like: jax.Array) -> Any:
    """Describe a result that varies over the mesh axes that an operand varies over."""
    return jax.ShapeDtypeStruct(
        shape, dtype, manual_axis_type=jax.typeof(like).manual_axis_type
    )
