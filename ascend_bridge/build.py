"""Compile the host executor: `python -m ascend_bridge.build` for a source checkout.

An installation from source does the same through `hatch_build.py`. Needs GCC 9 or
clang 10 and the FFI headers that come with jaxlib; without them there is no library,
and the reason is recorded beside the place where it would be. A library whose sources
have not changed since stays, whatever becomes of a build; one of other sources that
cannot be built anew is removed.

Exit codes:

    0    the library is that of the sources; also if there is nothing to build with
    1    a person has to mend something: the compiler fails, `$CXX` is no command, or
         the folder cannot be written
    77   there is no library and nothing to build with

An installation never fails for want of the library.

The kernels are compiled once for each instruction set, and the library picks one when
it is loaded: what is built on one machine runs on every machine of the architecture.

    kernels.cc --(SSE2)----> kernels_base.o   -+
               --(AVX2)----> kernels_avx2.o   -+--> _host.so
               --(AVX-512)-> kernels_avx512.o -+
               --(AMX)-----> kernels_amx.o    -+
    plan.cc, ffi.cc, ... --> *.o              -+
    device_executor/*.cc --> *.o              -+

This module imports nothing outside the standard library: the build of a wheel loads it
where the package and jax cannot be imported.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

__all__ = [
    "BuildError",
    "BuildRecord",
    "NothingToBuildWithError",
    "build_host",
    "include_dir",
    "main",
]

HERE = pathlib.Path(__file__).resolve().parent
SOURCES = HERE / "host_executor"
DEVICE = HERE / "device_executor"
KERNELS = HERE / "kernels"
LIBRARY = "_host.so"
RECORD = "_host.json"
COMMON_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-Wall",
    "-Wextra",
    # Scalars at compile time, floating point as IEEE has it, but for what the kernels
    # do not use: errno and traps.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
)
CORE_SOURCES = ("dispatch.cc", "pages.cc", "parallel.cc", "plan.cc", "prefixes.cc")
# The device executor is part of the library: it finds the NPU's runtime with dlopen,
# and shares the kernels of the host where there is none.
DEVICE_SOURCES = tuple(
    f"../device_executor/{name}.cc"
    for name in (
        "acl",
        "control",
        "handlers",
        "host_store",
        "kernel_library",
        "npu_handlers",
        "npu_store",
        "pool",
    )
)
_AVX512 = (
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
    "-mfma",
    "-mprefer-vector-width=512",
)
_AMX = ("-mamx-tile", "-mamx-bf16")
# Per architecture: name, lanes, flags of each instruction set.
INSTRUCTION_SETS: dict[str, tuple[tuple[str, int, tuple[str, ...]], ...]] = {
    "x86_64": (
        ("base", 4, ()),
        ("avx2", 8, ("-mavx2", "-mfma", "-mf16c")),
        ("avx512", 16, _AVX512),
        ("amx", 16, (*_AVX512, *_AMX, "-DPJ_AMX")),
    ),
    "aarch64": (("neon", 4, ()),),
    "other": (("base", 4, ()),),
}
_ARCHITECTURES = {"x86_64": "x86_64", "amd64": "x86_64", "AMD64": "x86_64"} | {
    "aarch64": "aarch64",
    "arm64": "aarch64",
}


class BuildError(RuntimeError):
    """The host executor cannot be built here; the message says why."""


class NothingToBuildWithError(BuildError):
    """There is no compiler, or there are no headers: nobody's mistake."""


