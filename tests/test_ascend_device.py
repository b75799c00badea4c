"""A pool on a mock NPU, and on the host: versions, values, errors, closing.

The file is long because its tests share the fixtures that open pools in both places,
and the few programs that those compile.
"""

import dataclasses
import functools
import os
import threading
import warnings
from pathlib import Path

import attention_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ascend_device import (
    mock_device,
    needs_mock,
    open_small,
    queries_for,
    tokens_for,
)
from oracles import attention_oracle

import pagedjax as pj
from ascend_bridge import _device_library, ascend
from ascend_bridge._traffic import traffic_table

pytestmark = needs_mock
FAILED = jax.errors.JaxRuntimeError


@pytest.fixture(scope="module")
def mock():
    with mock_device() as device:
        yield device


@pytest.fixture(params=["npu", "host"])
def executor(request, mock) -> str:
    """Both places that pages can be in: the rules are the same."""
    return request.param


# --- values --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    heads: tuple[int, int] = (4, 2)
    page_size: int = 16
    head_dim: int = 16
    dtype: str = "float16"
    window: int | None = None
    soft_cap: float | None = None
    scale: float | None = None


CASES = [
    Case(),
    Case(heads=(4, 4), window=7),
    Case(heads=(8, 1), dtype="bfloat16", soft_cap=2.5),
    Case(heads=(9, 3), page_size=32, window=20, scale=0.3),
    Case(heads=(2, 2), head_dim=64, soft_cap=4.0, window=33),
]


def pages_of(arrays) -> dict:
    """What a pool for the arrays of a case is opened with."""
    pages, page_size, kv_heads, head_dim = arrays.k_pages.shape
    slots, heads = arrays.q.shape[:2]
    return dict(
        num_layers=1,
        num_pages=pages,
        page_size=page_size,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        num_heads=heads,
        max_slots=slots,
        pages_per_slot=arrays.page_indices.shape[1],
        max_tokens=pages * page_size,
        dtype=arrays.q.dtype,
    )


