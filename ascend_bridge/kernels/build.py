"""Build the Ascend C kernel library: for an NPU with CANN, or for the simulator.

    python ascend_bridge/kernels/build.py --simulator 2201       any Linux with g++
    python ascend_bridge/kernels/build.py --soc Ascend910B3      needs CANN
    python ascend_bridge/kernels/build.py --check-headers        needs CANN

    kernels.cpp --(bisheng)-------------------> libpagedjax_ascend_kernels.so
    kernels.cpp --(g++, ../simulator/include)-> libpagedjax_ascend_sim_2201_....so

With CANN there are two ways. `bisheng --npu-arch=dav-2201`, of CANN 8.5 and newer, for
910B1 to 910B4 and 910_93. The vendor's older CMake project, for which `CMakeLists.txt`
is beside this file, for an older CANN (`--cmake`), and in any for the 910A (ProA, ProB,
PremiumA, and `Ascend910B` without a digit). What a machine cannot do is said in one
line and ends with status 77, which is no success.

The name of a chip, from the vendor's guide: on A2 (910B) and 910A it is what `npu-smi
info` prints under Name, with or without `Ascend` in front of it (910B3, Ascend910B3).
On A3 that is only `Ascend910`; there `npu-smi info -t board -i ID -c CHIP` prints a
Chip Name and an NPU Name, to be joined by `_` (Ascend910_9392).

This module imports nothing outside the standard library.
"""

import argparse
import contextlib
import fcntl
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

__all__ = [
    "BuildFailedError",
    "CannotBuildError",
    "arch_of_soc",
    "build_for_npu",
    "build_simulated",
    "check_headers",
    "find_cann",
]

HERE = pathlib.Path(__file__).resolve().parent
SIMULATOR = HERE.parent / "simulator"
# Of a source checkout; an installed package keeps its libraries with the user's.
CACHE = (
    HERE.parents[1] / "build" / "ascend"
    if (HERE.parents[1] / "pyproject.toml").is_file()
    else pathlib.Path.home() / ".cache" / "pagedjax" / "ascend"
)
ARCHES = (1001, 2201)
LIBRARY = "libpagedjax_ascend_kernels.so"
CANNOT = 77
# Where `ascendc.cmake` lies depends on the version of CANN.
_CMAKE_FOLDERS = (
    "tools/tikcpp/ascendc_kernel_cmake",
    "compiler/tikcpp/ascendc_kernel_cmake",
    "ascendc_devkit/tikcpp/samples/cmake",
)
# What a launch calls, by version; a library that is loaded by dlopen has to name it.
_RUNTIME = ("ascendcl", "acl_rt", "runtime")
# Names by which the vendor's headers know the two architectures.
_HEADER_FLAGS = {
    2201: ("-D__NPU_ARCH__=2201", "-D__DAV_C220__", "-D__DAV_C220_VEC__"),
    1001: ("-D__NPU_ARCH__=1001", "-D__DAV_C100__"),
}


class CannotBuildError(RuntimeError):
    """Something that is needed is not on this machine; the message says what."""


class BuildFailedError(RuntimeError):
    """The tools ended without an error, and there is no library."""


def build_simulated(
    arch: int,
    *,
    folder: str | os.PathLike[str] = CACHE,
    flags: tuple[str, ...] = ("-O1",),
    sources: str | os.PathLike[str] = HERE,
) -> pathlib.Path:
    """Compile kernels and simulator into one library, once per set of sources.

    Args:
        arch: 2201 or 1001.
        folder: where libraries are kept; their names hold a hash of what they are
            made from, so several processes may build and use them at once.
        flags: of the compiler, in addition.
        sources: folder of the kernels; another than this one for changed copies.

    Returns:
        The path of the library.

    Raises:
        CannotBuildError: there is no C++ compiler.
        ValueError: another `arch`.
        subprocess.CalledProcessError: the sources do not compile.

    Example:
        >>> from ascend_bridge.kernels import build
        >>> build.build_simulated(910)
        Traceback (most recent call last):
        ValueError: arch 910 is neither 1001 nor 2201
    """
    if arch not in ARCHES:
        raise ValueError(f"arch {arch} is neither 1001 nor 2201")
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise CannotBuildError("no C++ compiler: neither g++ nor clang++ is installed")
    kernels, folder = pathlib.Path(sources), pathlib.Path(folder)
    command = [
        compiler,
        "-std=c++17",
        "-fPIC",
        "-Wall",
        "-Wextra",
        *flags,
        f"-D__NPU_ARCH__={arch}",
        f"-DPAGEDJAX_ASCEND_ARCH={arch}",
        f"-I{SIMULATOR / 'include'}",
    ]
    # Kernels and simulator apart: many variants of the kernels share one simulator.
    simulator = _compile_all(
        command, sorted((SIMULATOR / "src").glob("*.cpp")), f"sim_{arch}", folder
    )
    own = _compile_all(
        command, sorted(kernels.glob("*.cpp")), f"kernels_{arch}", folder
    )
    key = _digest([*command, *map(str, simulator), *map(str, own)], [])
    target = folder / f"libpagedjax_ascend_sim_{arch}_{key}.so"
    with _made_once(target) as temporary:
        if temporary is not None:
            objects = [str(x) for x in (*own, *simulator)]
            link = [compiler, "-shared", *flags, "-o", str(temporary), *objects, "-ldl"]
            subprocess.run(link, check=True, capture_output=True, text=True)
    return target


