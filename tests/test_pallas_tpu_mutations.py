"""The faults of `mutate_pallas_tpu.py`: each must make a test of a TPU kernel fail."""

import mutate_pallas_tpu
import pytest


@pytest.mark.slow
def test_every_fault_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutate_pallas_tpu.main([]) == 0, capsys.readouterr().out
