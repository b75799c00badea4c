"""What the benchmarks share: interleaved timing, the roofline, one output format.

Machines are shared and noisy, so nothing is compared across runs: what is compared
takes turns in one process, and medians are quoted.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

THREADS = 2


@dataclasses.dataclass(frozen=True)
class Case:
    """One measured number.

    Attributes:
      case: what was measured.
      value: the number.
      unit: its unit.
      baseline: what it is compared with; None if nothing.
      ratio: how the two compare, as `settings` or the baseline's text says.
      settings: sizes, dtypes and whatever is needed to run it again.
    """

    case: str
    value: float
    unit: str
    baseline: str | None = None
    ratio: float | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def interleave(
    runs: Mapping[str, Callable[[], Any]],
    *,
    repeats: int = 7,
    warmup: int = 1,
    before: Callable[[], Any] | None = None,
) -> dict[str, list[float]]:
    """Times several functions in turn: a, b, a, b, ...

    Args:
      runs: name -> function; each must block until its work is done.
      repeats: counted rounds.
      warmup: rounds before, not counted (compilation).
      before: called before each of them, not counted. A read of other memory lets none
        pay, or gain, for what the one before it left in the caches.

    Returns:
      name -> seconds, one entry per round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(warmup + repeats):
        for name, run in runs.items():
            if before is not None:
                before()
            start = time.perf_counter()
            run()
            if round_ >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def median_ratio(over: list[float], under: list[float]) -> float:
    """Computes the median of the ratios, round by round."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def make_roofline(num_bytes: int = 512 * 2**20) -> Callable[[], float]:
    """Makes a function that reads a large array with all threads.

    Returns:
      A function giving the bytes per second it reached.
    """
    array = np.ones(num_bytes // 4, np.float32)
    parts = np.array_split(array, THREADS)
    pool = ThreadPoolExecutor(THREADS)

    def read() -> float:
        start = time.perf_counter()
        list(pool.map(np.max, parts))  # numpy releases the interpreter lock
        return array.nbytes / (time.perf_counter() - start)

    read()
    return read


def run_cli(main: Callable[[], Iterable[Case]]) -> None:
    """Runs a benchmark as a script: a line per case, JSON with `--json`."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object per case")
    as_json = parser.parse_args().json
    for case in main():
        if as_json:
            print(json.dumps(dataclasses.asdict(case)), flush=True)
        else:
            print(format_case(case), flush=True)


def format_case(case: Case) -> str:
    """Formats a case as one line for a person."""
    ratio = format_ratio(case)
    return f"{case.case}: {case.value:.4g} {case.unit}" + (ratio and f"  ({ratio})")


def format_ratio(case: Case) -> str:
    """Formats the ratio and what it is of; empty without one."""
    if case.ratio is None:
        return ""
    return f"{case.ratio:.3g}x {case.baseline or ''}".strip()
