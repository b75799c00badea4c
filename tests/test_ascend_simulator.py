"""The checks of the simulator of the Ascend C API.

The small kernels are in `ascend_bridge/simulator/tests`. A line there that must be
reported says so in a comment, `// ! rule`; all other lines must not be reported, so
each check has kernels that trip it and kernels near by that do not.
"""

import concurrent.futures
import functools
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from ascend_simulator import ARCHES, KERNELS, library

from ascend_bridge.kernels import build

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="there is no C++ compiler"
)
both = pytest.mark.parametrize("arch", ARCHES)


@functools.cache
def expected(arch: int) -> dict[str, set[tuple[str, str]]]:
    """Return, for each kernel, the (place, rule) of the lines that must be reported."""
    found: dict[str, set[tuple[str, str]]] = {}
    for path in sorted(KERNELS.glob("*.cpp")):
        kernel = ""
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if match := re.match(r"KERNEL\((\w+)\)", line):
                kernel = match[1]
                assert kernel not in found
                found[kernel] = set()
            for only, rule in re.findall(r"// ! (\d{4} )?([a-z0-9-]+)", line):
                if not only or int(only) == arch:
                    found[kernel].add((f"{path.name}:{number}", rule))
    return found


def reported(errors: list[str]) -> set[tuple[str, str]]:
    matches = [re.fullmatch(r"(\S+:\d+): .+ \[([a-z0-9-]+)\]", x) for x in errors]
    return {(x[1], x[2]) for x in matches if x is not None}


@both
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_every_check(arch: int, seed: int) -> None:
    """What is reported is what the sources mark, at their lines, in every schedule."""
    wrong = {}
    for name in set(library(arch).names) - {"exception_in_a_kernel"}:
        _, errors = library(arch).run(name, seed=seed)
        assert len(reported(errors)) == len(errors), errors
        if reported(errors) != expected(arch)[name]:
            wrong[name] = (errors, expected(arch)[name])
    assert not wrong


def test_each_rule_has_a_kernel_on_each_side() -> None:
    """A rule without a kernel that trips it is not tested."""
    text = "".join(x.read_text() for x in (build.SIMULATOR / "src").glob("*.cpp"))
    text += "".join(x.read_text() for x in (build.SIMULATOR / "include").glob("*.h"))
    rules = set(re.findall(r'"([a-z-]+)",\s', text)) & RULES
    tripped = {
        rule for x in ARCHES for marks in expected(x).values() for _, rule in marks
    }
    assert rules == RULES == tripped
    clean = [name for name, marks in expected(2201).items() if not marks]
    assert len(clean) > 60


RULES = set(
    "gm-bounds gm-align ub-capacity ub-align ub-bounds uninitialised copy-length"
    " block-count copy-position queue-buffers queue-protocol queue-depth use-after-free"
    " leak event-id event-unpaired race-ub race-gm race-cores repeat mask overlap"
    " product".split()
)


@both
def test_an_exception_is_an_error_of_the_launch(arch: int) -> None:
    _, errors = library(arch).run("exception_in_a_kernel")
    assert errors == ["kernel:0: launch: out of luck [exception]"]
    assert library(arch).throws_outside_a_launch()


@both
def test_launches_from_several_threads(arch: int) -> None:
    """They take turns: each sees its own memory, and none sees another's errors."""

    def copy(value: int) -> bool:
        data = np.full(256, value, np.float32)
        result, _ = library(arch).run("copy_through", data)
        return bool((result.view(np.float32)[:256] == value).all())

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(copy, range(60)))


@both
def test_no_schedule_changes_an_ordered_kernel(arch: int) -> None:
    data = np.arange(1024, dtype=np.float32)
    for seed in range(200):
        for name, count in (("copy_through", 256), ("copy_through_a_bound_queue", 320)):
            result, errors = library(arch).run(name, data, seed=seed)
            assert not errors
            np.testing.assert_array_equal(result.view(np.float32)[:count], data[:count])


@both
def test_messages_say_the_numbers(arch: int) -> None:
    def message(kernel: str) -> str:
        (only,) = library(arch).run(kernel)[1]
        return only

    assert "bytes 8164 to 8196 of a, which has 8192" in message("gm_past_the_end")
    assert "no global memory" in message("gm_before_the_start")
    capacity = {2201: 184 * 1024, 1001: 248 * 1024}[arch]
    assert f"arch {arch} has {capacity}" in message("ub_too_small")
    assert "80 bytes, not a multiple of 32" in message("copy_part_of_a_block")
    assert "4096 blocks, of at most 4095" in message("copy_too_many_blocks")
    assert "2 tensors in a queue of depth 1" in message("queue_too_deep")
    ids = {2201: 7, 1001: 3}[arch]
    assert f"ids 0 to {ids}" in library(arch).run("event_past_all")[1][0]
    file, line = next(iter(expected(arch)["vector_reads_unfinished"]))[0].split(":")
    told = message("vector_reads_unfinished")
    assert f"V writes at {file}:{int(line) - 1}, with no PipeBarrier" in told
    assert "MTE2 writes at checks_order.cpp:" in message("vector_before_copy")
    assert "MTE2 writes UB address" in message("copy_over_what_is_read")
    assert "core 1 reads byte 224 of c, which core 0 writes" in message(
        "core_reads_what_another_writes"
    )


@both
def test_a_missing_wait_gives_wrong_numbers_in_some_schedule(arch: int) -> None:
    data = np.arange(1024, dtype=np.float32)
    results = [
        library(arch).run("late_copy", data, seed=seed)[0].view(np.float32)[:64]
        for seed in range(30)
    ]
    right = [bool((x == data[:64]).all()) for x in results]
    assert right[0] and not all(right)


@pytest.mark.parametrize("arch", [2201, pytest.param(1001, marks=pytest.mark.slow)])
def test_clean_under_sanitizers(arch: int, tmp_path: Path) -> None:
    """Kernels that break every rule make the simulator itself break none."""
    flags = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    library = build.build_simulated(arch, sources=KERNELS, flags=flags)
    program = tmp_path / "run"
    main = 'extern "C" int sim_test_main(); int main() { return sim_test_main(); }'
    command = ["g++", *flags, "-x", "c++", "-", "-x", "none", str(library)]
    command += [f"-Wl,-rpath,{library.parent}", "-o", str(program)]
    subprocess.run(command, input=main, text=True, check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.search(r"ran \d{3} kernels\n$", done.stdout)
    assert not done.stderr
