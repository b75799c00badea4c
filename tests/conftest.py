"""A strict session: four host devices, no silent rank promotion, no warnings.

The environment is set before jax is imported: the number of host devices is
read once, when the CPU client starts.
"""

import gc
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_FLAG = "--xla_force_host_platform_device_count"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=4".strip()

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile(
    "deterministic",
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("deterministic")


_MAPS = Path("/proc/self/maps")
_TESTS = itertools.count(1)


@pytest.fixture(autouse=True)
def few_programs() -> Iterator[None]:
    """Forget compiled programs before the process has too many of them.

    Each takes several mappings of memory. Linux gives a process 65,530, and XLA
    crashes in its compiler when there are none left.
    """
    yield
    if next(_TESTS) % 10 == 0 and _MAPS.exists():
        if _MAPS.read_bytes().count(b"\n") > 25_000:
            jax.clear_caches()
            gc.collect()


@pytest.fixture
def key() -> jax.Array:
    """One fixed random key."""
    return jax.random.key(0)
