"""Saying that a pool belongs to one device, before XLA would fail in its partitioner.

A pool is a side effect of one program on one device: XLA cannot cut such a call, and
says so in words about its own insides. Whether a program is cut is known when it is
lowered, so the check is an operation that is nothing else.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import mlir


def on_one_device(
    handle: jax.Array, version: jax.Array, arrays: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    """Return handle and version as they are, in a program for one device only.

    Args:
        handle: int32[].
        version: int32[].
        arrays: the other operands of the call.

    Raises:
        ValueError: an operand lies on several devices; for a program that is being
            traced, when it is compiled.
    """
    for array in (handle, version, *arrays):
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
            _require_one(len(array.sharding.device_set))
    return handle, _checked.bind(jnp.asarray(version, jnp.int32))


def _require_one(devices: int) -> None:
    if devices > 1:
        raise ValueError(
            f"a pool is used from one device, but this call is for {devices}: bring "
            "its operands to one device (jax.device_put)"
        )


def _lower(context: Any, version: Any) -> list[Any]:
    axes = context.module_context.axis_context
    mesh = getattr(axes, "mesh", None)  # inside shard_map
    _require_one(mesh.size if mesh is not None else getattr(axes, "num_devices", 1))
    return [version]


_checked = core.Primitive("on_one_device")
_checked.def_impl(lambda version: version)
_checked.def_abstract_eval(lambda version: version)
mlir.register_lowering(_checked, _lower)
