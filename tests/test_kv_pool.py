"""The pool: what is written lands where it should and nowhere else."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pagedjax as pj

pytestmark = pytest.mark.core

LAYERS, PAGES, SIZE, HEADS, DIM = 3, 5, 4, 2, 3
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)


def new_pool(**options: Any) -> pj.KVPool:
    sizes: dict[str, Any] = dict(
        num_layers=LAYERS,
        num_pages=PAGES,
        page_size=SIZE,
        num_kv_heads=HEADS,
        head_dim=DIM,
    )
    return pj.init_kv_pool(**(sizes | options))


def numbered(dtype: Any = jnp.float32, num_pages: int = PAGES) -> pj.KVPool:
    """A pool in which every element is different, and v is not k."""
    shape = new_pool(num_pages=num_pages).k_pages.shape
    count = jnp.arange(np.prod(shape), dtype=dtype).reshape(shape)
    return pj.KVPool(count, -1 - count, num_layers=LAYERS)


def tokens(count: int) -> jax.Array:
    return 1e4 + jnp.arange(count * HEADS * DIM, dtype=jnp.float32).reshape(
        count, HEADS, DIM
    )


def ints(*values: int) -> jax.Array:
    return jnp.array(values, jnp.int32)


write = jax.jit(pj.write_kv)
copy = jax.jit(pj.copy_pages)
scrub = jax.jit(pj.scrub_pages)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_layers": 0}, "num_layers must be a whole number >= 1, got 0"),
        ({"head_dim": 2.5}, "head_dim must be a whole number >= 1, got 2.5"),
        ({"num_pages": 2**30}, r"num_layers \* num_pages = 3221225472"),
        ({"num_pages": np.int32(2**30)}, r"num_layers \* num_pages = 3221225472"),
        ({"dtype": jnp.float64}, "dtype must be one of float32, bfloat16, float16"),
        ({"dtype": jnp.int32}, "dtype must be one of float32, bfloat16, float16"),
    ],
)
def test_impossible_pools_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        new_pool(**sizes)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_pool_keeps_its_dtype(dtype: Any) -> None:
    pool = new_pool(dtype=dtype)
    sizes = (pool.num_pages, pool.page_size, pool.num_kv_heads, pool.head_dim)
    assert sizes == (PAGES, SIZE, HEADS, DIM)
    k = jnp.full((1, HEADS, DIM), 1.0009765625)  # exact in float16, not in bfloat16
    pool = write(pool, 1, k, -k, ints(2), ints(3))
    assert pool.k_pages.dtype == pool.v_pages.dtype == dtype
    place = (PAGES + 2, 3)
    assert (pool.k_pages[place] == k[0].astype(dtype)).all()
    assert (pool.v_pages[place] == -k[0].astype(dtype)).all()
    assert jnp.count_nonzero(pool.k_pages) == HEADS * DIM


def test_k_and_v_do_not_share_a_buffer() -> None:
    pool = new_pool()
    pointers = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pool)}
    assert len(pointers) == 2


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("traced", [False, True])
def test_a_token_lands_in_its_layer_and_place_alone(layer: int, traced: bool) -> None:
    before = numbered()
    index = jnp.int32(layer) if traced else layer
    pages, offsets = ints(4, 0, PAGES, 0), ints(3, 0, 0, 2)
    after = write(before, index, tokens(4), -tokens(4), pages, offsets)
    want = np.array(before.k_pages)
    for t in (0, 1, 3):
        want[layer * PAGES + pages[t], offsets[t]] = tokens(4)[t]
    np.testing.assert_array_equal(after.k_pages, want)
    np.testing.assert_array_equal(after.v_pages, np.where(want < 1e4, -1 - want, -want))


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize(
    ("page", "offset"),
    [
        (PAGES, 0),  # NULL: page 0 of the next layer, if it were merely added
        (PAGES + 1, 0),
        (-1, 0),  # the last page, if it wrapped
        (-PAGES, SIZE - 1),
        (INT_MAX, 0),
        (INT_MIN, 0),
        (0, SIZE),
        (0, -1),
        (0, INT_MAX),
        (0, INT_MIN),
    ],
)
def test_what_has_no_place_is_not_written(layer: int, page: int, offset: int) -> None:
    before = numbered()
    pages, offsets = ints(page, page), ints(offset, offset)
    kv = jnp.full((2, HEADS, DIM), jnp.nan)
    chex.assert_trees_all_equal(write(before, layer, kv, kv, pages, offsets), before)


@pytest.mark.parametrize("layer", [-1, LAYERS, INT_MAX, INT_MIN])
def test_a_layer_out_of_range_is_not_written(layer: int) -> None:
    kv = jnp.full((1, HEADS, DIM), jnp.nan)
    after = write(numbered(), jnp.int32(layer), kv, kv, ints(1), ints(0))
    chex.assert_trees_all_equal(after, numbered())
    with pytest.raises(ValueError, match=f"layer {layer} is not one of 3 layers"):
        pj.write_kv(numbered(), layer, kv, kv, ints(1), ints(0))


def test_rows_of_a_layer() -> None:
    pages = ints(0, PAGES - 1, PAGES, PAGES + 1, -1, INT_MAX, INT_MIN)
    for layer in range(LAYERS):
        rows = pj.layer_page_indices(pages, layer, num_pages=PAGES, num_layers=LAYERS)
        null = [LAYERS * PAGES] * 5
        assert rows.tolist() == [layer * PAGES, layer * PAGES + PAGES - 1, *null]
    layers = jnp.arange(LAYERS, dtype=jnp.int32)[:, None]
    rows = pj.layer_page_indices(
        ints(1, PAGES)[None, :], layers, num_pages=PAGES, num_layers=LAYERS
    )
    assert rows.tolist() == [[1, 15], [6, 15], [11, 15]]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_pages": 4.0}, ValueError, "num_pages must be a whole number"),
        ({"num_layers": 1.5}, ValueError, "num_layers must be a whole number"),
        ({"layer": 0.5}, ValueError, "layer must be a whole number"),
        ({"layer": jnp.float32(0.5)}, TypeError, "layer must be a whole .*float32"),
        ({"pages": jnp.array([0.5])}, TypeError, "page_indices must be int32"),
        # A NULL of 400 would not fit them.
        ({"pages": jnp.array([1], jnp.int8)}, TypeError, "page_indices .*got int8"),
        ({"pages": np.array([2**32])}, ValueError, "page_indices must fit int32"),
    ],
)
def test_rows_of_no_layer(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    call: dict[str, Any] = dict(pages=[1], layer=0, num_pages=400, num_layers=2)
    call |= change
    with pytest.raises(error, match=message):
        pj.layer_page_indices(call.pop("pages"), call.pop("layer"), **call)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"k": jnp.ones((2, HEADS, DIM))},
            ValueError,
            r"k must have shape \(1, 2, 3\)",
        ),
        (
            {"v": jnp.ones((1, DIM, HEADS))},
            ValueError,
            r"v must have shape \(1, 2, 3\)",
        ),
        ({"pages": jnp.ones((1,))}, TypeError, "pages must be int32, got float32"),
        ({"offsets": ints(0, 0)}, ValueError, "offsets"),
    ],
)
def test_a_wrong_argument_is_named(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    right = dict(k=tokens(1), v=tokens(1), pages=ints(0), offsets=ints(0))
    with pytest.raises(error, match=message):
        pj.write_kv(new_pool(), 0, **(right | change))


@pytest.mark.parametrize("num_copies", [0, 1, 7, 8, 9, 19, 24])
def test_copies_run_in_all_layers_and_change_nothing_else(num_copies: int) -> None:
    """Plans of 24 entries, more than are copied at a time, NULLs in between."""
    pages = 50
    rng = np.random.default_rng(num_copies)
    ids = rng.permutation(pages)
    src, dst = np.full((2, 24), pages, np.int32)
    where = rng.permutation(24)[:num_copies]
    src[where] = ids[:20][rng.integers(20, size=num_copies)]  # a source may repeat
    dst[where] = ids[20 : 20 + num_copies]
    before = numbered(num_pages=pages)
    after = copy(before, pj.CopyPlan(jnp.array(src), jnp.array(dst)))
    for was, now in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        want = np.array(was)
        for layer in range(LAYERS):
            want[layer * pages + dst[where]] = want[layer * pages + src[where]]
        np.testing.assert_array_equal(now, want)


@pytest.mark.parametrize(
    ("src", "dst"),
    [(0, PAGES), (PAGES, 0), (PAGES, PAGES), (-1, 0), (0, -1), (INT_MAX, 1), (1, 99)],
)
def test_a_copy_without_both_ends_does_nothing(src: int, dst: int) -> None:
    before = numbered()
    after = copy(before, pj.CopyPlan(ints(src), ints(dst)))
    chex.assert_trees_all_equal(after, before)


def test_a_plan_of_no_pairs_does_nothing() -> None:
    pool = pj.init_kv_pool(
        num_layers=1, num_pages=2, page_size=2, num_kv_heads=1, head_dim=1
    )
    none = jnp.zeros((0,), jnp.int32)
    copied = jax.jit(pj.copy_pages)(pool, pj.CopyPlan(none, none))
    chex.assert_trees_all_equal(copied, pool)


def test_scales_are_copied_and_scrubbed_with_their_pages() -> None:
    scales = jnp.arange(LAYERS * PAGES * SIZE * HEADS, dtype=jnp.float32)
    scales = 1 + scales.reshape(LAYERS * PAGES, SIZE, HEADS)
    held = numbered()
    pool = pj.KVPool(held.k_pages, held.v_pages, scales, -scales, LAYERS)
    after = copy(pool, pj.CopyPlan(ints(1, PAGES), ints(3, PAGES)))
    after = scrub(after, ints(0, PAGES))
    for leaf, was in zip(jax.tree.leaves(after), jax.tree.leaves(pool), strict=True):
        want = np.array(was)
        want[3::PAGES] = want[1::PAGES]
        want[0::PAGES] = 0
        np.testing.assert_array_equal(leaf, want)


def test_scrub_leaves_every_other_page() -> None:
    before = numbered()
    after = scrub(before, ints(2, PAGES, -1, 99, INT_MIN))
    for leaf, was in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        want = np.array(was)
        want[2::PAGES] = 0
        np.testing.assert_array_equal(leaf, want)


@pytest.mark.parametrize("num_pages", [1, PAGES - 1, PAGES, PAGES + 3])
def test_resize_keeps_pages_where_they_are(num_pages: int) -> None:
    before = numbered()
    after = pj.resize_kv_pool(before, num_pages)
    assert after.num_pages == num_pages and after.num_layers == LAYERS
    kept = min(num_pages, PAGES)
    for leaf, was in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        for layer in range(LAYERS):
            now = np.asarray(leaf)[layer * num_pages : (layer + 1) * num_pages]
            np.testing.assert_array_equal(now[:kept], was[layer * PAGES :][:kept])
            assert not now[kept:].any()
    again = pj.resize_kv_pool(before, jnp.int32(num_pages))
    chex.assert_trees_all_equal(again, after)
    for wrong in (0, float(num_pages), True):
        with pytest.raises(ValueError, match="num_pages must be a whole number >= 1"):
            pj.resize_kv_pool(before, wrong)
    with pytest.raises(ValueError, match=r"num_layers \* num_pages = 3221225472"):
        pj.resize_kv_pool(before, 2**30)


def test_gather_reads_a_row_in_order_and_zeros_past_its_end() -> None:
    table = pj.init_page_table(
        num_pages=PAGES, page_size=SIZE, max_slots=2, pages_per_slot=3
    )
    table = jax.jit(pj.append)(table, ints(5, 4))[0]
    table = pj.reorder(table, ints(1, 0))
    pool = numbered()
    for layer in range(LAYERS):
        k, v = jax.jit(pj.gather_kv)(pool, layer, table, 1)
        want = np.zeros((3 * SIZE, HEADS, DIM))
        want[:5] = np.asarray(pool.k_pages)[layer * PAGES :][:2].reshape(8, 2, 3)[:5]
        np.testing.assert_array_equal(k, want)
        np.testing.assert_array_equal(v[:5], -1 - want[:5])
        assert not np.asarray(v[5:]).any()
    for slot in (-1, 2):
        assert not np.asarray(pj.gather_kv(pool, 0, table, slot)[0]).any()
    for wrong, error in ((0.7, TypeError), (ints(0, 1), ValueError)):
        with pytest.raises(error, match="slot"):
            pj.gather_kv(pool, 0, table, wrong)


def test_a_row_and_a_place_do_not_overflow_where_their_product_would() -> None:
    """Case E8: element 7768 * 276480 is past int32; (page, place) is not."""
    page, stride = 7768, 480 * 576
    assert page * stride > INT_MAX
    rows = pj.layer_page_indices(ints(page, 7769), 1, num_pages=7769, num_layers=2)
    assert rows.tolist() == [7769 + page, 2 * 7769]
    # The largest pool that may be made: the last row, and NULL, still fit.
    layers, pages = 7, INT_MAX // 7 - 1
    rows = pj.layer_page_indices(
        ints(pages - 1, pages), layers - 1, num_pages=pages, num_layers=layers
    )
    want = np.array([layers * pages - 1, layers * pages], np.int64)
    assert rows.tolist() == want.tolist()
