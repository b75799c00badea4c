"""The report about a device: on the mock, on one with faults, and on none."""

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest
from ascend_device import mock_device, needs_mock

from ascend_bridge import _device_library, check_device

SMALL = tuple(
    dataclasses.replace(case, lens=tuple(min(n, 300) for n in case.lens))
    for case in check_device.CASES
)


@needs_mock
def test_the_mock_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    """Every case of the report, long ones cut short."""
    with mock_device():
        status = check_device.main(SMALL)
    report = capsys.readouterr().out
    assert status == 0, report
    assert report.count(" ... right") == len(SMALL)
    assert "device: Ascend910B3 with" in report and "kernels: for arch 2201" in report
    assert f"0 of {len(SMALL)} cases are wrong" in report


@needs_mock
def test_an_error_of_the_device_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """And the cases after it are run: each has a pool of its own."""
    with mock_device() as mock:
        mock.fail("kernel")
        assert check_device.main(SMALL[:2]) == 1
    report = capsys.readouterr().out
    assert "one token ... WRONG" in report and "around a page ... right" in report
    assert "failed with 507015: an exception in the kernel" in report
    assert "1 of 2 cases are wrong" in report


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_compared(bad: float) -> None:
    right, wrong = np.array([1.0, bad]), np.array([1.0, 1.0])
    assert check_device._compare("out", right, right, 0.1) == []
    assert "in 1 other places" in check_device._compare("out", wrong, right, 0.1)[0]


@needs_mock
@pytest.mark.parametrize("name", ["out", "lse", "k", "v"])
def test_wrong_numbers_are_noticed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Of the device, at one time or at both."""
    run = check_device.run
    calls = 0

    def spoil(case, executor):
        nonlocal calls
        results = run(case, "host")
        if executor == "npu":
            calls += 1
            if calls >= first:
                results[name] = results[name].copy()
                results[name].flat[0] += 1
        return results

    monkeypatch.setattr(check_device, "run", spoil)
    first = 1
    assert any(name in line for line in check_device.check(SMALL[0]))
    first = 4
    assert check_device.check(SMALL[0]) == [
        f"{name}: another result at the second time"
    ]
    first = np.inf
    assert check_device.check(SMALL[0]) == []


def test_nan_and_infinity_must_be_in_their_places() -> None:
    here, there = np.array([np.nan, 1.0, -np.inf]), np.array([1.0, np.nan, 0.0])
    problems = check_device._compare("lse", here, there, 1.0)
    assert problems == [
        "lse: NaN in 2 other places than on the host",
        "lse: -inf in 1 other places than on the host",
    ]


@pytest.mark.skipif(
    _device_library.load()[0] is None, reason="the compiled library is not there"
)
def test_without_a_device_one_line_and_status_77() -> None:
    environment = {**os.environ, "PAGEDJAX_ACL_LIBRARY": "/no/such/library.so"}
    run = subprocess.run(
        [sys.executable, "-m", "ascend_bridge.check_device"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 77 and run.stdout == ""
    assert run.stderr.startswith("NOT DONE: no NPU to check: ")
    assert len(run.stderr.splitlines()) == 1