@dataclasses.dataclass(frozen=True)
class BuildRecord:
    """What a build did.

    Attributes:
        built: whether there is a library.
        reason: why not, or which compiler and headers.
        made_from: a hash of the sources and of the library made from them.
        made_by: a hash of what the compiler and the headers say they are; a build that
            finds this and `made_from` as they were does nothing.
        failed: whether a person has to mend something; a machine without a compiler
            or headers is all right.
    """

    built: bool
    reason: str
    made_from: str = ""
    made_by: str = ""
    failed: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Build, say what came of it, and return the exit code of the top of this file.

    Args:
        argv: the arguments after the program's name; default those of the process.

    Returns:
        The exit code.

    Raises:
        SystemExit: after `--help` or an argument that there is not.
    """
    about, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m ascend_bridge.build",
        description=about.splitlines()[0],
        epilog=rest[rest.index("Exit codes:") : rest.index("The kernels")]
        + "CXX: command of the C++ compiler.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args(argv)
    made = build_host()
    stream = sys.stderr if made.failed else sys.stdout
    print(f"{'built' if made.built else 'not built'}: {made.reason}", file=stream)
    if made.failed:
        return 1
    return 0 if made.built else 77


def build_host(
    target: str | os.PathLike[str] = HERE,
    *,
    compiler: str | None = None,
    headers: str | os.PathLike[str] | None = None,
) -> BuildRecord:
    """Compile the library into a folder, or record there why it cannot be.

    Args:
        target: folder of `_host.so` and of the record `_host.json`.
        compiler: command of the C++ compiler; None means `$CXX`, or the first of g++,
            clang++ and c++ that there is.
        headers: folder of `xla/ffi/api`; None means those of the installed jaxlib.

    Returns:
        What was done; also where the library stands already, made from the same
        sources by the same compiler, and where it could not be made anew but is that
        of the sources. Never raises for a missing compiler or header, nor for a
        folder that cannot be written.

    Example:
        >>> import tempfile
        >>> from ascend_bridge.build import build_host
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     record = build_host(folder, compiler="/no/such/compiler")
        >>> record.built, record.reason
        (False, 'no C++ compiler: /no/such/compiler is not a command')
    """
    target = pathlib.Path(target)
    there = read_record(target)
    try:
        command = find_compiler(compiler)
        include = pathlib.Path(headers) if headers is not None else include_dir()
        version = ffi_version(include)
        reason = f"{command}, FFI headers {version[0]}.{version[1]}"
        made_by = _made_by(command, reason)
        made_from = _made_from(target / LIBRARY)
        if made_from and there == BuildRecord(True, reason, made_from, made_by):
            return there
        if not os.access(target, os.W_OK):  # before minutes of compiling
            raise BuildError(f"cannot write into {target}")
        compile_library(
            target / LIBRARY,
            command,
            (*CORE_SOURCES, *DEVICE_SOURCES, "ffi.cc"),
            include=include,
        )
        record = BuildRecord(True, reason, _made_from(target / LIBRARY), made_by)
        _write_record(target, record)
    except BuildError as error:
        return _not_built(target, there, error)
    return record


def read_record(target: str | os.PathLike[str] = HERE) -> BuildRecord | None:
    """Return what the last build into a folder did; None if there was none."""
    try:
        return BuildRecord(**json.loads((pathlib.Path(target) / RECORD).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def find_compiler(compiler: str | None = None) -> str:
    """Return the C++ compiler's command, or raise `BuildError`."""
    wanted = (compiler or os.environ.get("CXX", "")).strip()
    if wanted:
        if shutil.which(wanted.split()[0]) is None:
            raise BuildError(f"no C++ compiler: {wanted} is not a command")
        return wanted
    for candidate in ("g++", "clang++", "c++"):
        if shutil.which(candidate) is not None:
            return candidate
    raise NothingToBuildWithError(
        "no C++ compiler: none of g++, clang++ and c++ is a command"
    )


def include_dir() -> pathlib.Path:
    """Return the folder of the installed jaxlib's FFI headers.

    Raises:
        BuildError: jaxlib or its headers are not there.

    Example:
        >>> from ascend_bridge.build import include_dir
        >>> (include_dir() / "xla/ffi/api/ffi.h").exists()
        True
    """
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or spec.origin is None:
        raise NothingToBuildWithError(
            "no FFI headers: jaxlib is not installed where the build runs"
        )
    return pathlib.Path(spec.origin).parent / "include"


def ffi_version(include: pathlib.Path) -> tuple[int, int]:
    """Return the (major, minor) version of the FFI that some headers describe."""
    path = include / "xla" / "ffi" / "api" / "c_api.h"
    try:
        text = path.read_text()
    except OSError as error:
        raise NothingToBuildWithError(f"no FFI headers: cannot read {path}") from error
    numbers = [
        re.search(rf"#define XLA_FFI_API_{part} (\d+)", text)
        for part in ("MAJOR", "MINOR")
    ]
    if numbers[0] is None or numbers[1] is None:
        raise BuildError(f"no FFI version in {path}")
    return int(numbers[0][1]), int(numbers[1][1])


