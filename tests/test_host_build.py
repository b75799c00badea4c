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
    assert not record.built and record.failed and "false failed" in record.reason


def test_a_compiler_that_makes_nothing_is_recorded(tmp_path: Path) -> None:
    record = build.build_host(tmp_path, compiler="true")
    assert record.failed and "true ran but made nothing" in record.reason
    assert [path.name for path in tmp_path.iterdir()] == [build.RECORD]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Build quickly, into `tmp_path`; gives the libraries that were made."""
    made: list[Path] = []

    def compile_library(output: Path, *_: Any, **__: Any) -> None:
        output.write_text("a library")
        made.append(output)

    monkeypatch.setattr(build, "compile_library", compile_library)
    monkeypatch.setattr(build, "_run", lambda _: "12.2")
    monkeypatch.setattr(build.shutil, "which", lambda name: {"g++": name}.get(name))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build, "SOURCES", tmp_path / "sources")
    return made


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda _: None)


def test_what_cannot_be_built_anew_is_kept_if_nothing_changed(
    tmp_path: Path, made: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build.build_host(tmp_path)
    assert first.built and made
    monkeypatch.setenv("CXX", "g+++")
    kept = build.build_host(tmp_path)
    assert kept.built and kept.failed
    assert "kept, as the sources are the same: no C++ compiler: g+++" in kept.reason
    monkeypatch.setenv("CXX", "  ")  # as good as not set
    assert build.build_host(tmp_path) == first
    no_compiler(monkeypatch)
    kept = build.build_host(tmp_path)
    assert kept.built and not kept.failed and "none of g++" in kept.reason
    assert build.read_record(tmp_path) == first and len(made) == 1
    assert (tmp_path / build.LIBRARY).read_text() == "a library"


def test_what_is_of_other_sources_goes_and_that_is_said(
    tmp_path: Path, made: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    build.build_host(tmp_path)
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "new.cc").write_text("int one;")
    no_compiler(monkeypatch)
    record = build.build_host(tmp_path)
    assert not record.built and not record.failed
    assert "library of other sources that was there is removed" in record.reason
    assert build.read_record(tmp_path) == record
    assert not (tmp_path / build.LIBRARY).exists()
    assert "removed" not in build.build_host(tmp_path).reason


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, made: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user that owns everything is refused nothing, so this is played."""
    build.build_host(tmp_path)
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "new.cc").write_text("int one;")

    unlink = Path.unlink

    def refuse(path: Path) -> None:
        if path.name in (build.LIBRARY, build.RECORD):
            raise PermissionError(13, "Permission denied")
        unlink(path)

    monkeypatch.setattr(build.os, "access", lambda *_: False)
    monkeypatch.setattr(build.os, "replace", lambda made, output: refuse(output))
    monkeypatch.setattr(build.pathlib.Path, "unlink", refuse)
    record = build.build_host(tmp_path)
    assert not record.built and record.failed and len(made) == 1
    assert f"cannot write into {tmp_path}" in record.reason
    assert "is of other sources and cannot be removed" in record.reason
    assert {path.name for path in tmp_path.iterdir()} == {
        *(build.LIBRARY, build.RECORD, "sources"),
    }


@pytest.mark.parametrize(
    ("record", "code"),
    [
        (build.BuildRecord(True, "g++"), 0),
        (build.BuildRecord(True, "g++; kept", failed=True), 1),
        (build.BuildRecord(False, "no compiler"), 77),
        (build.BuildRecord(False, "false failed", failed=True), 1),
    ],
)
def test_exit_codes(
    record: build.BuildRecord,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(build, "build_host", lambda: record)
    assert build.main([]) == code
    out, err = capsys.readouterr()
    assert record.reason in (err if record.failed else out)


def test_arguments_are_not_ignored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(build, "build_host")
    for argv, code, text in (
        (["--help"], 0, "\n    77   there is no library"),
        (["--target", "x"], 2, "unrecognized arguments: --target x"),
    ):
        with pytest.raises(SystemExit) as exit:
            build.main(argv)
        assert exit.value.code == code
        assert text in "".join(capsys.readouterr())


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
    tmp_path: Path, made: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.skipif(
    not (build.HERE / build.LIBRARY).exists(), reason="the library is not built"
)
def test_an_instruction_set_that_is_not_there_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jax.ffi.register_ffi_target", lambda *_, **__: None)
    monkeypatch.delenv("PAGEDJAX_HOST_ISA", raising=False)
    reasons = []
    for wanted in ("", "foo"):
        monkeypatch.setenv("PAGEDJAX_HOST_ISA", wanted)
        _library.register.cache_clear()
        reasons.append(host.usable()[1])
    _library.register.cache_clear()
    assert reasons[1].startswith(reasons[0])
    assert "PAGEDJAX_HOST_ISA=foo" in reasons[1] and "foo" not in reasons[0]
