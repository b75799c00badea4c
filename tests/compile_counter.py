"""Counting what XLA compiles."""

import contextlib

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def count_compiled():
    """Gives a list that gets one entry for each program compiled inside."""
    compiled = []

    def listen(event, duration, **_):
        if event == _EVENT:
            compiled.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