def compile_library(
    output: pathlib.Path,
    compiler: str,
    sources: tuple[str, ...],
    *,
    include: pathlib.Path | None = None,
    flags: tuple[str, ...] = (),
    shared: bool = True,
) -> None:
    """Compile sources of the executor and the kernels of every instruction set.

    Args:
        output: the library, or with `shared=False` the program, to write.
        compiler: command of the compiler; may be a cross compiler.
        sources: file names, seen from `host_executor`.
        include: folder of the FFI headers, if a source needs them.
        flags: further flags for compiling and linking, such as -fsanitize=thread.
        shared: whether to link a shared library.

    Raises:
        BuildError: with the first message of the compiler.
    """
    base = [*compiler.split(), *COMMON_FLAGS, *flags, f"-I{SOURCES}"]
    if include is not None:
        base += ["-isystem", str(include)]
    with tempfile.TemporaryDirectory() as folder:
        jobs: list[tuple[pathlib.Path, str, tuple[str, ...]]] = []
        for source in sources:
            jobs.append((SOURCES / source, pathlib.Path(source).stem, ()))
        sets = INSTRUCTION_SETS[_target_of(compiler)]
        if _accepts(compiler, _AMX):
            base.append("-DPJ_HAS_AMX")
        else:
            sets = tuple(x for x in sets if x[0] != "amx")
        for name, lanes, isa_flags in sets:
            defines = (*isa_flags, f"-DPJ_ISA={name}", f"-DPJ_LANES={lanes}")
            jobs.append((SOURCES / "kernels.cc", f"kernels_{name}", defines))
        objects = [os.path.join(folder, f"{stem}.o") for _, stem, _ in jobs]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            runs = [
                pool.submit(_run, [*base, *extra, "-c", str(path), "-o", made])
                for (path, _, extra), made in zip(jobs, objects, strict=True)
            ]
            for run in runs:
                run.result()
        linked = pathlib.Path(folder) / output.name
        link = [*compiler.split(), *flags, *objects, "-pthread", "-o", str(linked)]
        if sys.platform.startswith("linux"):
            link.append("-ldl")  # part of libc since glibc 2.34
        _run([*link, "-shared"] if shared else link)
        if not linked.exists():
            raise BuildError(f"{compiler} ran but made nothing: is it a C++ compiler?")
        _install(linked, output)


def _not_built(
    target: pathlib.Path, there: BuildRecord | None, error: BuildError
) -> BuildRecord:
    """Keep the library if it is that of the sources; else remove and record it."""
    failed = not isinstance(error, NothingToBuildWithError)
    library = target / LIBRARY
    made_from = _made_from(library)
    if there is not None and made_from and there.made_from == made_from:
        reason = f"{there.reason}; kept, as the sources are the same: {error}"
        return dataclasses.replace(there, reason=reason, failed=failed)
    reason = str(error)
    if made_from:
        try:
            library.unlink()
            reason += "; the library of other sources that was there is removed"
        except OSError:
            reason += f"; {library} is of other sources and cannot be removed"
    record = BuildRecord(False, reason, failed=failed)
    with contextlib.suppress(BuildError):  # where a record cannot be, it is returned
        _write_record(target, record)
    return record


def _write_record(target: pathlib.Path, record: BuildRecord) -> None:
    """Write what a build did beside its library."""
    with tempfile.TemporaryDirectory() as folder:
        made = pathlib.Path(folder) / RECORD
        made.write_text(json.dumps(dataclasses.asdict(record)) + "\n")
        _install(made, target / RECORD)


def _install(made: pathlib.Path, output: pathlib.Path) -> None:
    """Put a file in its place at once: who has the old one open keeps it whole."""
    fresh = output.with_name(f"{output.name}.{os.getpid()}")
    try:
        shutil.copy(made, fresh)
        os.replace(fresh, output)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise BuildError(f"cannot write {output}: {error.strerror}") from error


def _made_from(library: pathlib.Path) -> str:
    """Hash the sources, this file, and the library; "" if there is none."""
    try:
        digest = hashlib.sha256(library.read_bytes())
    except OSError:
        return ""
    files = [pathlib.Path(__file__)]
    for folder in (SOURCES, DEVICE, KERNELS):
        files += sorted(folder.glob("*.h")) + sorted(folder.glob("*.cc"))
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _made_by(compiler: str, reason: str) -> str:
    """Hash what the compiler and the headers say they are."""
    said = [_run([*compiler.split(), flag]) for flag in ("--version", "-dumpmachine")]
    return hashlib.sha256("\n".join([reason, *said]).encode()).hexdigest()


def _target_of(compiler: str) -> str:
    """Return the architecture the compiler makes code for."""
    machine = _run([*compiler.split(), "-dumpmachine"]).split("-")[0]
    return _ARCHITECTURES.get(machine or platform.machine(), "other")


def _accepts(compiler: str, flags: tuple[str, ...]) -> bool:
    """Return whether the compiler knows some flags (AMX: GCC 11, clang 12)."""
    try:
        _run([*compiler.split(), *flags, "-E", "-x", "c++", os.devnull])
    except BuildError:
        return False
    return True


def _run(command: list[str]) -> str:
    """Run a command; its output, or a `BuildError` with its first error line."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise BuildError(f"cannot run {command[0]}: {error.strerror}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line]
        said = (lines or done.stderr.splitlines() or ["no message"])[0]
        raise BuildError(f"{command[0]} failed: {said.strip()}")
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
