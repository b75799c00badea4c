"""Options of generation, checked one by one: every error names its argument."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax import _page_ops as ops


def as_number(name: str, value: Any) -> Any:
    """Takes one number, traced or not.

    Raises:
      TypeError: it is no number.
      ValueError: it is more than one.
    """
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.number):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if array.shape != ():
        raise ValueError(f"{name} must be one number, got shape {array.shape}")
    return value


def as_flag(name: str, value: Any) -> jax.Array:
    """Takes True or False, traced or not, as bool[].

    Raises:
      TypeError: it is anything else; a string would count as True.
    """
    is_array = isinstance(value, jax.Array | np.ndarray | np.bool_)
    if not isinstance(value, bool) and not (
        is_array and value.dtype == bool and value.shape == ()
    ):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return jnp.asarray(value)


def as_key(key: Any) -> jax.Array:
    """Takes a random key, typed or raw, as one of threefry; None is `key(0)`.

    Keys of other kinds draw differently under `vmap`: a token would depend on the
    batch that it is chosen in. A threefry key is drawn from them.

    Raises:
      TypeError: it is no single random key.
    """
    if key is None:
        return jax.random.key(0, impl="threefry2x32")
    wanted = "key must be one random key, such as jax.random.key(0)"
    if not isinstance(key, jax.Array | np.ndarray):
        raise TypeError(f"{wanted}, got {key!r}")
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.dtype != jnp.uint32 or key.ndim != 1:
            raise TypeError(f"{wanted}, got {key.dtype}{list(key.shape)}")
        key = jax.random.wrap_key_data(jnp.asarray(key))
    if key.shape != ():
        raise TypeError(f"{wanted}, got an array of {key.shape}")
    if "fry" in str(jax.random.key_impl(key)):
        return key
    words = jax.random.bits(key, (2,), jnp.uint32)
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def as_token_ids(name: str, values: Any) -> jax.Array:
    """Takes a sequence or an array of token ids as int32[E]; none as [-1].

    Not an array of no elements: jaxlib 0.11.2 on CPU crashes when it compiles one
    under `shard_map`, and no token is -1.

    Raises:
      TypeError: it is no sequence of whole numbers.
    """
    if not isinstance(values, jax.Array | np.ndarray):
        if isinstance(values, str) or not hasattr(values, "__iter__"):
            raise TypeError(f"{name} must be a sequence of token ids, got {values!r}")
        values = list(values) or [-1]
        if any(isinstance(value, jax.Array) for value in values):
            values = jnp.stack([jnp.asarray(value, jnp.int32) for value in values])
    elif values.shape == (0,):
        values = [-1]
    return ops.as_int32(name, values, (None,))


def differs(value: Any, default: Any) -> bool:
    """Tells whether an option was given something else than its default."""
    return isinstance(value, jax.core.Tracer) or bool(value != default)
