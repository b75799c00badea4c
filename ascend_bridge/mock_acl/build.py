"""Build the mock runtime: `python -m ascend_bridge.mock_acl.build` prints its path.

    PAGEDJAX_ACL_LIBRARY=<this library>
    PAGEDJAX_ASCEND_KERNELS=<what `ascend_bridge/kernels/build.py --simulator` prints>

are all that a program needs to run the device executor without a device.
"""

import os
import pathlib
import shutil
import subprocess
import sys

from ascend_bridge.kernels import build as kernels

__all__ = ["build_mock"]

HERE = pathlib.Path(__file__).resolve().parent


def build_mock(
    *,
    folder: str | os.PathLike[str] = kernels.CACHE,
    flags: tuple[str, ...] = ("-O1", "-g"),
) -> pathlib.Path:
    """Compile the mock, once per set of sources.

    Args:
        folder: where libraries are kept, named by a hash of what they are made from.
        flags: of the compiler, in addition.

    Returns:
        The path of the library.

    Raises:
        CannotBuildError: there is no C++ compiler.
        subprocess.CalledProcessError: the sources do not compile.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise kernels.CannotBuildError("no C++ compiler")
    command = [compiler, "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden"]
    command += ["-Wall", "-Wextra", *flags]
    source = HERE / "mock_acl.cc"
    headers = [
        HERE / "mock_acl.h",
        HERE / "gate.h",
        HERE.parent / "device_executor" / "acl_functions.h",
        HERE.parent / "kernels" / "launch.h",
    ]
    key = kernels._digest(command, [source, *headers])
    target = pathlib.Path(folder) / f"libascendcl_mock_{key}.so"
    with kernels._made_once(target) as temporary:
        if temporary is not None:
            subprocess.run(
                [*command, str(source), "-o", str(temporary)],
                check=True,
                capture_output=True,
                text=True,
            )
    return target


if __name__ == "__main__":
    try:
        print(build_mock())
    except kernels.CannotBuildError as error:
        print(f"NOT DONE: {error}", file=sys.stderr)
        sys.exit(kernels.CANNOT)