def build_for_npu(
    soc: str,
    target: str | os.PathLike[str],
    *,
    cann: pathlib.Path | None = None,
    cmake: bool = False,
) -> pathlib.Path:
    """Compile the kernels for a chip with the vendor's compiler.

    Args:
        soc: name of the chip, such as "Ascend910B3" or "910B3"; the docstring of this
            module says where to find it.
        target: folder for the library.
        cann: root of CANN; None means $ASCEND_HOME_PATH.
        cmake: by the CMake project of older versions of CANN, whatever the chip.

    Returns:
        The path of the library.

    Raises:
        CannotBuildError: CANN, its compiler or its CMake files are not there.
        BuildFailedError: the tools wrote no library.
        ValueError: the kernels do not know the chip.
        subprocess.CalledProcessError: the compiler failed.
    """
    arch = arch_of_soc(soc)
    root = cann or find_cann()
    folder = pathlib.Path(target)
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / LIBRARY
    if arch == 2201 and not cmake:
        bisheng = shutil.which("bisheng") or shutil.which("bisheng", path=root / "bin")
        if bisheng is None:
            raise CannotBuildError(f"bisheng is neither in PATH nor in {root / 'bin'}")
        made.unlink(missing_ok=True)
        subprocess.run(_bisheng_command(bisheng, root, made), check=True)
    else:
        if shutil.which("cmake") is None:
            raise CannotBuildError("cmake is not installed")
        places = [root / x for x in _CMAKE_FOLDERS if (root / x).is_dir()]
        place = next((x for x in places if (x / "ascendc.cmake").is_file()), None)
        if place is None:
            raise CannotBuildError(
                f"ascendc.cmake is in none of {', '.join(_CMAKE_FOLDERS)} of {root}"
            )
        made.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory() as work:
            for step in (
                ["-S", str(HERE), "-B", work, f"-DSOC_VERSION={_full_name(soc)}"]
                + [f"-DASCENDC_CMAKE_DIR={place}"]
                + [f"-DASCEND_CANN_PACKAGE_PATH={root}"]
                + [f"-DCMAKE_INSTALL_PREFIX={folder}"],
                ["--build", work, "--target", "install"],
            ):
                subprocess.run(["cmake", *step], check=True)
    if not made.is_file():
        raise BuildFailedError(f"the tools ended without an error but left no {made}")
    return made


def check_headers(*, cann: pathlib.Path | None = None) -> None:
    """Pass the kernels through the vendor's headers: syntax and types, both chips.

    Nothing is run. The headers are those of the CPU twin that comes with CANN.

    Args:
        cann: root of CANN; None means $ASCEND_HOME_PATH.

    Raises:
        CannotBuildError: CANN or a compiler is not there.
        subprocess.CalledProcessError: the kernels do not fit the headers.
    """
    root = cann or find_cann()
    compiler = shutil.which("g++")
    if compiler is None:
        raise CannotBuildError("g++ is not installed")
    stub = next(root.glob("**/tikicpulib/lib/include/stub_fun.h"), None)
    operator = next(root.glob("**/kernel_operator.h"), None)
    if stub is None or operator is None:
        missing = "stub_fun.h" if stub is None else "kernel_operator.h"
        raise CannotBuildError(f"{missing} is not in {root}: no CPU twin in this CANN")
    base = operator.parent
    folders = [base, base / "interface", base / "impl", base / "basic_api"]
    folders += [base.parent, stub.parent]
    for arch in ARCHES:
        command = [compiler, "-x", "c++", "-std=c++17", "-w", "-fsyntax-only"]
        command += ["-DASCENDC_CPU_DEBUG=1", "-DPAGEDJAX_ASCEND_SYNTAX_ONLY"]
        command += [*_HEADER_FLAGS[arch], f"-DPAGEDJAX_ASCEND_ARCH={arch}"]
        command += [f"-I{folder}" for folder in folders if folder.is_dir()]
        subprocess.run([*command, str(HERE / "kernels.cpp")], check=True)


def find_cann() -> pathlib.Path:
    """Return the root of CANN, $ASCEND_HOME_PATH, or say that there is none.

    Raises:
        CannotBuildError: the variable is not set, or names no folder.
    """
    root = os.environ.get("ASCEND_HOME_PATH")
    if not root:
        raise CannotBuildError(
            "no CANN: ASCEND_HOME_PATH is not set (source set_env.sh)"
        )
    if not pathlib.Path(root).is_dir():
        raise CannotBuildError(f"no CANN: ASCEND_HOME_PATH={root} is not a folder")
    return pathlib.Path(root)


