"""Checks of a caller's bugs: reported under `checkify`, nothing to run otherwise.

A check that nobody functionalises lowers to nothing, but it stays in the traced
program: `jax.export` cannot serialise such a program, and jit calls it by way of
Python, 0.1 ms or more a call. So there is a way to trace without.
"""

import contextlib
from typing import Any

import jax
from jax.experimental import checkify

_ON = jax.make_user_context(default_value=True)


def without_checks() -> contextlib.AbstractContextManager[None]:
    """Traces without the checks that `jax.experimental.checkify` would report.

    What is called inside is traced anew, without them. Such programs can be
    serialised by `jax.export`, and jit calls them without Python in between. Results
    are the same; a caller's bug is then found by `check_integrity` alone.

    Returns:
      A context manager. Compiled programs belong to it: a function called inside and
      outside is compiled twice.

    Example:
      >>> import jax, jax.numpy as jnp, pagedjax as pj
      >>> table = pj.init_page_table(
      ...     num_pages=4, page_size=2, max_slots=1, pages_per_slot=2
      ... )
      >>> step = lambda table, counts: pj.append(table, counts)
      >>> bool(jax.make_jaxpr(step)(table, jnp.array([1])).effects)
      True
      >>> with pj.without_checks():
      ...     bool(jax.make_jaxpr(step)(table, jnp.array([1])).effects)
      False
    """
    return _ON(False)


def are_on() -> bool:
    """Tells whether checks are to be traced: what they alone need can be left out."""
    return bool(_ON.value)


def check(ok: jax.Array, message: str, **values: Any) -> None:
    """Reports under `checkify` that `ok` is False, the values put into the message."""
    if are_on():
        checkify.debug_check(ok, message, **values)
