"""Drives the small kernels of the simulator's tests by ctypes."""

import ctypes
import functools

import numpy as np

from ascend_bridge.kernels import build

KERNELS = build.SIMULATOR / "tests"
ARCHES = (2201, 1001)
BYTES = 8192  # of each array


class Library:
    """The small kernels of one architecture.

    Attributes:
        names: of the kernels.
    """

    def __init__(self, arch: int) -> None:
        self._library = ctypes.CDLL(str(build.build_simulated(arch, sources=KERNELS)))
        self._library.sim_test_name.restype = ctypes.c_char_p
        self._library.pagedjax_sim_error.restype = ctypes.c_char_p
        self._library.pagedjax_sim_set_seed.argtypes = [ctypes.c_uint64]
        count = self._library.sim_test_count()
        self.names = [self._library.sim_test_name(i).decode() for i in range(count)]

    def run(
        self, name: str, data: np.ndarray | None = None, *, seed: int = 0
    ) -> tuple[np.ndarray, list[str]]:
        """Run a kernel on two cores; return the bytes of array c, and the errors."""
        arrays = [np.zeros(BYTES, np.uint8) for _ in range(3)]
        if data is not None:
            arrays[0][: data.nbytes] = data.view(np.uint8)
            arrays[1][:] = 0x40
        self._library.pagedjax_sim_set_seed(seed)
        self._library.pagedjax_sim_clear_errors()
        pointers = [ctypes.c_void_p(x.ctypes.data) for x in arrays]
        count = self._library.sim_test_run(self.names.index(name), 2, *pointers)
        errors = [self._library.pagedjax_sim_error(i).decode() for i in range(count)]
        assert not self._library.pagedjax_sim_error(count)
        return arrays[2], errors

    def throws_outside_a_launch(self) -> bool:
        """Return whether the API says so when no kernel is being run."""
        return bool(self._library.sim_test_outside())


@functools.cache
def library(arch: int) -> Library:
    return Library(arch)
