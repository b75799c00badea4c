"""Compile the host executor: `python -m ascend_bridge.build` for a source checkout.

An installation from source does the same through `hatch_build.py`. Needs GCC 9 or
clang 10 and the FFI headers that come with jaxlib; without them there is no library,
and the reason is recorded beside the place where it would be.

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

import concurrent.futures
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

__all__ = ["BuildError", "BuildRecord", "build_host", "include_dir"]

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


@dataclasses.dataclass(frozen=True)
class BuildRecord:
    """What a build did.

    Attributes:
        built: whether there is a library.
        reason: why not, or which compiler and headers.
        made_from: a hash of what the library is made from, and of the library; a build
            that finds both as they were does nothing.
    """

    built: bool
    reason: str
    made_from: str = ""


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
        sources by the same compiler. Never raises for a missing compiler or header.

    Example:
        >>> import tempfile
        >>> from ascend_bridge.build import build_host
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     record = build_host(folder, compiler="/no/such/compiler")
        >>> record.built, record.reason
        (False, 'no C++ compiler: /no/such/compiler is not a command')
    """
    target = pathlib.Path(target)
    try:
        command = find_compiler(compiler)
        include = pathlib.Path(headers) if headers is not None else include_dir()
        version = ffi_version(include)
        reason = f"{command}, FFI headers {version[0]}.{version[1]}"
        inputs = _hash_of_inputs(command, reason)
        record = _record_of(target / LIBRARY, reason, inputs)
        if record is not None and read_record(target) == record:
            return record
        compile_library(
            target / LIBRARY,
            command,
            (*CORE_SOURCES, *DEVICE_SOURCES, "ffi.cc"),
            include=include,
        )
        record = _record_of(target / LIBRARY, reason, inputs)
        assert record is not None
    except BuildError as error:
        (target / LIBRARY).unlink(missing_ok=True)
        record = BuildRecord(False, str(error))
    (target / RECORD).write_text(json.dumps(dataclasses.asdict(record)) + "\n")
    return record


def read_record(target: str | os.PathLike[str] = HERE) -> BuildRecord | None:
    """Return what the last build into a folder did; None if there was none."""
    try:
        return BuildRecord(**json.loads((pathlib.Path(target) / RECORD).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def find_compiler(compiler: str | None = None) -> str:
    """Return the C++ compiler's command, or raise `BuildError`."""
    wanted = compiler or os.environ.get("CXX")
    if wanted:
        if shutil.which(wanted.split()[0]) is None:
            raise BuildError(f"no C++ compiler: {wanted} is not a command")
        return wanted
    for candidate in ("g++", "clang++", "c++"):
        if shutil.which(candidate) is not None:
            return candidate
    raise BuildError("no C++ compiler: none of g++, clang++ and c++ is a command")


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
        raise BuildError("no FFI headers: jaxlib is not installed where the build runs")
    return pathlib.Path(spec.origin).parent / "include"


def ffi_version(include: pathlib.Path) -> tuple[int, int]:
    """Return the (major, minor) version of the FFI that some headers describe."""
    path = include / "xla" / "ffi" / "api" / "c_api.h"
    try:
        text = path.read_text()
    except OSError as error:
        raise BuildError(f"no FFI headers: cannot read {path}") from error
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
        # Linked under another name, then renamed: a process that has the old library
        # open keeps it whole.
        fresh = output.with_name(f"{output.name}.{os.getpid()}")
        link = [*compiler.split(), *flags, *objects, "-pthread", "-o", str(fresh)]
        if sys.platform.startswith("linux"):
            link.append("-ldl")  # part of libc since glibc 2.34
        _run([*link, "-shared"] if shared else link)
        os.replace(fresh, output)


def _can_build() -> bool:
    """Return whether there are a compiler and headers."""
    try:
        find_compiler()
        ffi_version(include_dir())
    except BuildError:
        return False
    return True


def _record_of(library: pathlib.Path, reason: str, inputs: str) -> BuildRecord | None:
    """Return the record of a library as it is; None if there is none."""
    try:
        content = library.read_bytes()
    except OSError:
        return None
    return BuildRecord(
        True, reason, hashlib.sha256(inputs.encode() + content).hexdigest()
    )


def _hash_of_inputs(compiler: str, reason: str) -> str:
    """Hash the sources, this file, and what the compiler says it is."""
    said = [_run([*compiler.split(), flag]) for flag in ("--version", "-dumpmachine")]
    digest = hashlib.sha256("\n".join([reason, *said]).encode())
    files = [pathlib.Path(__file__)]
    for folder in (SOURCES, DEVICE, KERNELS):
        files += sorted(folder.glob("*.h")) + sorted(folder.glob("*.cc"))
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


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
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"cannot run {command[0]}: {error.strerror}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line]
        said = (lines or done.stderr.splitlines() or ["no message"])[0]
        raise BuildError(f"{command[0]} failed: {said.strip()}")
    return done.stdout.strip()


if __name__ == "__main__":
    made = build_host()
    print(f"{'built' if made.built else 'not built'}: {made.reason}")
    # 77: there is nothing to build with. A compiler that fails is an error.
    sys.exit(0 if made.built else 1 if _can_build() else 77)
