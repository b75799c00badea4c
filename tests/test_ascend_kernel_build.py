"""Building the Ascend C kernels, and what is said where that cannot be."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import ascend_kernel_cases as cases
import pytest

from ascend_bridge.kernels import build


def test_a_chip_by_its_name() -> None:
    """`Ascend910B` without a digit is no 910B1."""
    for name in ("Ascend910B1", "910B3", "Ascend910B2C", "ascend910_9392", "910_9392"):
        assert build.arch_of_soc(name) == 2201
    for name in ("Ascend910A", "910A", "Ascend910B", "910B", "Ascend910ProB"):
        assert build.arch_of_soc(name) == 1001
    for name in ("Ascend310P3", "910B5", "Ascend910C", ""):
        with pytest.raises(ValueError, match=f"'{name}' is neither"):
            build.arch_of_soc(name)


@pytest.mark.parametrize("name", ["Ascend910", "910"])
def test_the_name_that_several_chips_print_is_asked_about(name: str) -> None:
    """`npu-smi info` prints it on an A3, which is no 910A."""
    with pytest.raises(ValueError, match=f"'{name}' is not one chip: .* -t board"):
        build.arch_of_soc(name)


@pytest.mark.parametrize("arguments", [["--soc", "Ascend910B3"], ["--check-headers"]])
@pytest.mark.parametrize("home", [None, "/no/such/folder"])
def test_without_cann_one_line_and_status_77(
    tmp_path: Path, arguments: list[str], home: str | None
) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "ASCEND_HOME_PATH"}
    if home:
        environment["ASCEND_HOME_PATH"] = home
    run = subprocess.run(
        [sys.executable, build.__file__, *arguments, "-o", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 77
    assert len(run.stderr.splitlines()) == 1 and "ASCEND_HOME_PATH" in run.stderr
    assert not list(tmp_path.iterdir())


def test_the_command_for_bisheng(tmp_path: Path) -> None:
    """A stand-in for the vendor's compiler sees the flags and writes the library."""
    (tmp_path / "include").mkdir()
    (tmp_path / "bin").mkdir()
    compiler = tmp_path / "bin" / "bisheng"
    compiler.write_text(
        '#!/bin/sh\nfor word; do last="$word"; done\necho "$@" > "$last"\n'
    )
    compiler.chmod(0o755)
    made = build.build_for_npu("Ascend910B3", tmp_path / "out", cann=tmp_path)
    command = made.read_text()
    assert "--npu-arch=dav-2201" in command and "-DPAGEDJAX_ASCEND_ARCH=2201" in command
    assert f"-I{tmp_path / 'include'}" in command
    assert f"-x asc {build.HERE / 'kernels.cpp'} -x c++" in command
    assert " -l" not in command
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libascendcl.so").touch()
    made = build.build_for_npu("910B3", tmp_path / "out", cann=tmp_path)
    assert f"-L{tmp_path / 'lib64'} -lascendcl -o" in made.read_text()


def test_a_compiler_that_writes_nothing(tmp_path: Path) -> None:
    """Is no success, whatever a build before it left."""
    (tmp_path / "bin").mkdir()
    compiler = tmp_path / "bin" / "bisheng"
    compiler.write_text("#!/bin/sh\nexit 0\n")
    compiler.chmod(0o755)
    (tmp_path / build.LIBRARY).touch()
    run = subprocess.run(
        [sys.executable, build.__file__, "--soc", "910B3", "-o", str(tmp_path)],
        env={**os.environ, "ASCEND_HOME_PATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1 and run.stdout == ""
    assert len(run.stderr.splitlines()) == 1
    assert f"left no {tmp_path / build.LIBRARY}" in run.stderr


@pytest.mark.parametrize(
    "arguments", [["--soc", "910A"], ["--soc", "910B3", "--cmake"]]
)
def test_by_the_cmake_project(tmp_path: Path, arguments: list[str]) -> None:
    """A CANN without ascendc.cmake, and one with a stand-in for it and for cmake."""
    cmake = tmp_path / "bin" / "cmake"
    cmake.parent.mkdir()
    cmake.write_text(
        '#!/bin/sh\nfor word; do case "$word" in *INSTALL_PREFIX=*)\n'
        f'echo "$@" > "${{word#*=}}/{build.LIBRARY}";; esac; done\n'
    )
    cmake.chmod(0o755)
    command = [sys.executable, build.__file__, *arguments, "-o", str(tmp_path)]
    environment = {**os.environ, "ASCEND_HOME_PATH": str(tmp_path)}
    environment["PATH"] = f"{cmake.parent}:/usr/bin:/bin"

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )

    without = run()
    assert without.returncode == 77 and len(without.stderr.splitlines()) == 1
    assert f"of {tmp_path}" in without.stderr and "ascendc.cmake" in without.stderr
    folder = tmp_path / "compiler" / "tikcpp" / "ascendc_kernel_cmake"
    folder.mkdir(parents=True)
    (folder / "ascendc.cmake").touch()
    made = run()
    assert made.returncode == 0, made.stderr
    line = Path(made.stdout.strip()).read_text()
    assert f"-DSOC_VERSION=Ascend{arguments[1]} " in line
    assert f"-DASCENDC_CMAKE_DIR={folder} " in line


def test_the_check_of_headers(tmp_path: Path) -> None:
    """On headers that stand in for the vendor's, whole and with a call missing."""
    cann = tmp_path / "cann"
    twin = cann / "tools" / "tikicpulib" / "lib" / "include"
    twin.mkdir(parents=True)
    with pytest.raises(build.CannotBuildError, match="stub_fun.h is not in"):
        build.check_headers(cann=cann)
    (twin / "stub_fun.h").touch()
    with pytest.raises(build.CannotBuildError, match="kernel_operator.h is not in"):
        build.check_headers(cann=cann)
    shutil.copytree(build.SIMULATOR / "include", cann / "include")
    build.check_headers(cann=cann)
    operator = cann / "include" / "kernel_operator.h"
    operator.write_text(operator.read_text() + "\n#define EnQue NoSuchCall\n")
    with pytest.raises(subprocess.CalledProcessError):
        build.check_headers(cann=cann)


@pytest.mark.skipif(
    "ASCEND_HOME_PATH" not in os.environ,
    reason="NOT CHECKED against the vendor's headers: ASCEND_HOME_PATH is not set",
)
def test_the_vendors_headers_accept_the_kernels() -> None:
    build.check_headers()


@pytest.mark.skipif(
    not {"PAGEDJAX_ASC_DEVKIT", "PAGEDJAX_ASC_TOOLS"} <= set(os.environ),
    reason="NOT RUN on the vendor's headers: PAGEDJAX_ASC_DEVKIT and"
    " PAGEDJAX_ASC_TOOLS, checkouts of asc-devkit and asc-tools, are not set",
)
@pytest.mark.parametrize("arch", build.ARCHES)
def test_on_the_vendors_headers(arch: int) -> None:
    places = [os.environ[f"PAGEDJAX_ASC_{name}"] for name in ("DEVKIT", "TOOLS")]
    program = Path(__file__).parent / "ascend_vendor_layer.py"
    run = subprocess.run(
        [sys.executable, str(program), *places, str(arch)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert f"{len(cases.SMALL)} cases on the vendor's headers" in run.stdout