def arch_of_soc(soc: str) -> int:
    """Return the architecture of a chip by its name.

    `Ascend910B` without a digit is of the 910A family; the A2 parts have one.

    Args:
        soc: as in `build_for_npu`.

    Raises:
        ValueError: it is none of them, or `Ascend910`, which several call themselves.

    Example:
        >>> from ascend_bridge.kernels import build
        >>> [build.arch_of_soc(x) for x in ("910B3", "Ascend910_9392")]
        [2201, 2201]
        >>> [build.arch_of_soc(x) for x in ("Ascend910A", "Ascend910B")]
        [1001, 1001]
    """
    name = _full_name(soc).lower()
    if re.fullmatch(r"ascend910b[1-4].*|ascend910_93.*", name):
        return 2201
    if re.fullmatch(r"ascend910(a|b|proa|prob|premiuma)", name):
        return 1001
    if name == "ascend910":
        raise ValueError(
            f"soc {soc!r} is not one chip: for a 910A say Ascend910A; on A3 `npu-smi "
            "info -t board -i ID -c CHIP` prints a Chip Name and an NPU Name, to be "
            "joined by _, such as Ascend910_9392"
        )
    raise ValueError(f"soc {soc!r} is neither a 910A, a 910B1 to 910B4 nor a 910_93")


def _full_name(soc: str) -> str:
    """Return the name with the word that `npu-smi info` leaves out on some chips."""
    return soc if soc.lower().startswith("ascend") else f"Ascend{soc}"


def _bisheng_command(bisheng: str, root: pathlib.Path, made: pathlib.Path) -> list[str]:
    """Return the command for architecture 2201; folders differ by version."""
    candidates = [root / "include", root / "asc", root / "asc/include"]
    tikcpp = root / "compiler/tikcpp/tikcfw"
    candidates += [tikcpp, tikcpp / "impl", tikcpp / "interface"]
    command = [bisheng, "-shared", "-fPIC", "-O2", "-std=c++17"]
    command += ["--npu-arch=dav-2201", "-DPAGEDJAX_ASCEND_ARCH=2201"]
    command += [f"-I{include}" for include in candidates if include.is_dir()]
    command += ["-x", "asc", str(HERE / "kernels.cpp")]
    command += ["-x", "c++", str(HERE / "plan.cpp")]
    libraries = root / "lib64"
    there = [x for x in _RUNTIME if (libraries / f"lib{x}.so").exists()]
    command += [f"-L{libraries}", *(f"-l{name}" for name in there)] if there else []
    return [*command, "-o", str(made)]


def _compile_all(
    command: list[str], sources: list[pathlib.Path], name: str, folder: pathlib.Path
) -> list[pathlib.Path]:
    """Compile each source into an object named by a hash of what it is made from."""
    headers = sorted((SIMULATOR / "include").glob("*.h"))
    headers += sorted((SIMULATOR / "src").glob("*.h"))
    headers += sorted({x for s in sources for x in s.parent.glob("*.h")} - set(headers))
    objects = []
    for source in sources:
        key = _digest(command, [*headers, source])
        target = folder / f"{name}_{source.stem}_{key}.o"
        with _made_once(target) as temporary:
            if temporary is not None:
                compile_one = [*command, "-c", str(source), "-o", str(temporary)]
                subprocess.run(compile_one, check=True, capture_output=True, text=True)
        objects.append(target)
    return objects


def _digest(words: list[str], files: list[pathlib.Path]) -> str:
    """Return a short hash of strings and of the contents of files."""
    digest = hashlib.sha256("\0".join(words).encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _made_once(target: pathlib.Path) -> Iterator[pathlib.Path | None]:
    """Yield a place to write `target` to, or None if it is there.

    One process at a time; the file appears whole or not at all.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            yield None
            return
        temporary = target.with_suffix(f".{os.getpid()}.part")
        try:
            yield temporary
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)


def main() -> int:
    """Run the command line; 77 where this machine lacks what is needed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--simulator", type=int, choices=ARCHES, metavar="ARCH")
    action.add_argument(
        "--soc",
        help="chip to build for: 910B3 or Ascend910B3, Ascend910_9392 (A3: Chip Name _ "
        "NPU Name of `npu-smi info -t board -i ID -c CHIP`), Ascend910A",
    )
    action.add_argument("--check-headers", action="store_true")
    parser.add_argument(
        "-o", "--output", default=str(HERE), help="folder of the library"
    )
    parser.add_argument(
        "--cmake", action="store_true", help="with --soc: for CANN older than 8.5"
    )
    options = parser.parse_args()
    try:
        if options.simulator:
            print(build_simulated(options.simulator))
        elif options.soc:
            print(build_for_npu(options.soc, options.output, cmake=options.cmake))
        else:
            check_headers()
            print(
                "the kernels pass the vendor's headers for architectures 1001 and 2201"
            )
    except CannotBuildError as error:
        print(f"NOT DONE: {error}", file=sys.stderr)
        return CANNOT
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BuildFailedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(error.stderr or f"{error.cmd[0]} failed", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
