"""Limits of a pool and options of its calls: what is taken, clipped or refused."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ascend_device import mock_device, needs_mock, open_small, queries_for, tokens_for
from ascend_kernels import Library
from hypothesis import given
from hypothesis import strategies as st

from ascend_bridge import _options, ascend
from ascend_bridge.kernels.build import build_simulated

pytestmark = needs_mock
FAILED = jax.errors.JaxRuntimeError
TABLE, ONE = np.array([[0, 1]], np.int32), np.array([1], np.int32)


@pytest.fixture(scope="module")
def mock():
    with mock_device() as device:
        yield device


@pytest.fixture(params=["npu", "host"])
def executor(request, mock) -> str:
    return request.param


# --- working space -------------------------------------------------------------------


@given(
    cores=st.integers(1, 64),
    slots=st.integers(1, 9),
    kv_heads=st.sampled_from([1, 2, 8]),
    page_size=st.sampled_from([16, 128, 512]),
    pages_per_slot=st.integers(1, 70),
    length=st.integers(1, 70 * 512),
    window=st.integers(0, 5000),
)
def test_no_call_is_cut_into_more_than_the_working_space_is_for(
    cores, slots, kv_heads, page_size, pages_per_slot, length, window
) -> None:
    """What an open pool reserves rests on this: at most an item for each core."""
    plan = Library(build_simulated(2201), 2201).plan_attention(
        cores=cores,
        slots=slots,
        heads=4 * kv_heads,
        kv_heads=kv_heads,
        head_dim=16,
        num_pages=1,
        page_size=page_size,
        pages_per_slot=pages_per_slot,
        max_tokens=length,
        window=window,
    )
    assert plan.tiling.splits <= max(1, min(64, cores // (slots * kv_heads)))


def test_every_length_and_window_has_its_working_space(mock) -> None:
    """768 tokens are cut into 4 parts, and so are 769; the whole row of 1152 into 3."""
    sizes = dict(num_layers=1, num_pages=9, page_size=128, num_kv_heads=1)
    sizes |= dict(num_heads=8, pages_per_slot=9)
    for most_slots in (1, 3):
        pool = open_small(**sizes, max_slots=most_slots)
        q, table = queries_for(pool, 1), jnp.arange(9, dtype=jnp.int32)[None]
        attend = jax.jit(ascend.paged_attention, static_argnames="window")
        for length in (1, 768, 769, 1024, 1025, 1152):
            attend(pool, 0, q, table, jnp.array([length]))[1].block_until_ready()
        window = attend(pool, 0, q, table, jnp.array([1152]), window=800)[1]
        assert not np.any(window)  # nothing was written
        ascend.close_pool(pool)


# --- sizes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ({"num_pages": True}, TypeError, "num_pages must be an int of at least 1"),
        ({"num_pages": 4.0}, TypeError, "num_pages must be an int"),
        ({"head_dim": 2**31}, ValueError, "head_dim must be at most 2147483647"),
        ({"device": 2**32}, ValueError, "device must be at most"),
        ({"device": -1}, ValueError, "device must be an int of at least 0"),
        ({"timeout_ms": 1.5}, TypeError, "timeout_ms must be an int"),
        ({"timeout_ms": 0}, ValueError, "timeout_ms must be an int of at least 1"),
        (
            {"num_layers": 2**30, "num_pages": 2**30},
            ValueError,
            "more places than int32",
        ),
        (
            dict.fromkeys(("num_layers", "num_pages", "page_size"), 2**31 - 1),
            ValueError,
            "more places than int32",
        ),
        ({"head_dim": 2**30, "num_kv_heads": 2**30}, MemoryError, "the keys take more"),
        ({"head_dim": 2**31 - 1, "num_kv_heads": 2**30}, MemoryError, "the keys take"),
        ({"max_tokens": 2**31 - 1, "head_dim": 2**20}, MemoryError, "the new keys"),
        ({"max_slots": 2**31 - 1, "max_tokens": 1}, MemoryError, "queries of a call"),
        (
            {"pages_per_slot": 2**31 - 1, "max_slots": 2**17, "max_tokens": 1},
            MemoryError,
            "the table of a call",
        ),
    ],
)
def test_sizes_that_cannot_be(sizes: dict, error: type, message: str) -> None:
    heads = sizes.get("num_kv_heads", 2) if "max_slots" not in sizes else 2**20
    with pytest.raises(error, match=message):
        open_small(executor="host", num_heads=heads, **sizes)


def test_sizes_may_be_numbers_of_numpy() -> None:
    pool = open_small(executor="host", num_pages=np.int64(4), device=np.int32(0))
    assert pool.shape.num_pages == 4 and type(pool.shape.num_pages) is int
    ascend.close_pool(pool)


# --- options -------------------------------------------------------------------------


def call(pool: ascend.DevicePool, layer=0, **options) -> jax.Array:
    q = queries_for(pool, 1)
    return ascend.paged_attention(pool, layer, q, TABLE, ONE, **options)[1]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"window": 2.5}, TypeError, "window must be an int or None, got 2.5"),
        ({"window": 0}, ValueError, "window must be at least 1, got 0"),
        ({"soft_cap": 1e-46}, ValueError, "soft_cap must be positive and finite"),
        ({"soft_cap": 1e39}, ValueError, "soft_cap must be positive and finite"),
        ({"soft_cap": 0.0}, ValueError, "soft_cap must be positive and finite"),
        ({"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
        ({"scale": 1e39}, ValueError, "scale must be finite"),
        ({"layer": jnp.array([0])}, ValueError, r"layer must be one number, got .*1,"),
        ({"layer": 1.0}, TypeError, "layer must hold integers"),
    ],
)
def test_options_that_cannot_be(options: dict, error: type, message: str) -> None:
    pool = open_small(executor="host")
    with pytest.raises(error, match=message):
        call(pool, **options)
    ascend.close_pool(pool)


@pytest.mark.parametrize("name", ["scale", "window", "soft_cap"])
def test_a_traced_option_is_named(name: str) -> None:
    pool = open_small(executor="host")
    with pytest.raises(TypeError, match=f"{name} must be a Python .* traced value"):
        jax.jit(lambda value: call(pool, **{name: value}))(3)
    ascend.close_pool(pool)


def test_a_window_past_int32_hides_nothing(executor: str) -> None:
    pool = open_small(executor=executor)
    k, v = tokens_for(pool, 1)
    pool = ascend.write_kv(pool, 0, k, v, ONE - 1, ONE - 1)
    np.testing.assert_array_equal(call(pool, window=2**70), call(pool))
    assert np.any(call(pool))
    ascend.close_pool(pool)


def test_a_length_over_the_table_is_the_table_s(executor: str) -> None:
    pool = open_small(executor=executor, max_tokens=32)
    k, v = tokens_for(pool, 32)
    places = jnp.arange(32)
    pool = ascend.write_kv(pool, 0, k, v, places // 16, places % 16)
    q, table = queries_for(pool, 2), jnp.array([[0, 1], [1, 0]])
    outs = [
        ascend.paged_attention(pool, 0, q, table, jnp.array(lens), return_lse=True)[1]
        for lens in ([32, 0], [40, -1])
    ]
    for exact, over in zip(*outs, strict=True):
        np.testing.assert_array_equal(exact, over)
    assert np.all(np.isfinite(outs[0][1][0])) and np.all(np.isneginf(outs[0][1][1]))
    # It is not continued in the row of the next slot, whose page is rewritten here.
    table, lens = jnp.array([[0, 1], [2, 2]]), jnp.array([40, 0])
    ascend.write_kv(pool, 0, k[:1], v[:1], ONE + 1, ONE)
    ascend.paged_attention(pool, 0, q, table, lens)[1].block_until_ready()
    ascend.close_pool(pool)


def test_a_page_past_int32_is_no_page() -> None:
    with jax.enable_x64(True):
        pool = open_small(executor="host")
        k, v = tokens_for(pool, 2)
        pages = jnp.array([2**32, -(2**32)], jnp.int64)
        pool = ascend.write_kv(pool, 0, k, v, pages, jnp.array([0, 0]))
        _, held, _ = ascend.read_pages(pool, 0, jnp.array([0]))
        assert not np.any(held)
        ascend.close_pool(pool)
        assert _options.int32("x", jnp.array([2**63 - 1, -(2**63), 5])).tolist() == [
            2**31 - 1,
            -(2**31),
            5,
        ]
    assert _options.int32("x", jnp.array([2**32 - 1], jnp.uint32)).tolist() == [
        2**31 - 1
    ]


def test_numpy_ids_past_int32_are_not_cut() -> None:
    """Without 64 bits jax would keep the low half of each."""
    pool = open_small(executor="host")
    k, v = tokens_for(pool, 2)
    pool = ascend.write_kv(pool, 0, k, v, np.array([2**40, 2**33]), np.array([0, 0]))
    _, held, _ = ascend.read_pages(pool, 0, jnp.array([0]))
    assert not np.any(held)
    ascend.close_pool(pool)
    assert _options.int32("x", np.array([2**40, -(2**40), 5])).tolist() == [
        2**31 - 1,
        -(2**31),
        5,
    ]


# --- versions and devices ------------------------------------------------------------


def test_a_step_makes_the_version_before_it_unreadable(executor: str) -> None:
    old = open_small(executor=executor)
    k, v = tokens_for(old, 1)
    q = queries_for(old, 1)
    new, _ = ascend.attend(old, 0, q, k, v, ONE - 1, ONE - 1, TABLE, ONE)
    with pytest.raises(FAILED, match="page 0 of layer 0 was rewritten in version 1"):
        call(old).block_until_ready()
    call(old, layer=1).block_until_ready()
    call(new).block_until_ready()
    ascend.close_pool(new)


def test_a_pool_may_be_of_numpy_or_traced_as_a_constant() -> None:
    pool = jax.device_get(open_small(executor="host"))
    k, v = tokens_for(pool, 1)
    pool = ascend.write_kv(pool, 0, k, v, ONE, ONE)
    held = jax.device_get(pool)
    write = jax.jit(lambda k: ascend.write_kv(held, 0, k, v, ONE, ONE).version)
    assert int(write(k)) == 2
    ascend.close_pool(pool)


def test_a_pool_is_for_one_device() -> None:
    pool = open_small(executor="host")
    mesh = jax.make_mesh(
        (2,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2]
    )
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    q = jax.device_put(queries_for(pool, 2), spread)
    rest = jnp.array([[0], [1]]), jnp.array([1, 1])

    def attend(q):
        return ascend.paged_attention(pool, 0, q, *rest)[1]

    message = "a pool is used from one device, but this call is for 2"
    for function in (attend, jax.jit(attend)):
        with pytest.raises(ValueError, match=message):
            function(q)

    def attend_one(q):
        one = jnp.array([[0]]), jnp.array([1])
        return ascend.paged_attention(pool, 0, q, *one)[1]

    inside = jax.shard_map(
        attend_one,
        mesh=mesh,
        in_specs=spread.spec,
        out_specs=spread.spec,
        check_vma=False,
    )
    with pytest.raises(ValueError, match=message):
        jax.jit(inside)(q)
    assert attend(jax.device_put(q, jax.devices()[0])).shape == q.shape
    ascend.close_pool(pool)


# --- what is loaded ------------------------------------------------------------------


def in_a_fresh_process(code: str, **environment: str) -> str:
    code = (
        f"import os, sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"os.environ.update({environment!r})\n"
        "from ascend_bridge import ascend\n" + code
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_library_that_is_something_else_is_named() -> None:
    said = in_a_fresh_process(
        "print(*ascend.diagnose().values(), sep='\\n')",
        PAGEDJAX_ACL_LIBRARY="libm.so.6",
        PAGEDJAX_ASCEND_KERNELS="libdl.so.2",
    )
    assert "libm.so.6 is no such runtime: it has no function aclInit" in said
    assert "libdl.so.2 is no kernel library: it has no function pagedjax_" in said


@pytest.mark.parametrize("wish", ["malloc:x", "mallok:1", "malloc:", "malloc:0"])
def test_a_disturbance_that_is_none_is_told(wish: str) -> None:
    said = in_a_fresh_process(
        "from ascend_device import *\n"
        "os.environ['PAGEDJAX_ACL_LIBRARY'] = str(build_mock())\n"
        "print(ascend.diagnose()['runtime'])",
        PAGEDJAX_MOCK_ACL_FAIL=wish,
    )
    assert f"PAGEDJAX_MOCK_ACL_FAIL='{wish}' is not kind:n" in said
