"""Build and run the C++ tests: plain, under the sanitizers, and for aarch64.

    python ascend_bridge/host_executor/tests/run.py              plain
    python ascend_bridge/host_executor/tests/run.py --sanitize thread
    python ascend_bridge/host_executor/tests/run.py --sanitize address,undefined
    python ascend_bridge/host_executor/tests/run.py --aarch64    cross, under qemu-user

`--aarch64` needs `apt-get install g++-aarch64-linux-gnu qemu-user`. What a machine
cannot do is said loudly and ends with status 77, which is no success.
"""

import argparse
import importlib.util
import pathlib
import shutil
import subprocess
import sys
import tempfile
from types import ModuleType

PACKAGE = pathlib.Path(__file__).resolve().parents[2]
CANNOT = 77


def main() -> int:
    """Build, run, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sanitize", metavar="KINDS", help="as for -fsanitize=")
    parser.add_argument("--aarch64", action="store_true", help="cross-compile, run")
    options = parser.parse_args()
    build = load_build()
    # Half the speed and a quarter of the time to compile.
    flags: list[str] = ["-O1", "-g"]
    runner: list[str] = []
    if options.aarch64:
        compiler = "aarch64-linux-gnu-g++"
        runner = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"]
        for command in (compiler, runner[0]):
            if shutil.which(command) is None:
                return cannot(f"{command} is not installed")
    else:
        try:
            compiler = build.find_compiler()
        except build.BuildError as error:
            return cannot(str(error))
    if options.sanitize:
        flags.append(f"-fsanitize={options.sanitize}")
        flags.append("-fno-sanitize-recover=all")
    with tempfile.TemporaryDirectory() as folder:
        program = pathlib.Path(folder) / "test_host"
        sources = (*build.CORE_SOURCES, "tests/test_host.cc")
        build.compile_library(
            program, compiler, sources, flags=tuple(flags), shared=False
        )
        return subprocess.run([*runner, str(program)], check=False).returncode


def cannot(reason: str) -> int:
    """Say that nothing was tested."""
    print(f"NOT TESTED: {reason}", file=sys.stderr)
    return CANNOT


def load_build() -> ModuleType:
    """Load `ascend_bridge/build.py` by its path: no jax is needed here."""
    spec = importlib.util.spec_from_file_location("host_build", PACKAGE / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())
