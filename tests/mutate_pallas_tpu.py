"""Breaks the TPU kernels, one fault at a time, and expects the tests to notice.

    python tests/mutate_pallas_tpu.py            all faults; about 10 s each
    python tests/mutate_pallas_tpu.py rescale    those with the word in their name

Each fault is made in a copy of `pallas_kernels` that is imported instead of the real
one. First the tests must pass without a fault; how long that takes decides how long a
fault may take, for some faults make a kernel wait for a copy that never comes. Exit
status 1 if a fault goes unnoticed or its line is no longer there.
"""

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: what is wrong.
        file: in `pallas_kernels`.
        right: the text that is there.
        wrong: what takes its place.
        tests: the tests that should notice, as `pytest -k` takes them.
        unseen: why none can; then it is a fault if one does.
    """

    name: str
    file: str
    right: str
    wrong: str
    tests: str
    unseen: str = ""


_DECODE = "test_no_race_in_the_simulator and decode"
_RAGGED = "test_no_race_in_the_simulator and ragged"
FAULTS = [
    Fault(
        "no wait for the pages",
        "tpu_blocks.py",
        "        stream.wait(item, block, buffer)\n",
        "",
        _DECODE,
    ),
    Fault(
        "the other buffer is computed",
        "tpu_blocks.py",
        "        compute(block, buffer)\n",
        "        compute(block, 1 - buffer)\n",
        _DECODE,
    ),
    Fault(
        "the next block arrives in the buffer in use",
        "tpu_blocks.py",
        "stream.start(item, block + 1, 1 - buffer)",
        "stream.start(item, block + 1, buffer)",
        _DECODE,
    ),
    Fault(
        "the next item starts in the buffer in use",
        "tpu_blocks.py",
        "stream.start(next_item, next_first, 1 - buffer)",
        "stream.start(next_item, next_first, buffer)",
        _DECODE,
    ),
    Fault(
        "an item forgets which buffer is its first",
        "tpu_blocks.py",
        "turn[0] = (start_turn + end - first) & 1",
        "turn[0] = 0",
        _DECODE,
    ),
    Fault(
        "no rescale of the sum of values",
        "tpu_blocks.py",
        "summed[...] = rescale * summed[...] +",
        "summed[...] = summed[...] +",
        _DECODE,
    ),
    Fault(
        "no rescale of the sum of weights",
        "tpu_blocks.py",
        "total[...] = rescale * total[...] +",
        "total[...] = total[...] +",
        _DECODE,
    ),
    Fault(
        "a partly filled last page is left out",
        "tpu_blocks.py",
        "_ceil_div(self.highs[item], geometry.page_size),",
        "lax.div(self.highs[item], geometry.page_size),",
        _DECODE,
    ),
    Fault(
        "one token too many in the last page",
        "tpu_blocks.py",
        "high = jnp.minimum(self.highs[item] - start,",
        "high = jnp.minimum(self.highs[item] - start + 1,",
        _DECODE,
    ),
    Fault(
        "values that nobody sees are multiplied",
        "tpu_decode.py",
        "jnp.where(live_rows, values, jnp.zeros_like(values))",
        "values",
        _DECODE,
    ),
    Fault(
        "the window is one too wide",
        "tpu_ragged.py",
        "live &= column > position - geometry.window",
        "live &= column >= position - geometry.window",
        _RAGGED,
    ),
    Fault(
        "a query sees the next token",
        "tpu_ragged.py",
        "live = (column <= position)",
        "live = (column <= position + 1)",
        _RAGGED,
    ),
    Fault(
        "no wait for the queries",
        "tpu_ragged.py",
        "        q_copies(item, step, lambda copy: copy.wait())\n",
        "",
        _RAGGED,
    ),
    Fault(
        "results are overwritten while they leave",
        "tpu_ragged.py",
        "        out_copies(place - geometry.cores, lambda copy: copy.wait())\n",
        "        pass\n",
        _RAGGED,
    ),
    Fault(
        "no wait for written rows",
        "tpu_pages.py",
        "    each_row(lambda copy: copy.wait())\n",
        "",
        "test_write_puts",
    ),
    Fault(
        "no wait for copied pages",
        "tpu_pages.py",
        "        each_pair(lambda copy: copy.wait())\n",
        "",
        "test_copies_in",
    ),
]


def main(words: list[str]) -> int:
    """Runs the faults whose name has the first word; all without one."""
    return run(FAULTS, ["test_pallas_tpu.py", "test_pallas_tpu_pages.py"], words)


def run(faults: list[Fault], files: list[str], words: list[str]) -> int:
    """Tries faults in the tests of some files; 1 if not all go as they should."""
    faults = [fault for fault in faults if not words or words[0] in fault.name]
    patience = {}
    for tests in sorted({fault.tests for fault in faults}):
        began = time.monotonic()
        if _test(ROOT, files, tests, None) != 0:
            print(f"without a fault the tests do not pass: {tests}")
            return 1
        patience[tests] = 20 + 2 * (time.monotonic() - began)
    wrong = 0
    for fault in faults:
        verdict = _try(fault, files, patience[fault.tests])
        expected = ("UNNOTICED",) if fault.unseen else ("noticed", "hung")
        wrong += verdict not in expected
        why = f" ({fault.unseen})" if fault.unseen else ""
        print(f"{verdict:>10}: {fault.name}{why}", flush=True)
    print(f"{wrong} faults went otherwise than they should" if wrong else "all as said")
    return 1 if wrong else 0


def _try(fault: Fault, files: list[str], patience: float) -> str:
    """Returns "noticed" if the tests fail with the fault, "hung" if they never end."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "pallas_kernels"
        shutil.copytree(ROOT / "pallas_kernels", copy)
        text = (copy / fault.file).read_text()
        if text.count(fault.right) != 1:
            return "outdated"
        (copy / fault.file).write_text(text.replace(fault.right, fault.wrong))
        try:
            status = _test(Path(folder), files, fault.tests, patience)
        except subprocess.TimeoutExpired:
            return "hung"
    # 1: tests failed. Anything else is not a verdict on the fault.
    return {0: "UNNOTICED", 1: "noticed"}.get(status, f"status {status}")


def _test(folder: Path, files: list[str], tests: str, patience: float | None) -> int:
    """Runs tests with the `pallas_kernels` of a folder; gives the exit status."""
    paths = [ROOT / "tests" / file for file in files]
    command = [
        *(sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"),
        *("-c", ROOT / "pyproject.toml", "--rootdir", ROOT, "-k", tests, *paths),
    ]
    return subprocess.run(
        command,
        cwd=folder,  # first on the path, before the real package
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=patience,
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
