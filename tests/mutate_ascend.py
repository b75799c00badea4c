"""Breaks the Ascend C kernels, one fault at a time, and expects it to be noticed.

    python tests/mutate_ascend.py 2201                 all faults of an architecture
    python tests/mutate_ascend.py 1001 --shard 0/2     half of them
    python tests/mutate_ascend.py 2201 --only rescale  those with the word in their name

Every call of a barrier, flag or queue in the kernels is left out, one at a time; then
come faults of the parameters. All are compiled at once into a copy of the kernels that
asks, at each place, whether this one is to be broken:

    settle();        ->  if (!pj_mutant(17)) settle();
    2 * soft_cap_    ->  (pj_mutant(90) ? (soft_cap_) : (2 * soft_cap_))

A fault is noticed if the simulator reports an error, the plan refuses, a result is
wrong by the oracle, or the run crashes or hangs. Exit status 1 if one that is not in
ALLOWED goes unnoticed, if one in ALLOWED is noticed, or if a text is no longer there.
"""

import argparse
import ctypes
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import ascend_kernel_cases as cases
import ascend_kernels
from ascend_faults import ALLOWED, FAULTS, Fault

from ascend_bridge.kernels import build

DEVICE_FILES = (
    "common.h",
    "lanes.h",
    "paged_attention.h",
    "combine.h",
    "reshape_and_cache.h",
    "block_copy.h",
)
# Schedules: in order, and pipes that lag as far as they may.
SEEDS = (0, 1, 2)
_PATIENCE = 60  # seconds for a mutant; it takes less than one
_SYNC = re.compile(
    r"settle\(\)|order<[^>]*>\(\)|SetFlag<|WaitFlag<|PipeBarrier<|\.EnQue\(|"
    r"(?:DeQue|AllocTensor)<|FreeTensor\("
)
_STATEMENT = re.compile(
    r"^(?P<indent>\s*(?:if \(.*\) )?)(?P<type>AscendC::LocalTensor<\w+> )?"
    r"(?P<left>\w+ = )?(?P<call>[\w.:]+(?: \w+)?(?:<[\w:]*>)?\(.*\);)$"
)


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault with its number in the instrumented copy."""

    number: int
    name: str
    fault: Fault | None = None


def main() -> int:
    """Run the faults of a shard; 1 if one is not noticed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arch", type=int, choices=build.ARCHES)
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th fault from i")
    parser.add_argument("--only", default="", help="a word of the fault's name")
    options = parser.parse_args()
    index, count = (int(x) for x in options.shard.split("/"))
    with tempfile.TemporaryDirectory() as folder:
        mutants = instrument(Path(folder), options.arch)
        library = compile_copy(Path(folder), options.arch)
        mine = [m for m in mutants if options.only in m.name][index::count]
        if noticed := run(library, options.arch, -1):
            print(f"the kernels fail without a fault: {noticed}")
            return 1
        wrong = 0
        for mutant in mine:
            number, path = mutant.number, library
            if mutant.fault is not None and mutant.fault.recompile:
                number, path = -1, compile_changed(mutant.fault, options.arch)
            if path is None:
                noticed = "does not compile"
            else:
                noticed = run(path, options.arch, number)
            arches, reason = ALLOWED.get(mutant.name, ((), ""))
            allowed = options.arch in arches
            wrong += bool(noticed) == allowed
            verdict = noticed or (f"allowed: {reason}" if allowed else "NOT NOTICED")
            if noticed and allowed:
                verdict = f"NOTICED, BUT IN ALLOWED: {noticed}"
            print(f"{mutant.name}\n    {verdict}", flush=True)
    print(f"arch {options.arch}: {len(mine)} faults, {wrong} not as expected")
    return int(wrong > 0)


