"""The faults of `mutate_pallas_mosaic.py`: each must make a test of a kernel fail."""

import mutate_pallas_mosaic
import pytest
from test_pallas_mosaic import interpreted


@pytest.mark.core
@pytest.mark.slow
@interpreted
def test_every_fault_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutate_pallas_mosaic.main([]) == 0, capsys.readouterr().out
