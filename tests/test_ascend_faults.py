"""Disturbing a mock NPU: what fails is said, what is left is whole, nothing leaks."""

import ctypes
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ascend_device import (
    FAULTS,
    mock_device,
    needs_mock,
    open_small,
    queries_for,
    tokens_for,
)

import pagedjax as pj
from ascend_bridge import ascend

pytestmark = needs_mock
FAILED = jax.errors.JaxRuntimeError
SAYS = {
    "malloc": "out of device memory",
    "copy": "the copy was refused",
    "launch": "the launch was refused",
    "kernel": "an exception in the kernel",
    "timeout": "the wait for the stream timed out",
    "lost": "the device is lost",
}


@pytest.fixture(scope="module")
def device():
    with mock_device() as mock:
        yield mock


@pytest.fixture
def mock(device):
    assert device.held() == (0, 0, 0, 0)
    yield device
    device.restore()
    assert device.held() == (0, 0, 0, 0)


def read(pool: ascend.DevicePool) -> np.ndarray:
    return np.asarray(ascend.read_pages(pool, 0, jnp.arange(6))[1])


def calls(pool: ascend.DevicePool) -> dict:
    """One call of each kind; each gives an array to wait for."""
    k, v = tokens_for(pool, 1, seed=1)
    at = jnp.array([3]), jnp.array([0])
    q, table, lens = queries_for(pool, 1), jnp.array([[3]]), jnp.array([1])
    return {
        "write": lambda: ascend.write_kv(pool, 0, k, v, *at).version,
        "copy": lambda: ascend.copy_pages(pool, at[0], jnp.array([4])).version,
        "attention": lambda: ascend.paged_attention(pool, 0, q, table, lens)[1],
        "attend": lambda: ascend.attend(pool, 0, q, k, v, *at, table, lens)[1],
        "read": lambda: ascend.read_pages(pool, 0, at[0])[1],
    }


@pytest.mark.parametrize("kind", ["malloc", "malloc_host"])
def test_no_memory_at_any_allocation_opens_nothing(kind: str, mock) -> None:
    mock.reset_counts()
    ascend.close_pool(open_small())
    for nth in range(1, mock.allocations() + 1):
        mock.fail(kind, nth)
        try:
            ascend.close_pool(open_small())
        except MemoryError as error:
            assert "out of" in str(error)
            if kind == "malloc":
                assert "aclrtMalloc of " in str(error) and " bytes" in str(error)
        else:
            assert nth > {"malloc": 5, "malloc_host": 2}[kind]
        assert mock.held() == (0, 0, 0, 0)
        mock.restore()


def test_no_memory_does_not_end_in_the_host_unasked(mock) -> None:
    """None means the NPU where there is one: a full one is an error, not a detour."""
    mock.fail("malloc")
    with pytest.raises(MemoryError, match="opened on the npu: .*out of device memory"):
        open_small(executor=None)


