"""Soft caps of the Ascend C kernels, on the simulator: exact, however large."""

import shutil

import ascend_kernel_cases as cases
import ascend_kernels
import numpy as np
import pytest
from ascend_kernel_cases import Attention
from ascend_kernels import Library

from ascend_bridge.kernels import build

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="there is no C++ compiler",
)
FLOAT16 = np.dtype(np.float16)


@pytest.fixture(params=build.ARCHES)
def library(request: pytest.FixtureRequest) -> Library:
    """The kernels of each architecture, in the order of the program."""
    made = ascend_kernels.load(request.param)
    made.seed, made.cores = 0, 4
    return made


@pytest.mark.parametrize("tile", [0, 1, 7])
@pytest.mark.parametrize(
    "cap", [1e-45, 1e-37, 1e-3, 0.3, 1.0, 7.0, 1e3, 1e6, 1e8, 1e30, 3.4e38]
)
def test_soft_caps_of_any_size(library: Library, cap: float, tile: int) -> None:
    """A cap that is far above the scores changes nothing, one far below all."""
    Attention((33, 5), (10, 2), dim=16, scale=2.0, soft_cap=cap, tile=tile).check(
        library
    )


def test_infinite_scores_under_a_soft_cap_are_the_cap(library: Library) -> None:
    case = Attention((17,), (2, 1), pages=2)
    q, k, v, table, lens = cases.make_attention(case)
    q, k = np.abs(q) + FLOAT16.type(0.1), k.copy()
    k[table[0, 0], 0], k[table[0, 0], 1] = np.inf, -np.inf
    _, lse = library.attend(q, k, v, table, lens, soft_cap=50.0)
    np.testing.assert_allclose(lse, 50.0, rtol=1e-6)