def filled_pool(arrays, executor: str) -> ascend.DevicePool:
    """Opens a pool and writes every place of it, the NaN of unowned ones too."""
    pool = ascend.open_pool(executor=executor, **pages_of(arrays))
    pages, page_size = arrays.k_pages.shape[:2]
    places = jnp.arange(pages * page_size)
    k, v = (
        jnp.asarray(x).reshape(-1, *x.shape[2:])
        for x in (arrays.k_pages, arrays.v_pages)
    )
    return ascend.write_kv(pool, 0, k, v, places // page_size, places % page_size)


def assert_close(arrays, out, lse, options) -> None:
    """The rule of ATB's tests, 2^-8 (2^-7 bfloat16); nothing is exactly nothing."""
    want, want_lse = attention_oracle(*arrays.__dict__.values(), **options)
    rate = 2.0**-7 if out.dtype.name == "bfloat16" else 2.0**-8
    error = np.abs(np.asarray(out, np.float64) - want)
    assert np.all(error <= rate * np.maximum(1, np.abs(want))), error.max()
    blind = np.isinf(want_lse)
    assert np.all(np.asarray(out, np.float32)[blind] == 0)
    assert np.all(np.isneginf(np.asarray(lse)[blind]))
    np.testing.assert_allclose(np.asarray(lse)[~blind], want_lse[~blind], atol=2e-3)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_matches_the_oracle(case: Case, mock) -> None:
    page = case.page_size
    arrays = attention_cases.make_arrays(
        [0, 1, page - 1, page, page + 1, 2 * page + 5],
        pages_per_slot=4,
        page_size=page,
        heads=case.heads,
        head_dim=case.head_dim,
        dtype=case.dtype,
    )
    options = dict(window=case.window, soft_cap=case.soft_cap, scale=case.scale)
    q, table, lens = (
        jnp.asarray(x) for x in (arrays.q, arrays.page_indices, arrays.seq_lens)
    )
    results = {}
    for executor in ("npu", "host"):
        pool = filled_pool(arrays, executor)
        _, (out, lse) = jax.jit(
            lambda pool, *xs: ascend.paged_attention(
                pool, 0, *xs, return_lse=True, **options
            )
        )(pool, q, table, lens)
        assert_close(arrays, out, lse, options)
        results[executor] = np.asarray(out, np.float32), np.asarray(lse)
        ascend.close_pool(pool)
    for npu_got, host_got in zip(results["npu"], results["host"], strict=True):
        np.testing.assert_allclose(npu_got, host_got, rtol=2e-2, atol=2e-3)


def test_arrays_of_the_host_are_attended_to_on_the_npu(mock) -> None:
    """implementation="ascend" on the cpu platform; unowned places are NaN."""
    arrays = attention_cases.make_arrays(
        [0, 16, 5, 40], page_size=16, heads=(4, 2), head_dim=16, dtype="float16"
    )
    assert pj.available_implementations()["ascend"][0]
    for options in ({}, {"window": 9, "soft_cap": 3.0}):
        out, lse = pj.paged_attention(
            *arrays.args(), implementation="ascend", return_lse=True, **options
        )
        assert_close(arrays, out, lse, options)
    batched = jax.vmap(
        lambda q: pj.paged_attention(q, *arrays.args()[1:], implementation="ascend")
    )(jnp.stack([jnp.asarray(arrays.q)] * 2))
    np.testing.assert_array_equal(batched[0], batched[1])
    held = mock.held()
    with pytest.raises(NotImplementedError, match="page_size 8 is not a multiple of"):
        small = attention_cases.make_arrays([3], page_size=8, dtype="float16")
        pj.paged_attention(*small.args(), implementation="ascend")
    assert mock.held() == held


def test_writes_and_copies_are_exact(executor: str) -> None:
    """Against NumPy, in both layers, with tokens and pairs that have no page."""
    rng = np.random.default_rng(0)
    pool = open_small(executor=executor, max_tokens=8)
    shape = pool.shape
    held = np.zeros((2, 2, shape.num_pages, 16, 2, 16), np.float16)  # k or v, layer

    @jax.jit
    def write(pool, layer, k, v, pages, offsets):
        return ascend.write_kv(pool, layer, k, v, pages, offsets)

    copy, read = jax.jit(ascend.copy_pages), jax.jit(ascend.read_pages)
    for step in range(12):
        layer = step % 2
        places = rng.choice(shape.num_pages * 16, 8, replace=False)
        pages, offsets = places // 16, places % 16
        pages[:3] = [shape.num_pages, -1, 2**30]
        offsets[4] = 16
        kv = tokens_for(pool, 8, seed=step)
        pool = write(pool, layer, *kv, jnp.asarray(pages), jnp.asarray(offsets))
        for i in (3, 5, 6, 7):
            for kind in (0, 1):
                held[kind, layer, pages[i], offsets[i]] = np.asarray(kv[kind])[i]
        if step % 3 == 2:
            src, dst = rng.choice(shape.num_pages, 4, replace=False).reshape(2, 2)
            src[1] = src[0]  # one page to two places
            pool = copy(pool, jnp.append(src, 6), jnp.append(dst, 0))
            held[:, :, dst] = held[:, :, src]
    for layer in (0, 1):
        pool, k, v = read(pool, layer, jnp.array([0, 1, 2, 3, 4, 5, 6, -1]))
        np.testing.assert_array_equal(k[:6], held[0, layer])
        np.testing.assert_array_equal(v[:6], held[1, layer])
        assert not np.any(k[6:]) and not np.any(v[6:])
    ascend.close_pool(pool)


def test_a_scan_over_steps_and_layers_is_one_program(executor: str) -> None:
    """Forty steps of two layers inside one program, against one step at a time."""
    steps = 40

    def step(pool, i):
        out = 0.0
        table, length = jnp.arange(3, dtype=jnp.int32)[None], jnp.full((1,), i + 1)
        for layer in range(2):
            kv = [jnp.full((1, 2, 16), (i % 7) * 0.25 + layer + n) for n in (0, 1)]
            q = jnp.full((1, 4, 16), 0.1) * (1 + layer)
            pool, got = ascend.attend(
                pool,
                layer,
                *(x.astype(jnp.float16) for x in (q, *kv)),
                (i // 16)[None],
                (i % 16)[None],
                table,
                length,
            )
            out = out + got[0, 0, 0].astype(jnp.float32)
        return pool, out

    numbers = jnp.arange(steps)
    pool, outs = jax.jit(lambda pool: jax.lax.scan(step, pool, numbers))(
        open_small(executor=executor)
    )
    assert int(pool.version) == 2 * steps
    ascend.close_pool(pool)
    pool, single = open_small(executor=executor), []
    jitted = jax.jit(step)
    for i in range(steps):
        pool, out = jitted(pool, numbers[i])
        single.append(out)
    ascend.close_pool(pool)
    np.testing.assert_array_equal(outs, np.stack(single))
    assert len(set(np.asarray(outs).tolist())) > steps // 2


def test_one_program_serves_every_pool(executor: str) -> None:
    traced = []

    @jax.jit
    def write(*args):
        traced.append(1)
        return ascend.write_kv(*args)

    pools = [open_small(executor=executor) for _ in range(3)]
    kv = tokens_for(pools[0], 1)
    for pool in pools:
        assert int(write(pool, 0, *kv, jnp.array([0]), jnp.array([0])).version) == 1
        ascend.close_pool(pool)
    assert len(traced) == 1


def supported_cases() -> list:
    """The cases of the attention suite that the kernels can do; a few of them quick."""
    able = [
        case
        for case in attention_cases.pairwise_cases()
        if case.page_size % 16 == 0 and case.dtype != "float32"
    ]
    assert len(able) > 15
    return able[:3] + [pytest.param(x, marks=pytest.mark.slow) for x in able[3:]]


@pytest.mark.parametrize("case", supported_cases(), ids=str)
def test_the_attention_suite(case: attention_cases.Case, mock) -> None:
    arrays = attention_cases.case_arrays(case, ragged=False)
    call = jax.jit(
        functools.partial(
            pj.paged_attention,
            implementation="ascend",
            return_lse=True,
            **case.options,
        )
    )
    assert_close(arrays, *call(*arrays.args()), case.options)


# --- versions ------------------------------------------------------------------------


def test_only_the_last_version_can_be_changed(executor: str) -> None:
    old = open_small(executor=executor)
    k, v = tokens_for(old, 1)
    at = jnp.array([2]), jnp.array([0])
    new = ascend.write_kv(old, 0, k, v, *at)
    with pytest.raises(FAILED, match="stale pool version: .*version 0 .*version 1"):
        ascend.write_kv(old, 0, k, v, *at).version.block_until_ready()
    with pytest.raises(FAILED, match="stale pool version"):
        ascend.copy_pages(old, *at).version.block_until_ready()
    with pytest.raises(FAILED, match="stale pool version"):
        q, table = queries_for(old, 1), jnp.array([[2]])
        ascend.attend(old, 0, q, k, v, *at, table, jnp.array([1]))[
            1
        ].block_until_ready()
    future = dataclasses.replace(new, version=jnp.int32(9))
    with pytest.raises(FAILED, match="unknown pool version 9"):
        ascend.read_pages(future, 0, at[0])[1].block_until_ready()
    assert ascend.pool_status(new).version == 1
    ascend.close_pool(new)


def test_an_old_version_is_readable_while_its_pages_are_whole(executor: str) -> None:
    pool = open_small(executor=executor)
    kv = tokens_for(pool, 1)
    snapshot = ascend.write_kv(pool, 0, *kv, jnp.array([2]), jnp.array([0]))
    q, lens = queries_for(pool, 1), jnp.array([1])

    def look(pool, page, layer=0):
        table = jnp.array([[page, 5]])  # page 5 is past the end
        return np.asarray(ascend.paged_attention(pool, layer, q, table, lens)[1])

    first = look(snapshot, 2)
    other = ascend.write_kv(snapshot, 0, *kv, jnp.array([5]), jnp.array([0]))
    other = ascend.write_kv(other, 1, *kv, jnp.array([2]), jnp.array([0]))
    np.testing.assert_array_equal(look(snapshot, 2), first)  # neither was page 2
    last = ascend.copy_pages(other, jnp.array([5]), jnp.array([2]))
    with pytest.raises(FAILED, match="page 2 of layer 0 was rewritten in version 4"):
        look(snapshot, 2)
    look(last, 2)
    with pytest.raises(FAILED, match="page 2 of layer 1 was rewritten in version 4"):
        ascend.read_pages(other, 1, jnp.array([2]))[1].block_until_ready()
    np.testing.assert_array_equal(look(snapshot, 3), 0)  # never written
    ascend.close_pool(last)


def test_a_window_frees_old_pages_for_others(executor: str) -> None:
    """What the window hides may be rewritten under an old version."""
    pool = open_small(executor=executor)
    k, v = tokens_for(pool, 1)
    pool = ascend.write_kv(pool, 0, k, v, jnp.array([1]), jnp.array([4]))
    new = ascend.write_kv(pool, 0, k, v, jnp.array([0]), jnp.array([4]))
    args = (0, queries_for(pool, 1), jnp.array([[0, 1]]), jnp.array([21]))
    ascend.paged_attention(pool, *args, window=5)[1].block_until_ready()
    with pytest.raises(FAILED, match="page 0 of layer 0 was rewritten"):
        ascend.paged_attention(pool, *args, window=6)[1].block_until_ready()
    ascend.close_pool(new)


# --- mistakes ------------------------------------------------------------------------


def test_mistakes_change_nothing(executor: str) -> None:
    pool = open_small(executor=executor)
    k, v = tokens_for(pool, 2)
    bad = {
        "layer 2 is not in 0 .. 1": lambda: ascend.write_kv(
            pool, jnp.int32(2), k, v, jnp.array([0, 1]), jnp.array([0, 0])
        ),
        "two tokens are written to offset 3 of page 1": lambda: ascend.write_kv(
            pool, 0, k, v, jnp.array([1, 1]), jnp.array([3, 3])
        ),
        "page 4 is copied to twice": lambda: ascend.copy_pages(
            pool, jnp.array([0, 1]), jnp.array([4, 4])
        ),
        "page 1 is copied both from and to": lambda: ascend.copy_pages(
            pool, jnp.array([0, 1]), jnp.array([1, 2])
        ),
        "the plan has 4 copies, the pool was opened for 3": lambda: ascend.copy_pages(
            pool, jnp.full(4, 6), jnp.full(4, 6)
        ),
    }
    for message, call in bad.items():
        with pytest.raises((FAILED, ValueError), match=message):
            call().version.block_until_ready()
    assert ascend.pool_status(pool).state == "open"
    assert ascend.pool_status(pool).version == 0
    ascend.close_pool(pool)


def test_shapes_are_checked_when_traced(executor: str) -> None:
    pool = open_small(executor=executor)
    k, v = tokens_for(pool, 1)
    one, q = jnp.array([0]), queries_for(pool, 1)
    table = jnp.array([[0]])
    for error, message, call in (
        (TypeError, "k must have the pool's dtype float16, got float32",
         lambda: ascend.write_kv(pool, 0, k.astype(jnp.float32), v, one, one)),
        (ValueError, "v must have shape",
         lambda: ascend.write_kv(pool, 0, k, v[:, :1], one, one)),
        (ValueError, "4 tokens are more than max_tokens=3",
         lambda: ascend.write_kv(
             pool, 0, *tokens_for(pool, 4), jnp.arange(4), jnp.arange(4))),
        (ValueError, "q must have shape",
         lambda: ascend.paged_attention(pool, 0, q[:, :2], table, one)),
        (ValueError, "4 slots are not in 1 .. max_slots=3",
         lambda: ascend.paged_attention(
             pool, 0, queries_for(pool, 4), jnp.zeros((4, 1), int), jnp.zeros(4, int))),
        (ValueError, "5 columns of page_indices",
         lambda: ascend.paged_attention(pool, 0, q, jnp.zeros((1, 5), int), one)),
        (ValueError, "window must be at least 1",
         lambda: ascend.paged_attention(pool, 0, q, table, one, window=0)),
        (TypeError, "pages must hold integers",
         lambda: ascend.write_kv(pool, 0, k, v, one * 1.0, one)),
        (NotImplementedError, "vmap",
         lambda: jax.vmap(
             lambda q: ascend.paged_attention(pool, 0, q, table, one)[1])(q[None])),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()
    ascend.close_pool(pool)


def test_opening_refuses_with_numbers(mock) -> None:
    held = mock.held()
    for message, sizes in (
        ("page_size 24 is not a multiple of 16", {"page_size": 24}),
        ("head_dim 24 is not a multiple of 16", {"head_dim": 24}),
        ("num_heads=3 must be a multiple of num_kv_heads=2", {"num_heads": 3}),
        ("num_pages must be an int of at least 1, got 0", {"num_pages": 0}),
        ("float16 and bfloat16 only", {"dtype": jnp.float32}),
        ("dtype must be one of float32", {"dtype": jnp.int8}),
        ("executor must be", {"executor": "gpu"}),
        ("bytes of the unified buffer", {"num_heads": 256, "head_dim": 256}),
        ("more places than int32 can count", {"num_pages": 2**30}),
        ("no NPU 3: there are 1", {"device": 3}),
    ):
        with pytest.raises((ValueError, NotImplementedError), match=message):
            open_small(**sizes)
    assert mock.held() == held


def test_a_closed_pool_says_so(executor: str) -> None:
    pool = open_small(executor=executor)
    assert ascend.pool_status(pool).device_bytes > 0
    ascend.close_pool(pool)
    ascend.close_pool(pool)
    assert ascend.pool_status(pool) == ascend.PoolStatus("closed", 0, 0, "")
    with pytest.raises(FAILED, match="is closed"):
        ascend.read_pages(pool, 0, jnp.array([0]))[1].block_until_ready()
    never = dataclasses.replace(pool, handle=jnp.int32(10**6))
    with pytest.raises(FAILED, match="pool 1000000 was never opened"):
        ascend.read_pages(never, 0, jnp.array([0]))[1].block_until_ready()
    with pytest.raises(NotImplementedError, match="was never opened"):
        ascend.close_pool(never)


def test_an_error_inside_a_scan_leaves_a_pool_that_goes_on(executor: str) -> None:
    """The third step names a layer that is not there; two steps have happened."""
    pool = open_small(executor=executor)
    k, v = tokens_for(pool, 1)

    def step(pool, layer):
        at = jnp.array([0]), jnp.array([0])
        return ascend.write_kv(pool, layer, k, v, *at), None

    with pytest.raises((FAILED, ValueError), match="layer 7 is not in 0 .. 1"):
        layers = jnp.array([0, 1, 7, 0])
        jax.block_until_ready(jax.jit(lambda p: jax.lax.scan(step, p, layers))(pool))
    assert ascend.pool_status(pool).version == 2
    pool, _ = step(ascend.latest(pool), 0)
    assert int(pool.version) == 3
    ascend.close_pool(pool)


# --- what crosses the bus ------------------------------------------------------------


def test_a_step_sends_what_the_table_says(mock) -> None:
    """One copy each way, one wait, no allocation; the bytes are `step_traffic`'s."""
    pool = open_small(num_layers=1)
    q, (k, v) = queries_for(pool, 3), tokens_for(pool, 3)
    ids = jnp.arange(3)
    step = jax.jit(
        lambda pool: ascend.attend(
            pool, 0, q, k, v, ids, ids, jnp.zeros((3, 4), int), jnp.full(3, 40)
        )
    )
    mock.reset_counts()
    for _ in range(5):
        pool, out = step(pool)
    out.block_until_ready()
    traffic = ascend.step_traffic(
        context=40,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        page_size=16,
        slots=3,
        pages_per_slot=4,
    )
    assert mock.copied(1) == 5 * traffic.to_device
    assert mock.copied(2) == 5 * traffic.from_device
    assert mock.waits() == 5 * traffic.exchanges
    assert mock.launches() == 5 * 3
    assert mock.allocations() == 0
    assert traffic.kv_bytes == 3 * 40 * 2 * 2 * 16 * 2
    ascend.close_pool(pool)


def test_the_table_of_the_documentation_is_computed() -> None:
    page = Path(__file__).parent.parent / "docs" / "ascend.md"
    assert traffic_table() in page.read_text()


def test_pools_may_be_used_from_several_threads(mock) -> None:
    """A context belongs to a thread; each call enters its own."""
    outs = {}

    def work(n: int) -> None:
        pool, other = open_small(), open_small()
        k, v = tokens_for(pool, 1, seed=n)
        for i in range(4):
            at = jnp.array([i]), jnp.array([0])
            pool = ascend.write_kv(pool, 0, k, v * 0 + n, *at)
            other = ascend.write_kv(other, 1, k, v * 0 - n, *at)
        _, _, got = ascend.read_pages(pool, 0, jnp.arange(4))
        outs[n] = np.asarray(got[:, 0])
        ascend.close_pool(other)
        ascend.close_pool(pool)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in range(4):
        assert np.all(outs[n] == n)


# --- where a pool is -----------------------------------------------------------------


def test_a_forked_process_leaves_the_device_alone(mock) -> None:
    """Closing there frees nothing; the parent goes on."""
    pool = open_small()
    before = mock.held()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forking a process with threads
        child = os.fork()
    if child == 0:
        failed, _ = _device_library.call("pool_close", int(pool.handle))
        able, text = ascend.usable()
        fine = not failed and not able and "before a fork" in text
        _device_library.require().pagedjax_pool_shutdown()
        os._exit(0 if fine and mock.held() == before else 1)
    assert os.waitpid(child, 0)[1] == 0
    ascend.read_pages(pool, 0, jnp.array([0]))[1].block_until_ready()
    ascend.close_pool(pool)


def test_kernels_for_another_chip_are_refused(mock, monkeypatch) -> None:
    monkeypatch.setenv("PAGEDJAX_MOCK_SOC", "Ascend910A")
    able, text = ascend.usable()
    assert not able and "arch 1001" in text and "for arch 2201" in text
    monkeypatch.setenv("PAGEDJAX_MOCK_DEVICES", "0")
    assert ascend.diagnose()["device"].startswith("missing: no NPU")
    with pytest.raises(NotImplementedError, match="no NPU"):
        open_small()
    pool = open_small(executor=None)
    assert pool.executor == "host"
    ascend.close_pool(pool)


def test_what_the_npu_cannot_is_opened_on_the_host(mock) -> None:
    pool = open_small(executor=None)
    assert pool.executor == "npu"
    ascend.close_pool(pool)
    pool = open_small(executor=None, dtype=jnp.float32)
    assert pool.executor == "host"
    ascend.close_pool(pool)
