"""Building the host executor, and refusing what must not be loaded."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from ascend_bridge import _library, build, host

needs_compiler = pytest.mark.skipif(
    all(shutil.which(x) is None for x in ("g++", "clang++", "c++")),
    reason="there is no C++ compiler",
)


def test_no_compiler_is_recorded(tmp_path: Path) -> None:
    (tmp_path / build.LIBRARY).write_text("an old library")
    record = build.build_host(tmp_path, compiler="/no/such/compiler")
    assert not record.built and "/no/such/compiler" in record.reason
    assert json.loads((tmp_path / build.RECORD).read_text())["built"] is False
    assert not (tmp_path / build.LIBRARY).exists()


def test_no_headers_are_recorded(tmp_path: Path) -> None:
    record = build.build_host(tmp_path, compiler=sys.executable, headers=tmp_path)
    assert not record.built and "c_api.h" in record.reason


def test_a_compiler_that_fails_is_recorded(tmp_path: Path) -> None:
    record = build.build_host(tmp_path, compiler="false")
    assert not record.built and "false failed" in record.reason


@needs_compiler
def test_what_the_compiler_lacks_is_left_out() -> None:
    """AMX is asked for where the compiler knows it: GCC 11, clang 12."""
    compiler = build.find_compiler()
    assert build._accepts(compiler, ("-O1",))
    assert not build._accepts(compiler, ("-mno-such-instructions",))
    assert not build._accepts("false", ("-O1",))


def test_the_hook_builds_without_the_package(tmp_path: Path) -> None:
    """A wheel is built where neither the package nor jax can be imported."""
    hook = Path(__file__).parent.parent / "hatch_build.py"
    spec = importlib.util.spec_from_file_location("hatch_build", hook)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    code = (
        "import importlib.util as u, sys;"
        f"s = u.spec_from_file_location('host_build', {str(build.__file__)!r});"
        "m = u.module_from_spec(s); sys.modules['host_build'] = m;"
        "s.loader.exec_module(m);"
        f"print(m.build_host({str(tmp_path)!r}).reason);"
        "assert 'jax' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "jaxlib is not installed" in done.stdout or "compiler" in done.stdout


def test_what_stands_is_not_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def compile_library(output: Path, *_: Any, **__: Any) -> None:
        output.write_text("a library")
        made.append(output)

    monkeypatch.setattr(build, "compile_library", compile_library)
    monkeypatch.setattr(build, "find_compiler", lambda _: "g++ -O3")
    monkeypatch.setattr(build, "_run", lambda _: "12.2")
    first = build.build_host(tmp_path)
    assert build.build_host(tmp_path) == first == build.read_record(tmp_path)
    assert len(made) == 1
    (tmp_path / build.LIBRARY).unlink()
    build.build_host(tmp_path)
    assert len(made) == 2
    (tmp_path / build.LIBRARY).write_text("half a libr")
    build.build_host(tmp_path)
    assert len(made) == 3
    monkeypatch.setattr(build, "_run", lambda _: "14.1")
    assert build.build_host(tmp_path) != first
    assert len(made) == 4
    source = tmp_path / "changed.cc"
    source.write_text("int one;")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    build.build_host(tmp_path)
    source.write_text("int two;")
    build.build_host(tmp_path)
    assert len(made) == 6


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Look for the library in an empty folder, and forget what was registered."""
    monkeypatch.setattr(build, "HERE", tmp_path)
    _library.register.cache_clear()
    yield tmp_path
    _library.register.cache_clear()


def test_a_missing_library_says_what_the_build_said(elsewhere: Path) -> None:
    assert "python -m ascend_bridge.build" in host.usable()[1]
    record = {"built": False, "reason": "the moon was full"}
    (elsewhere / build.RECORD).write_text(json.dumps(record))
    _library.register.cache_clear()
    assert host.usable() == (
        False,
        "the host executor is not built: the moon was full",
    )
    pages = jnp.ones((1, 2, 1, 8))
    with pytest.raises(NotImplementedError, match="the moon was full"):
        host.paged_attention(
            jnp.ones((1, 1, 8)), pages, pages, jnp.array([[0]]), jnp.array([1])
        )


def test_a_broken_library_is_a_reason(elsewhere: Path) -> None:
    (elsewhere / build.LIBRARY).write_bytes(b"not a library")
    usable, reason = host.usable()
    assert not usable and "cannot be loaded" in reason


@pytest.mark.skipif(
    not (build.HERE / build.LIBRARY).exists(), reason="the library is not built"
)
@pytest.mark.parametrize("running", [(0, 0), (1, 9)])
def test_newer_headers_than_the_runtime_are_refused(
    running: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "ffi_version", lambda _: running)
    registered: list[str] = []
    monkeypatch.setattr(
        "jax.ffi.register_ffi_target", lambda name, *_, **__: registered.append(name)
    )
    _library.register.cache_clear()
    usable, reason = host.usable()
    _library.register.cache_clear()
    assert not usable and f"this jaxlib has {running[0]}.{running[1]}" in reason
    assert not registered