@pytest.mark.parametrize("call", ["write", "copy", "attention", "attend", "read"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_poisons_the_pool_and_is_told(fault: str, call: str, mock) -> None:
    if call == "read" and fault in ("launch", "kernel"):
        pytest.skip("reading pages starts no kernel")
    pool = open_small()
    k, v = tokens_for(pool, 1)
    pool = ascend.write_kv(pool, 0, k, v, jnp.array([3]), jnp.array([0]))
    other = open_small()
    mock.fail(fault)
    with pytest.raises(FAILED, match=f"INTERNAL: .*{SAYS[fault]}"):
        calls(pool)[call]().block_until_ready()
    status = ascend.pool_status(pool)
    assert status.state == "poisoned" and SAYS[fault] in status.message
    assert status.version == 1, "a version that exists is whole"
    assert status.device_bytes > 0
    mock.restore()
    for again in calls(pool).values():
        with pytest.raises(FAILED, match=f"poisoned, close it: .*{SAYS[fault]}"):
            again().block_until_ready()
    # Another pool of the same device goes on.
    assert not np.any(read(other))
    held = mock.device_bytes()
    ascend.close_pool(pool)
    assert mock.device_bytes() == held - status.device_bytes
    assert ascend.pool_status(pool).state == "closed"
    ascend.close_pool(other)


def test_a_lost_device_is_closed_without_a_leak(mock) -> None:
    pool = open_small()
    mock.fail("lost")
    with pytest.raises(FAILED, match="the device is lost"):
        read(pool)
    with pytest.raises(RuntimeError, match="the device is lost"):
        open_small()  # it stays lost
    ascend.close_pool(pool)
    assert mock.held() == (0, 0, 0, 0)


def test_a_second_launch_that_fails_leaves_the_first_undone(mock) -> None:
    """The write is queued, the attention is refused: nothing of it may run later."""
    pool = open_small()
    mock.reset_counts()
    mock.fail("launch", 2)
    with pytest.raises(FAILED, match="the launch was refused"):
        calls(pool)["attend"]().block_until_ready()
    assert ascend.pool_status(pool).version == 0
    ascend.close_pool(pool)
    assert mock.launches() == 1 and mock.copied(1) == 0


def test_a_fault_in_the_middle_of_a_scan(mock) -> None:
    """Step 7 of 20 fails: six versions exist, the rest of the program is an error."""
    pool = open_small()
    k, v = tokens_for(pool, 1)

    def step(pool, i):
        return ascend.write_kv(pool, 0, k, v, i[None] // 16, i[None] % 16), i

    mock.fail("kernel", 7)
    with pytest.raises(FAILED, match="an exception in the kernel"):
        jax.block_until_ready(
            jax.jit(lambda p: jax.lax.scan(step, p, jnp.arange(20)))(pool)
        )
    status = ascend.pool_status(pool)
    assert (status.state, status.version) == ("poisoned", 6)
    ascend.close_pool(pool)


def test_faults_of_the_call_for_host_arrays_leak_nothing(mock) -> None:
    pages = jnp.ones((3, 16, 1, 16), jnp.float16)
    q = jnp.ones((1, 2, 16), jnp.float16)

    def attend():
        return pj.paged_attention(
            q, pages, pages, jnp.array([[1]]), jnp.array([3]), implementation="ascend"
        ).block_until_ready()

    attend()
    for fault in ("malloc", *FAULTS):
        mock.fail(fault)
        # XLA gives "no memory" as a ValueError.
        with pytest.raises((FAILED, ValueError), match=SAYS[fault]):
            attend()
        mock.restore()
        assert mock.held() == (0, 0, 0, 0)
    np.testing.assert_array_equal(attend(), 1)


def test_closing_waits_for_the_call_in_flight(mock) -> None:
    """A read stands still in the device; the memory stays until it is through."""
    pool = open_small()
    read(pool)  # compiled
    got = []
    reader = threading.Thread(target=lambda: got.append(read(pool)))
    closer = threading.Thread(target=ascend.close_pool, args=(pool,))
    with mock.held_back():
        reader.start()
        while not mock.waiting():
            time.sleep(0.001)
        closer.start()
        closer.join(0.3)
        assert closer.is_alive()
        assert mock.contexts() == 1
    reader.join()
    closer.join()
    assert len(got) == 1 and not np.any(got[0])
    assert ascend.pool_status(pool).state == "closed"


def test_the_context_of_a_thread_is_left_as_it_was(mock) -> None:
    """Another user of the device in the same thread goes on in its own context."""
    library, own, now = mock.library, ctypes.c_void_p(), ctypes.c_void_p()
    library.aclGetRecentErrMsg.restype = ctypes.c_char_p
    said = []

    def without_one() -> None:
        ascend.close_pool(open_small())
        said.append(library.aclGetRecentErrMsg())

    thread = threading.Thread(target=without_one)
    thread.start()
    thread.join()
    assert said == [b"this thread has no context"]  # before the pool was opened
    assert library.aclrtCreateContext(ctypes.byref(own), 0) == 0

    def is_current() -> bool:
        return (
            library.aclrtGetCurrentContext(ctypes.byref(now)) == 0
            and now.value == own.value
        )

    try:
        assert is_current()
        pool = open_small()
        assert is_current()
        for name in ("write", "copy", "attention", "attend", "read"):
            calls(pool)[name]().block_until_ready()
            pool = ascend.latest(pool)
            assert is_current(), name
        ascend.close_pool(pool)
        assert is_current()
    finally:
        library.aclrtDestroyContext(own)
