"""Check the hand-written declarations of the vendor's runtime against its real header.

    python ascend_bridge/device_executor/check_acl.py              fetches the header
    python ascend_bridge/device_executor/check_acl.py --headers X  X holds acl/acl.h

The header comes from the wheel of torch_npu on PyPI. It is kept in `build/`, which is
under no version control, and is no part of this project: only signatures and constants
are compared. A deliberately wrong signature must be refused, or the check is worth
nothing. Where there is no network or no compiler, that is said and the exit status is
77, which is no success.

This module imports nothing outside the standard library.
"""

import argparse
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

__all__ = ["check", "fetch_headers"]

HERE = pathlib.Path(__file__).resolve().parent
CACHE = HERE.parents[1] / "build" / "acl_headers"
WHEEL = "torch_npu==2.14.0"
_INSIDE = "torch_npu/include/third_party/acl/inc/"
CANNOT = 77


class CannotCheckError(RuntimeError):
    """Something that the check needs cannot be had here; the message says what."""


def check(headers: pathlib.Path) -> None:
    """Compile the declarations beside the header, and a wrong one, which must fail.

    Args:
        headers: folder of `acl/acl.h`.

    Raises:
        CannotCheckError: there is no compiler or no header.
        RuntimeError: a declaration differs, or a wrong one passes.
    """
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise CannotCheckError("neither g++ nor clang++ is installed")
    if not (headers / "acl" / "acl.h").exists():
        raise CannotCheckError(f"{headers} holds no acl/acl.h")
    command = [compiler, "-std=c++17", "-fsyntax-only", "-isystem", str(headers)]
    command.append(str(HERE / "acl_check.cc"))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the declarations differ from acl.h:\n{done.stderr}")
    wrong = [*command, "-DPAGEDJAX_ACL_WRONG"]
    done = subprocess.run(wrong, capture_output=True, text=True, check=False)
    if not done.returncode or "a wrong signature is found" not in done.stderr:
        raise RuntimeError("a wrong signature of aclrtMalloc was not refused")


def fetch_headers(cache: pathlib.Path = CACHE) -> pathlib.Path:
    """Return the folder of the real header, taken out of the wheel once.

    Args:
        cache: where it is kept.

    Raises:
        CannotCheckError: the wheel cannot be had.
    """
    target = cache / WHEEL.replace("==", "-")
    if (target / "acl" / "acl.h").exists():
        return target
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip"]
        if subprocess.run([*pip, "--version"], capture_output=True).returncode:
            found = shutil.which("pip3") or shutil.which("pip")
            if found is None:
                raise CannotCheckError("pip is not installed")
            pip = [found]
        download = [*pip, "download", "--quiet", "--no-deps", "--dest", folder]
        # Any build will do for the header; these exist for every platform.
        download += ["--only-binary=:all:", "--python-version=3.11"]
        download += ["--platform=manylinux_2_28_x86_64", WHEEL]
        done = subprocess.run(download, capture_output=True, text=True, check=False)
        wheels = list(pathlib.Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            lines = done.stderr.strip().splitlines() or ["no message"]
            raise CannotCheckError(f"{WHEEL} cannot be downloaded: {lines[-1]}")
        out = pathlib.Path(folder) / "out"
        with zipfile.ZipFile(wheels[0]) as wheel:
            for name in wheel.namelist():
                if name.startswith(_INSIDE + "acl/") and name.endswith(".h"):
                    path = out / name[len(_INSIDE) :]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(wheel.read(name))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(out, target, dirs_exist_ok=True)
    return target


def main() -> int:
    """Run the check; 77 where it cannot be run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--headers", type=pathlib.Path, help="folder of acl/acl.h")
    options = parser.parse_args()
    try:
        headers = options.headers or fetch_headers()
        check(headers)
    except CannotCheckError as error:
        print(f"NOT CHECKED: {error}", file=sys.stderr)
        return CANNOT
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"the declarations match {headers / 'acl' / 'acl.h'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
