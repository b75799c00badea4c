"""The mock runtime itself, the declarations of the real one, and the older chip."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
from ascend_device import SIZES, needs_mock

from ascend_bridge import _device_library, npu
from ascend_bridge.device_executor import check_acl
from ascend_bridge.kernels.build import arch_of_soc
from ascend_bridge.mock_acl.build import build_mock

pytestmark = needs_mock


def in_a_fresh_process(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code, str(build_mock())],
        capture_output=True,
        text=True,
        check=False,
    )


RAW = """
import ctypes, sys
mock = ctypes.CDLL(sys.argv[1])
pointer = ctypes.c_void_p
context, memory, pinned, stream = (pointer() for _ in range(4))
assert mock.aclrtCreateContext(ctypes.byref(context), 0) == 100001
assert mock.aclInit(None) == 0
assert mock.aclrtMalloc(ctypes.byref(memory), 64, 0) == 107002, "no context"
assert mock.aclrtCreateContext(ctypes.byref(context), 0) == 0
assert mock.aclrtMalloc(ctypes.byref(memory), ctypes.c_size_t(64), 0) == 0
assert mock.aclrtMallocHost(ctypes.byref(pinned), ctypes.c_size_t(64)) == 0
assert mock.aclrtCreateStream(ctypes.byref(stream)) == 0
size = ctypes.c_size_t
def copy(to, source, n, kind):
    return mock.aclrtMemcpyAsync(to, size(n), source, size(n), kind, stream)
"""


def test_the_mock_refuses_what_a_device_would() -> None:
    done = in_a_fresh_process(
        RAW
        + """
import threading
pageable = ctypes.create_string_buffer(64)
assert copy(memory, pinned, 65, 1) == 107000, "past the end"
assert copy(pointer(memory.value + 32), pinned, 40, 1) == 107000, "past the end"
assert copy(memory, pageable, 64, 1) == 107000, "not pinned"
assert copy(pinned, memory, 64, 1) == 107000, "the wrong way round"
ctypes.memmove(pinned, b"a" * 64, 64)
assert copy(memory, pinned, 64, 1) == 0
ctypes.memmove(pinned, b"b" * 64, 64)  # too early
assert mock.aclrtSynchronizeStreamWithTimeout(stream, 1000) == 0
assert copy(pinned, memory, 64, 2) == 0
ctypes.memset(pinned, 0, 64)
assert mock.aclrtSynchronizeStreamWithTimeout(stream, 1000) == 0
assert ctypes.string_at(pinned, 64) == b"b" * 64, "work is done at the wait"
codes = []
thread = threading.Thread(
    target=lambda: codes.append(mock.aclrtSynchronizeStreamWithTimeout(stream, 1)))
thread.start(); thread.join()
assert codes == [107002], "a thread without a context"
assert mock.aclFinalize() == 500000, "a context is open"
print("fine")
"""
    )
    assert done.stdout == "fine\n", done.stderr


def test_the_host_cannot_touch_device_memory() -> None:
    done = in_a_fresh_process(RAW + "print(ctypes.string_at(memory, 1))")
    assert done.returncode == -11, (done.returncode, done.stdout, done.stderr)


def test_product_names() -> None:
    """`Ascend910B` without a digit is of the older family; the build has one rule."""
    new = ("Ascend910B1", "ascend910b4-1", "910B2C", "Ascend910_9392", "ASCEND910B3")
    old = ("Ascend910A", "Ascend910B", "Ascend910ProB", "910a", "Ascend910PremiumA")
    no = (
        "Ascend310P3",
        "",
        "Ascend950",
        "Ascend910",
        "Ascend910B5",
        "Ascend910C",
        "B3",
    )
    assert {npu.arch_of(x) for x in new} == {2201}
    assert {npu.arch_of(x) for x in old} == {1001}
    assert {npu.arch_of(x) for x in no} == {0}
    assert {arch_of_soc(x) for x in new} == {2201}
    assert {arch_of_soc(x) for x in old} == {1001}
    for name in no:
        with pytest.raises(ValueError, match="soc"):
            arch_of_soc(name)


def test_the_old_chip_gives_the_same() -> None:
    """The 910A's kernels in a process of their own; bfloat16 is refused there."""
    done = in_a_fresh_process(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from ascend_device import *\n"
        "with mock_device(1001):\n"
        "    pool = open_small()\n"
        "    k, v = tokens_for(pool, 3)\n"
        "    at = jnp.arange(3)\n"
        "    args = (k, v, at, at, at[:, None], jnp.full(3, 3))\n"
        "    pool, out = ascend.attend(pool, 1, queries_for(pool, 3), *args)\n"
        "    other = open_small(executor='host')\n"
        "    other, want = ascend.attend(other, 1, queries_for(pool, 3), *args)\n"
        "    np.testing.assert_allclose(out, want, atol=2e-3)\n"
        "    try: open_small(dtype=jnp.bfloat16)\n"
        "    except ValueError as error: print(error)\n"
    )
    assert "bfloat16" in done.stdout and not done.returncode, done.stderr


@pytest.mark.slow
def test_the_declarations_match_the_real_header() -> None:
    try:
        check_acl.check(check_acl.fetch_headers())
    except check_acl.CannotCheckError as error:
        pytest.skip(f"NOT CHECKED: {error}")


def test_the_check_of_declarations_can_fail(tmp_path) -> None:
    """Against a header in which one function differs."""
    folder = tmp_path / "acl"
    folder.mkdir()
    source = (check_acl.HERE / "acl_functions.h").read_text()
    lists = source[source.index("#define PAGEDJAX_ACL_FUNCTIONS") :]
    lists = lists[: lists.index("namespace")]
    header = (
        "#pragma once\n#include <cstddef>\n#include <cstdint>\n"
        "typedef void* aclrtContext;\ntypedef void* aclrtStream;\n"
        f"{lists}"
        '#define F(r, n, a) extern "C" r n a;\nPAGEDJAX_ACL_FUNCTIONS(F)\n'
        "#define C(o, v, t) constexpr int t = v;\nPAGEDJAX_ACL_CONSTANTS(C)\n"
        "#undef PAGEDJAX_ACL_FUNCTIONS\n#undef PAGEDJAX_ACL_CONSTANTS\n"
    )
    (folder / "acl.h").write_text(header)
    check_acl.check(tmp_path)
    changed = header.replace("(void* memory, size_t size)", "(void* memory, int size)")
    changed = changed.replace(
        "(void** memory, size_t size)", "(void** memory, int size)"
    )
    assert changed != header
    (folder / "acl.h").write_text(changed)
    with pytest.raises(RuntimeError, match="aclrtMallocHost differs from acl.h"):
        check_acl.check(tmp_path)
    (folder / "acl.h").write_text(header.replace("207001", "207002"))
    with pytest.raises(RuntimeError, match="ACL_ERROR_RT_MEMORY_ALLOCATION differs"):
        check_acl.check(tmp_path)


def test_sizes_are_those_of_the_c_structs() -> None:
    assert ctypes.sizeof(_device_library.CShape) == 40
    assert ctypes.sizeof(_device_library.CStatus) == 16
    assert set(SIZES) <= {name for name, *_ in _device_library.CShape._fields_}
