"""The host executor's wrappers: numbers, options, transformations, refusals.

`test_attention.py` runs the parity suite over every implementation; here is what only
this one has: quantised pages, shared prefixes, batching by folding, other threads.
"""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import attention_oracle

from ascend_bridge import host

pytestmark = [
    pytest.mark.core,
    pytest.mark.skipif(not host.usable()[0], reason=host.usable()[1]),
]


def draw(
    lens: list[int],
    q_lens: list[int] | None = None,
    *,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 32,
    page_size: int = 8,
    shared_pages: int = 0,
    seed: int = 0,
) -> tuple[np.ndarray, ...]:
    """Return q, k_pages, v_pages, page_indices, seq_lens (and cu_q_lens)."""
    rng = np.random.default_rng(seed)
    width = max(1, *(-(-n // page_size) for n in lens))
    num_pages = width * len(lens) + 2
    table = rng.permutation(num_pages)[: width * len(lens)].reshape(len(lens), width)
    table[:, :shared_pages] = table[0, :shared_pages]
    shape = (num_pages, page_size, heads[1], head_dim)
    rows = len(lens) if q_lens is None else sum(q_lens)
    arrays = (
        rng.standard_normal((rows, heads[0], head_dim), np.float32),
        rng.standard_normal(shape, np.float32),
        rng.standard_normal(shape, np.float32),
        table.astype(np.int32),
        np.array(lens, np.int32),
    )
    if q_lens is None:
        return arrays
    return (*arrays, np.cumsum([0, *q_lens]).astype(np.int32))


def run(arrays: tuple, **options) -> tuple[np.ndarray, np.ndarray]:
    """Return (out, lse) of decode or ragged attention, as the arrays say."""
    attend = host.paged_attention if len(arrays) == 5 else host.ragged_paged_attention
    out, lse = attend(*(jnp.asarray(x) for x in arrays), return_lse=True, **options)
    return np.asarray(out), np.asarray(lse)


def assert_close(got: tuple, want: tuple) -> None:
    """Assert that (out, lse) are the same up to float32 rounding."""
    np.testing.assert_allclose(got[0], want[0], rtol=3e-6, atol=3e-6)
    np.testing.assert_allclose(got[1], want[1], rtol=3e-6, atol=3e-6)


RAGGED = ([40, 1, 0, 70], [9, 1, 0, 3])


@pytest.mark.parametrize("ragged", [False, True], ids=["decode", "ragged"])
@pytest.mark.parametrize("head_dim", [32, 64, 80])
def test_matches_oracle(ragged: bool, head_dim: int) -> None:
    arrays = draw(RAGGED[0], RAGGED[1] if ragged else None, head_dim=head_dim)
    for options in ({}, {"window": 11}, {"soft_cap": 2.0, "scale": 0.3}):
        assert_close(run(arrays, **options), attention_oracle(*arrays, **options))


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("ragged", [False, True], ids=["decode", "ragged"])
def test_quantised_pages(dtype: str, ragged: bool) -> None:
    arrays = list(draw(RAGGED[0], RAGGED[1] if ragged else None))
    rng = np.random.default_rng(1)
    scales = [rng.uniform(0.01, 0.1, arrays[1].shape[:3]) for _ in range(2)]
    scales = [x.astype(np.float32) for x in scales]
    whole = []
    for i, scale in zip((1, 2), scales, strict=True):
        arrays[i] = np.asarray(jnp.asarray(arrays[i] * 20, dtype))
        whole.append(arrays[i].astype(np.float32) * scale[..., None])
    got = run(
        tuple(arrays), k_scales=jnp.array(scales[0]), v_scales=jnp.array(scales[1])
    )
    assert_close(got, attention_oracle(arrays[0], *whole, *arrays[3:]))


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_every_value_of_a_byte(dtype: str) -> None:
    """NaN, denormals and both zeros: one token's output is its values."""
    v_pages = np.arange(256, dtype=np.uint8).view(dtype).reshape(1, 1, 4, 64)
    ones = jnp.ones((1, 1, 4))
    out = host.paged_attention(
        jnp.ones((1, 4, 64)),
        jnp.zeros_like(v_pages),
        v_pages,
        jnp.zeros((1, 1), jnp.int32),
        jnp.ones(1, jnp.int32),
        k_scales=ones,
        v_scales=ones * 0.5,
    )
    want = v_pages[0].astype(np.float32) * 0.5
    assert np.isnan(want).sum() == (2 if dtype == "float8_e4m3fn" else 0)
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("shared", [0, 4, 40])
def test_sharing_changes_nothing(shared: int) -> None:
    arrays = draw([400, 390, 330, 5, 400], page_size=8, shared_pages=shared)
    on, off = run(arrays), run(arrays, share_prefixes=False)
    assert_close(on, off)
    # Rows that share nothing worth it are computed as if alone, to the bit.
    np.testing.assert_array_equal(on[0][3], off[0][3])
    assert (shared > 4) == bool(np.any(on[0] != off[0]))


def test_batch_equals_alone() -> None:
    arrays = draw([300, 17, 0, 260])
    whole, _ = run(arrays)
    for s in range(4):
        one = (arrays[0][s : s + 1], *arrays[1:3], *(x[s : s + 1] for x in arrays[3:]))
        np.testing.assert_array_equal(run(one)[0][0], whole[s])


def test_few_queries_over_many_keys() -> None:
    """The keys of such a slot are split over threads and the parts merged."""
    arrays = draw([2600, 30], [3, 5], heads=(4, 2), page_size=16)
    for options in ({}, {"window": 2300}):
        assert_close(run(arrays, **options), attention_oracle(*arrays, **options))


def test_nan_reaches_only_the_queries_that_see_it() -> None:
    arrays = draw([60], [40], page_size=8)  # query i sits at 20 + i
    page, offset = arrays[3][0, 45 // 8], 45 % 8
    for pages in (1, 2):
        bad = list(arrays)
        bad[pages] = arrays[pages].copy()
        bad[pages][page, offset, 0, 3] = np.nan
        got, want = run(tuple(bad))[0], run(arrays)[0]
        np.testing.assert_array_equal(got[:25], want[:25])
        assert np.all(np.isnan(got[25:, :3]).any(axis=-1))  # heads of kv head 0
        np.testing.assert_array_equal(got[:, 3:], want[:, 3:])


@pytest.mark.parametrize("which", ["k_scales", "v_scales"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_scale_reaches_only_the_queries_that_see_it(
    which: str, bad: float
) -> None:
    arrays = list(draw([300], [61], page_size=8))  # query i sits at 239 + i
    for i in (1, 2):
        arrays[i] = np.asarray(jnp.asarray(arrays[i] * 20, "int8"))
    scales = {
        x: np.full(arrays[1].shape[:3], 0.05, "f4") for x in ("k_scales", "v_scales")
    }
    want = run(tuple(arrays), window=40, **scales)[0]
    scales[which] = scales[which].copy()
    scales[which][arrays[3][0, 250 // 8], 250 % 8, 0] = bad
    got = run(tuple(arrays), window=40, **scales)[0]
    seen = (np.arange(61) + 239 >= 250) & (np.arange(61) + 239 < 250 + 40)
    np.testing.assert_array_equal(got[~seen], want[~seen])
    same = (got == want).all(axis=-1)
    assert not same[seen][:, :3].any() and same[:, 3:].all()


@pytest.mark.parametrize("ids", [[-1], [10**9], [-(2**31)], [2**31 - 1], [26]])
def test_a_live_page_that_does_not_exist_skips_the_slot(ids: list[int]) -> None:
    arrays = draw([64, 64, 64], page_size=8)
    want = run(arrays)
    table = arrays[3].copy()
    table[1, 5] = ids[0]  # 26 is NULL: 3 slots of 8 pages and 2 more
    for options in ({}, {"window": 20}):
        want = run(arrays, **options)
        out, lse = run((*arrays[:3], table, arrays[4]), **options)
        assert np.all(out[1] == 0) and np.all(lse[1] == -np.inf)
        np.testing.assert_array_equal(out[[0, 2]], want[0][[0, 2]])
    # Outside the window nobody looks.
    out, _ = run((*arrays[:3], table, arrays[4]), window=16)
    np.testing.assert_array_equal(out, run(arrays, window=16)[0])


def test_lengths_out_of_range_are_clipped() -> None:
    arrays = draw([16, 16, 16])
    lens = np.array([-5, 2**31 - 1, 16], np.int32)
    out, lse = run((*arrays[:4], lens))
    assert np.all(out[0] == 0) and np.all(lse[0] == -np.inf)
    np.testing.assert_array_equal(out[1:], run(arrays)[0][1:])


@pytest.mark.parametrize("cu", [[0, 5, 3, 12], [-1, 1, 2, 12], [0, 1, 2, 99]])
def test_bad_row_sums_are_an_error(cu: list[int]) -> None:
    arrays = draw([16, 16, 16], [4, 4, 4])
    bad = (*arrays[:5], np.array(cu, np.int32))
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="cu_q_lens"):
        run(bad)


# --- transformations -----------------------------------------------------------------


@pytest.mark.parametrize("ragged", [False, True], ids=["decode", "ragged"])
@pytest.mark.parametrize("pages_too", [False, True], ids=["one_pool", "pools"])
def test_vmap_folds_the_batch(ragged: bool, pages_too: bool) -> None:
    members = [
        draw(lens, [min(3, n) for n in lens] if ragged else None, seed=i)
        for i, lens in enumerate(([20, 9], [3, 20], [20, 0]))
    ]
    if ragged:  # equal numbers of rows: pad to 6
        rows = [np.resize(m[0], (6, *m[0].shape[1:])) for m in members]
        members = [(q, *m[1:]) for q, m in zip(rows, members, strict=True)]
    if not pages_too:
        members = [(m[0], *members[0][1:3], *m[3:]) for m in members]
    axes = tuple(
        None if i in (1, 2) and not pages_too else 0 for i in range(len(members[0]))
    )
    stacked = tuple(
        jnp.asarray(members[0][i] if axes[i] is None else np.stack(x))
        for i, x in enumerate(zip(*members, strict=True))
    )
    attend = host.ragged_paged_attention if ragged else host.paged_attention
    batched = jax.jit(jax.vmap(partial(attend, return_lse=True), in_axes=axes))
    out, lse = batched(*stacked)
    for i, member in enumerate(members):
        want = run(member)
        np.testing.assert_array_equal(out[i], want[0])
        np.testing.assert_array_equal(lse[i], want[1])
    assert batched.lower(*stacked).as_text().count("custom_call @pagedjax") == 1


@pytest.mark.parametrize("check_vma", [False, True])
def test_shard_map_over_kv_heads_never_hangs(check_vma: bool) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("heads",))
    arrays = draw([500, 1, 0, 700], heads=(8, 4), page_size=16)
    want = run(arrays)
    specs = (P(None, "heads"), P(None, None, "heads"), P(None, None, "heads"), P(), P())

    def attend(q, *rest):
        out, lse = host.paged_attention(q, *rest, return_lse=True)
        for result in (out, lse):
            assert jax.typeof(result).manual_axis_type == jax.typeof(q).manual_axis_type
        return out, lse

    call = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=specs,
        out_specs=(P(None, "heads"), P(None, "heads")),
        check_vma=check_vma,
    )

    @jax.jit
    def steps(q, *rest):
        def step(_, q):
            out, _ = call(q, *rest)
            return q + 0 * out  # each step waits for the one before

        return call(jax.lax.fori_loop(0, 200, step, q), *rest)

    placed = (
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(arrays, specs, strict=True)
    )
    assert_close(tuple(np.asarray(x) for x in steps(*placed)), want)


def test_unused_call_is_removed() -> None:
    arrays = tuple(jnp.asarray(x) for x in draw([4]))
    text = jax.jit(lambda *a: (host.paged_attention(*a), a[0])[1]).lower(*arrays)
    assert "pagedjax" not in text.compile().as_text()


# --- pages ---------------------------------------------------------------------------


def pool_pair() -> tuple[jax.Array, jax.Array]:
    """Return keys and values of 2 layers of 3 pages of 2 tokens."""
    keys = jnp.arange(6 * 2 * 2 * 4, dtype=jnp.float32).reshape(6, 2, 2, 4)
    return keys, -keys


def test_write_is_in_place_and_skips_what_has_no_place() -> None:
    k_pages, v_pages = pool_pair()
    before = [np.asarray(x).copy() for x in (k_pages, v_pages)]
    new = jnp.full((4, 2, 4), 7.0)
    pages, offsets = jnp.array([5, 6, -1, 0]), jnp.array([1, 0, 0, 2])
    write = jax.jit(host.write_kv, donate_argnums=(0, 1))
    text = write.lower(k_pages, v_pages, new, new, pages, offsets).compile().as_text()
    assert "copy(" not in text
    pointers = [x.unsafe_buffer_pointer() for x in (k_pages, v_pages)]
    out = write(k_pages, v_pages, new, new, pages, offsets)
    assert [x.unsafe_buffer_pointer() for x in out] == pointers
    for got, want in zip(out, before, strict=True):
        want[5, 1] = 7.0
        np.testing.assert_array_equal(got, want)


def test_copy_pages_in_every_layer() -> None:
    k_pages, v_pages = pool_pair()
    src, dst = jnp.array([0, 3, 1, -1]), jnp.array([2, 0, 3, 1])
    copy = jax.jit(partial(host.copy_pages, num_layers=2))
    out = copy(k_pages, v_pages, src, dst)
    for got, held in zip(out, (k_pages, v_pages), strict=True):
        np.testing.assert_array_equal(got, held[jnp.array([0, 1, 0, 3, 4, 3])])


def test_pages_under_vmap() -> None:
    k_pages, v_pages = pool_pair()
    pools = jnp.stack([k_pages, 2 * k_pages]), jnp.stack([v_pages, 3 * v_pages])
    new = jnp.arange(2 * 2 * 2 * 4, dtype=jnp.float32).reshape(2, 2, 2, 4)
    pages, offsets = jnp.array([[0, 6], [5, -1]]), jnp.array([[1, 0], [0, 0]])
    got = jax.vmap(host.write_kv)(*pools, new, new, pages, offsets)
    src, dst = jnp.array([[0, 3], [1, 0]]), jnp.array([[2, 0], [0, 2]])
    copied = jax.vmap(partial(host.copy_pages, num_layers=2))(*pools, src, dst)
    for i in range(2):
        one = host.write_kv(*(x[i] for x in (*pools, new, new, pages, offsets)))
        two = host.copy_pages(*(x[i] for x in (*pools, src, dst)), num_layers=2)
        for j in range(2):
            np.testing.assert_array_equal(got[j][i], one[j])
            np.testing.assert_array_equal(copied[j][i], two[j])


def test_large_pages_change_no_value() -> None:
    small, large = jnp.arange(10.0), jnp.arange(2.0**21)
    pointer = large.unsafe_buffer_pointer()
    moved = host.use_large_pages(small, large)
    # 8 MiB hold at least 3 whole pages of 2 MiB; 0 where the system has no such pages.
    assert moved == 0 or 3 * 2**21 <= moved <= large.nbytes
    assert large.unsafe_buffer_pointer() == pointer
    np.testing.assert_array_equal(large, np.arange(2.0**21, dtype=np.float32))


# --- refusals ------------------------------------------------------------------------


def test_wrong_arguments_are_named() -> None:
    q, k, v, table, lens = (jnp.asarray(x) for x in draw([5, 5]))
    attend = host.paged_attention
    for wrong, message in (
        ((q[0], k, v, table, lens), "q must be"),
        ((q, k, v[:1], table, lens), "v_pages must be like"),
        ((q[..., :8], k, v, table, lens), "head_dim"),
        ((q[:, :5], k, v, table, lens), "multiple of its kv heads"),
        ((q, k, v, table, lens[:1]), "seq_lens"),
        ((q[:1], k, v, table, lens), "1 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            attend(*wrong)
    with pytest.raises(TypeError, match="seq_lens must hold integers"):
        attend(q, k, v, table, lens.astype(jnp.float32))
    with pytest.raises(TypeError, match="q must be one of"):
        attend(q.astype(jnp.int32), k, v, table, lens)
    with pytest.raises(ValueError, match="k_scales and v_scales go with"):
        attend(q, k.astype(jnp.int8), v.astype(jnp.int8), table, lens)
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        attend(q, k, v, table, lens, window=0)
    with pytest.raises(ValueError, match="soft_cap"):
        attend(q, k, v, table, lens, soft_cap=-1.0)
    with pytest.raises(TypeError, match="v must have the dtype"):
        host.write_kv(k, v, k[0, :2], v[0, :2].astype(jnp.bfloat16), lens, lens)
    with pytest.raises(ValueError, match="num_layers=4"):
        host.copy_pages(k[:2], v[:2], lens, lens, num_layers=4)


RAW_ATTRIBUTES = {
    "scale": np.float32(1),
    "window": np.int64(0),
    "soft_cap": np.float32(0),
    "share_prefixes": np.bool_(True),
}


def raw(target: str, arrays: tuple, results: int = 2, **attributes) -> list:
    """Call a target with whatever it is given, past the wrappers' checks."""
    shapes = [jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)] * results
    if target.endswith("attention"):
        lse = jax.ShapeDtypeStruct(arrays[0].shape[:2], jnp.float32)
        shapes, attributes = [shapes[0], lse], {**RAW_ATTRIBUTES, **attributes}
    call = jax.ffi.ffi_call(f"pagedjax_{target}", shapes)
    return jax.block_until_ready(call(*arrays, **attributes))


# (target, operand, change) that give another right call, not a wrong one: fewer
# pages; pages of any rank or dtype to copy; fewer queries, a matter of `cu_q_lens`.
HARMLESS = {
    *(("copy_pages", i, j) for i in (0, 1) for j in (0, 2, 3)),
    *(("write_kv", i, 2) for i in (0, 1)),
    ("ragged_paged_attention", 0, 2),
}


def test_raw_calls_with_wrong_operands_are_errors() -> None:
    """Every operand in turn: one axis more, one less, another size, another dtype."""
    q, k, v, table, lens, cu = (jnp.asarray(x) for x in draw([5, 5], [2, 3]))
    page, row = jnp.zeros((2,), jnp.int32), jnp.zeros((2, *k.shape[2:]))
    calls = {
        "paged_attention": (q[:2], k, v, table, lens),
        "ragged_paged_attention": (q, k, v, table, lens, cu),
        "write_kv": (k, v, row, row, page, page),
        "copy_pages": (k, v, page, page),
    }
    for target, arrays in calls.items():
        attributes = {"num_layers": np.int64(1)} if target == "copy_pages" else {}
        raw(target, arrays, **attributes)
        for i, array in enumerate(arrays):
            fewer = array[0] if array.ndim > 1 else array[:1]
            wrongs = [array[None], fewer, array[:-1]]
            integers = jnp.issubdtype(array.dtype, jnp.integer)
            wrongs.append(array.astype(jnp.float32 if integers else jnp.int32))
            for j, wrong in enumerate(wrongs):
                if (target, i, j) in HARMLESS:
                    continue
                with pytest.raises((ValueError, jax.errors.JaxRuntimeError)):
                    changed = list(arrays)
                    changed[i] = wrong
                    raw(target, tuple(changed), **attributes)


# --- what is chosen when the library is loaded ---------------------------------------


@pytest.mark.parametrize("isa", ["base", "avx2", "avx512", "no such thing"])
def test_instruction_set_can_be_asked_for(isa: str) -> None:
    here = Path(__file__).parent
    environment = os.environ | {
        "PAGEDJAX_HOST_ISA": isa,
        "PYTHONPATH": os.pathsep.join([str(here.parent), str(here)]),
    }
    code = (
        "import test_host_attention as t; print(t.host.usable()[1]);"
        "t.test_matches_oracle(True, 64); t.test_matches_oracle(False, 80)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    # One that the processor lacks is not chosen; nor is one that does not exist.
    flags = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    needs = {"base": "sse2", "avx2": "avx2", "avx512": "avx512dq"}
    if isa in needs and needs[isa] in flags:
        assert f"({isa})" in done.stdout