def instrument(folder: Path, arch: int) -> list[Mutant]:
    """Copy the kernels into a folder with a question at each place of a fault."""
    for file in (*build.HERE.glob("*.h"), *build.HERE.glob("*.cpp")):
        shutil.copy(file, folder)
    (folder / "mutant.h").write_text(
        'extern "C" int pagedjax_mutant;\n'
        "inline bool pj_mutant(int number) { return pagedjax_mutant == number; }\n"
    )
    (folder / "mutant.cpp").write_text(
        'extern "C" __attribute__((visibility("default"))) int pagedjax_mutant;\n'
        "int pagedjax_mutant = -1;\n"
    )
    mutants: list[Mutant] = []
    for name in DEVICE_FILES:
        lines = (folder / name).read_text().split("\n")
        seen: dict[str, int] = {}
        compiled = True  # for this architecture
        for i, line in enumerate(lines):
            if line.startswith("#if PAGEDJAX_ASCEND_ARCH == 2201"):
                compiled = arch == 2201
            elif line == "#else":
                compiled = arch == 1001
            elif line == "#endif":
                compiled = True
            if not _SYNC.search(line) or not line.endswith(";"):
                continue
            match = _STATEMENT.match(line)
            if match is None:
                raise SystemExit(f"{name}:{i + 1}: no statement: {line}")
            text = line.strip()
            seen[text] = seen.get(text, 0) + 1
            if not compiled:
                continue
            key = f"{name}: {text}" + (f" #{seen[text]}" if seen[text] > 1 else "")
            parts = match.groupdict(default="")
            declared = f"{parts['type']}{parts['left'][:-3]}; " if parts["type"] else ""
            lines[i] = (
                f"{parts['indent']}{declared}if (!pj_mutant({len(mutants)})) "
                f"{parts['left']}{parts['call']}"
            )
            mutants.append(Mutant(len(mutants), key))
        (folder / name).write_text("\n".join(lines))
    for fault in FAULTS:
        number = len(mutants)
        text = (folder / fault.file).read_text()
        if (times := text.count(fault.right)) != 1:
            raise SystemExit(f"{fault.file} has {times} times: {fault.right}")
        if fault.right.endswith(";"):
            new = (
                f"if (pj_mutant({number})) {{ {fault.wrong} }} else {{ {fault.right} }}"
            )
        else:
            new = f"(pj_mutant({number}) ? ({fault.wrong}) : ({fault.right}))"
        if not fault.recompile:
            (folder / fault.file).write_text(text.replace(fault.right, new))
        mutants.append(Mutant(number, f"{fault.file}: {fault.name}", fault))
    for name in ("common.h", "plan.h"):
        text = (folder / name).read_text()
        once = "#pragma once\n"
        text = text.replace(once, once + '#include "mutant.h"\n', 1)
        (folder / name).write_text(text)
    return mutants


def compile_copy(folder: Path, arch: int) -> Path:
    """Compile the instrumented copy; what the compiler says goes to the caller."""
    try:
        return build.build_simulated(arch, sources=folder)
    except subprocess.CalledProcessError as error:
        raise SystemExit(error.stderr) from error


def compile_changed(fault: Fault, arch: int) -> Path | None:
    """Compile a copy with the fault in its text; None if it does not compile."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in (*build.HERE.glob("*.h"), *build.HERE.glob("*.cpp")):
            shutil.copy(file, folder)
        changed = folder / fault.file
        changed.write_text(changed.read_text().replace(fault.right, fault.wrong))
        try:
            return build.build_simulated(arch, sources=folder)
        except subprocess.CalledProcessError:
            return None


def run(path: Path, arch: int, number: int) -> str:
    """Run the small cases with one fault; return what was noticed, or ""."""
    for case in cases.SMALL:  # made once, here, and not in each child
        if isinstance(case, cases.Attention):
            cases.expect_attention(case)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(_PATIENCE)
        os.close(reader)
        noticed = _notice(path, arch, number)
        os.write(writer, noticed.encode()[:4000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        noticed = pipe.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"ended by signal {os.WTERMSIG(status)}"
    return noticed


def _notice(path: Path, arch: int, number: int) -> str:
    library = ascend_kernels.Library(path, arch)
    if number >= 0:
        ctypes.c_int.in_dll(library.c, "pagedjax_mutant").value = number
    for case in cases.SMALL:
        for seed in SEEDS:
            library.seed = seed
            try:
                case.check(library)
            except ascend_kernels.KernelError as error:
                return error.errors[0]
            except ascend_kernels.Refused as error:
                return f"refused: {error}"
            except AssertionError as error:
                return f"wrong result: {error}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
