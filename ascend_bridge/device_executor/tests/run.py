"""Build and run the C++ tests of the device executor on the mock, under sanitizers too.

    python ascend_bridge/device_executor/tests/run.py
    python ascend_bridge/device_executor/tests/run.py --sanitize address,undefined
    python ascend_bridge/device_executor/tests/run.py --sanitize thread

Executor and mock are instrumented; the simulated kernels have sanitizer runs of their
own. What a machine cannot do is said and ends with status 77.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

PACKAGE = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PACKAGE.parent))

from ascend_bridge import build  # noqa: E402
from ascend_bridge.kernels import build as kernels  # noqa: E402
from ascend_bridge.mock_acl.build import build_mock  # noqa: E402

_ON_NPU = (
    "acl",
    "kernel_library",
    "npu_store",
    "npu_handlers",
    "tests/test_npu_handlers",
)
_WITH_XLA = ("handlers.cc", "npu_handlers.cc", "control.cc")


def main() -> int:
    """Build, run, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sanitize", metavar="KINDS", help="as for -fsanitize=")
    options = parser.parse_args()
    flags: tuple[str, ...] = ("-O1", "-g")
    if options.sanitize:
        flags += (f"-fsanitize={options.sanitize}", "-fno-sanitize-recover=all")
    try:
        compiler = build.find_compiler()
        environment = {
            "PAGEDJAX_ACL_LIBRARY": str(build_mock(flags=flags)),
            "PAGEDJAX_ASCEND_KERNELS": str(kernels.build_simulated(2201)),
        }
    except (build.BuildError, kernels.CannotBuildError) as error:
        print(f"NOT TESTED: {error}", file=sys.stderr)
        return kernels.CANNOT
    sources = [x for x in build.DEVICE_SOURCES if not x.endswith(_WITH_XLA)]
    sources.append("../device_executor/tests/test_device.cc")
    with tempfile.TemporaryDirectory() as folder:
        program = pathlib.Path(folder) / "test_device"
        build.compile_library(
            program,
            compiler,
            (*build.CORE_SOURCES, *sources),
            flags=flags,
            shared=False,
        )
        programs = [program]
        try:
            include = build.include_dir()
        except build.BuildError as error:
            print(f"handlers on an NPU NOT TESTED: {error}", file=sys.stderr)
        else:
            programs.append(build_on_npu(program.parent, compiler, flags, include))
        codes = [
            subprocess.run([str(x)], env=os.environ | environment, check=False)
            for x in programs
        ]
    if any(done.returncode for done in codes):
        return 1
    return 0 if len(programs) == 2 else kernels.CANNOT


def build_on_npu(
    folder: pathlib.Path,
    compiler: str,
    flags: tuple[str, ...],
    include: pathlib.Path,
) -> pathlib.Path:
    """Compile the handlers for arrays on an NPU with what calls them."""
    program = folder / "test_npu_handlers"
    command = [*compiler.split(), "-std=c++17", *flags, "-isystem", str(include)]
    command += [str(build.SOURCES / f"../device_executor/{x}.cc") for x in _ON_NPU]
    build._run([*command, "-pthread", "-o", str(program), "-ldl"])
    return program


if __name__ == "__main__":
    sys.exit(main())
