"""The device executor on a mock device: making it, watching and disturbing it."""

import contextlib
import ctypes
import os
import shutil
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np
import pytest

from ascend_bridge import _device_library, ascend
from ascend_bridge.kernels.build import build_simulated
from ascend_bridge.mock_acl.build import build_mock

SOCS = {2201: "Ascend910B3", 1001: "Ascend910A"}
FAULTS = ("copy", "launch", "kernel", "timeout", "lost")
needs_mock = pytest.mark.skipif(
    shutil.which("g++") is None or _device_library.load()[0] is None,
    reason="the mock device needs g++ and the compiled library",
)


class Mock:
    """The mock runtime's own functions."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        for name in ("device_bytes", "pinned_bytes", "copied"):
            self.library[f"mock_acl_{name}"].restype = ctypes.c_int64
        self.library.mock_acl_kernel_error.restype = ctypes.c_char_p

    def fail(self, kind: str, nth: int = 1) -> None:
        """Lets the n-th next call of a kind fail."""
        assert self.library.mock_acl_fail(kind.encode(), nth), kind

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """Keeps every wait for the device from ending."""
        self.library.mock_acl_hold(1)
        try:
            yield
        finally:
            self.library.mock_acl_hold(0)

    def restore(self) -> None:
        self.library.mock_acl_restore()

    def reset_counts(self) -> None:
        self.library.mock_acl_reset_counts()

    def __getattr__(self, name: str) -> Callable[..., int]:
        """Gives a counter: device_bytes(), launches(), copied(1), ..."""
        return self.library[f"mock_acl_{name}"]

    def held(self) -> tuple[int, int, int, int]:
        """What is open or allocated now; all 0 when nothing leaks."""
        return (
            self.device_bytes(),
            self.pinned_bytes(),
            self.contexts(),
            self.streams(),
        )

    def kernel_error(self) -> str:
        return self.library.mock_acl_kernel_error().decode()


@contextlib.contextmanager
def mock_device(arch: int = 2201, **environment: str) -> Iterator[Mock]:
    """Puts a simulated NPU into this process, and takes it away again."""
    wanted = {
        "PAGEDJAX_ACL_LIBRARY": str(build_mock()),
        "PAGEDJAX_ASCEND_KERNELS": str(build_simulated(arch)),
        "PAGEDJAX_MOCK_SOC": SOCS[arch],
        **environment,
    }
    before = {name: os.environ.get(name) for name in wanted}
    library = _device_library.require()
    # What is in `os.environ` is seen by getenv: Python writes through.
    os.environ.update(wanted)
    mock = Mock(wanted["PAGEDJAX_ACL_LIBRARY"])
    mock.restore()
    try:
        able, text = ascend.usable()
        assert able, text
        yield mock
        assert mock.kernel_error() == ""
    finally:
        mock.restore()
        library.pagedjax_pool_shutdown()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        held = mock.held()
    assert held == (0, 0, 0, 0), held


SIZES = dict(
    num_layers=2,
    num_pages=6,
    page_size=16,
    num_kv_heads=2,
    head_dim=16,
    num_heads=4,
    max_slots=3,
    pages_per_slot=4,
)


def open_small(**sizes) -> ascend.DevicePool:
    """Opens a pool of `SIZES`; "npu" unless told otherwise."""
    return ascend.open_pool(**{"executor": "npu", **SIZES, **sizes})


def tokens_for(pool: ascend.DevicePool, count: int, seed: int = 0):
    """Draws (k, v) for some tokens."""
    rng = np.random.default_rng(seed)
    shape = (count, pool.shape.num_kv_heads, pool.shape.head_dim)
    return tuple(
        jnp.asarray(rng.standard_normal(shape), pool.shape.dtype) for _ in range(2)
    )


def queries_for(pool: ascend.DevicePool, slots: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    shape = (slots, pool.shape.num_heads, pool.shape.head_dim)
    return jnp.asarray(rng.standard_normal(shape), pool.shape.dtype)
