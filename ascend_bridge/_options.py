"""Checks of what a caller brings, the same for the processor and for an NPU."""

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_FLOAT32_MIN = float(np.finfo(np.float32).tiny)
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1


def checked_scale(scale: Any, head_dim: int) -> float:
    """Return the factor of the scores; 1/sqrt(head_dim) for None."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    scale = _static_float("scale", scale)
    if not abs(scale) <= _FLOAT32_MAX:
        raise ValueError(f"scale must be finite, got {scale} (for a float32)")
    return scale


def checked_window(window: Any) -> int:
    """Return how many keys a token sees at most; 0 for None, which means all."""
    if window is None:
        return 0
    if isinstance(window, jax.core.Tracer):
        raise TypeError("window must be a Python int, got a traced value")
    if isinstance(window, bool) or not hasattr(window, "__index__"):
        raise TypeError(f"window must be an int or None, got {window!r}")
    window = operator.index(window)
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}; None means none")
    return min(window, _INT32_MAX)


def checked_soft_cap(soft_cap: Any) -> float:
    """Return the cap of the scores; 0 for None, which means no cap."""
    if soft_cap is None:
        return 0.0
    soft_cap = _static_float("soft_cap", soft_cap)
    if not _FLOAT32_MIN <= soft_cap <= _FLOAT32_MAX:
        raise ValueError(
            f"soft_cap must be positive and finite, got {soft_cap} (for a float32); "
            "None means none"
        )
    return soft_cap


def checked_int(name: str, value: Any, least: int = 1) -> int:
    """Return a size or a number as a Python int of `least` to the most of int32."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an int of at least {least}, got {value!r}")
    number = operator.index(value)
    if number < least:
        raise ValueError(f"{name} must be an int of at least {least}, got {number}")
    if number > _INT32_MAX:
        raise ValueError(f"{name} must be at most {_INT32_MAX}, got {number}")
    return number


def int32(name: str, values: Any) -> jax.Array:
    """Return integers as int32; what does not fit becomes the nearest that does.

    So an id that is too large for an int32 stays one that names no page.

    Raises:
        TypeError: they are no integers.
    """
    # Before jax sees them: without 64 bits it would cut large integers to 32.
    array = values if isinstance(values, jax.Array) else np.asarray(values)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} must hold integers, got {array.dtype}")
    held = jnp.iinfo(array.dtype)
    if held.max > _INT32_MAX:
        array = array.clip(max(int(held.min), _INT32_MIN), _INT32_MAX)
    return jnp.asarray(array.astype(np.int32))


def _static_float(name: str, value: Any) -> float:
    """Return a Python float; a traced value is a TypeError that names the option."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{name} must be a Python number, got a traced value")
    try:
        if isinstance(value, bool | str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, got {value!r}") from None
