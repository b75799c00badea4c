"""Every fault of the Ascend C kernels is noticed; see mutate_ascend.py."""

import shutil
import subprocess
import sys
from pathlib import Path

import mutate_ascend
import pytest
from ascend_faults import ALLOWED

from ascend_bridge.kernels import build

PROGRAM = Path(mutate_ascend.__file__)


@pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="there is no C++ compiler",
)
@pytest.mark.parametrize("shard", ["0/2", "1/2"])
@pytest.mark.parametrize("arch", build.ARCHES)
def test_every_fault_is_noticed(arch: int, shard: str) -> None:
    """In a process apart: mutants are forked, and this one has threads."""
    run = subprocess.run(
        [sys.executable, str(PROGRAM), str(arch), "--shard", shard],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert ", 0 not as expected" in run.stdout


def test_barriers_flags_and_queue_calls_are_all_found(tmp_path: Path) -> None:
    """The list has each kind of call, 15 faults of parameters and more, and reasons."""
    mutants = mutate_ascend.instrument(tmp_path, 2201)
    names = [m.name for m in mutants if m.fault is None]
    kinds = ("settle", "PipeBarrier", "SetFlag", "WaitFlag", "order<", "AllocTensor")
    for kind in (*kinds, "EnQue", "DeQue", "FreeTensor"):
        assert any(kind in name for name in names), kind
    source = "\n".join(
        (build.HERE / name).read_text() for name in mutate_ascend.DEVICE_FILES
    )
    for kind in (".EnQue(", "FreeTensor(", "AllocTensor<", "DeQue<"):
        assert sum(kind in name for name in names) == source.count(kind)
    assert sum(m.fault is not None for m in mutants) >= 15
    everything = {
        m.name
        for arch in build.ARCHES
        for m in mutate_ascend.instrument(tmp_path, arch)
    }
    assert set(ALLOWED) <= everything
    assert all(len(reason) > 20 for _, reason in ALLOWED.values())
