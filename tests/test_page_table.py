"""The verbs of the page table, one rule at a time; the machine does the rest."""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import pagedjax as pj

pytestmark = pytest.mark.core


def new_table(
    num_pages: int = 8, page_size: int = 4, max_slots: int = 3, pages_per_slot: int = 4
) -> pj.PageTable:
    return pj.init_page_table(
        num_pages=num_pages,
        page_size=page_size,
        max_slots=max_slots,
        pages_per_slot=pages_per_slot,
    )


def ints(*values: int) -> jax.Array:
    return jnp.array(values, jnp.int32)


def appended(table: pj.PageTable, *num_tokens: int, **options: Any) -> pj.PageTable:
    return pj.append(table, ints(*num_tokens), **options)[0]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_pages": 0}, "num_pages must be a whole number >= 1, got 0"),
        ({"page_size": 1.5}, "page_size must be a whole number >= 1, got 1.5"),
        ({"max_slots": -1}, "max_slots must be a whole number >= 1, got -1"),
        ({"num_pages": 2**29}, r"num_pages \* page_size = 2147483648"),
        (
            {"num_pages": np.int32(2**20), "page_size": np.int32(2**12)},
            r"num_pages \* page_size = 4294967296",
        ),
        ({"pages_per_slot": 2**29}, r"pages_per_slot \* page_size = 2147483648"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        new_table(**sizes)


def test_pages_are_handed_out_in_order_and_taken_back_in_order() -> None:
    table = appended(new_table(), 9, 0, 2)
    assert table.page_indices.tolist() == [[0, 1, 2, 8], [8] * 4, [3, 8, 8, 8]]
    table = pj.free(table, jnp.array([True, False, False]))
    assert appended(table, 0, 9, 0).page_indices[1].tolist() == [0, 1, 2, 8]


@pytest.mark.parametrize(
    ("num_tokens", "priority", "ok"),
    [
        ((16, 16, 4), None, [True, True, False]),
        ((16, 4, 16), None, [True, True, False]),
        ((12, 16, 4), None, [True, True, True]),
        # The large one is not overtaken by the small one behind it.
        ((16, 12, 8), (0, 1, 2), [True, True, False]),
        ((16, 12, 8), (2, 1, 0), [False, True, True]),
        ((16, 12, 8), (0, 2, 1), [True, False, True]),
        ((16, 16, 4), (1, 1, 0), [True, False, True]),
        ((0, 17, 16), (1, 0, 2), [True, False, True]),
    ],
)
def test_append_serves_in_order(
    num_tokens: tuple[int, ...], priority: tuple[int, ...] | None, ok: list[bool]
) -> None:
    order = None if priority is None else ints(*priority)
    table = new_table()
    after, plan, served = pj.append(table, ints(*num_tokens), priority=order)
    assert served.tolist() == ok
    taken = [n if good else 0 for n, good in zip(num_tokens, ok, strict=True)]
    assert after.seq_lens.tolist() == taken
    assert int(pj.num_used_pages(after)) == sum(-(-n // 4) for n in taken)
    assert plan.src_pages.tolist() == [table.num_pages] * 3
    assert pj.check_integrity(after) == []


def test_a_refused_slot_is_untouched_and_others_go_on() -> None:
    table = appended(new_table(num_pages=3), 4, 4, 3)
    after, plan, ok = pj.append(table, ints(1, 0, 1), max_tokens=1)
    assert ok.tolist() == [False, True, True]
    assert after.seq_lens.tolist() == [4, 4, 4]
    chex.assert_trees_all_equal(
        dataclasses.replace(after, seq_lens=table.seq_lens), table
    )


@pytest.mark.parametrize("bad", [-1, -(2**31), 17, 2**31 - 1])
@pytest.mark.parametrize("max_tokens", [None, 16])
def test_an_entry_out_of_range_is_refused_alone(bad: int, max_tokens: int) -> None:
    table = appended(new_table(), 5, 0, 0)
    after, _, ok = pj.append(table, ints(bad, bad, 3), max_tokens=max_tokens)
    assert ok.tolist() == [False, False, True]
    assert after.seq_lens.tolist() == [5, 0, 3]
    assert pj.check_integrity(after) == []


def test_more_than_max_tokens_is_refused_alone() -> None:
    after, _, ok = pj.append(new_table(), ints(2, 3, 1), max_tokens=2)
    assert ok.tolist() == [True, False, True]
    assert after.seq_lens.tolist() == [2, 0, 1]


def shared_three_ways(num_pages: int) -> pj.PageTable:
    table = appended(new_table(num_pages=num_pages), 6, 0, 0)
    return pj.fork(table, ints(0, 0), ints(1, 2))


@pytest.mark.parametrize(
    ("num_tokens", "num_pages", "src", "ok"),
    [
        # One owner does not write: everyone who does, copies.
        ((1, 1, 0), 8, [1, 1, 8], [True, True, True]),
        ((0, 0, 1), 8, [8, 8, 1], [True, True, True]),
        # All write: the lowest keeps the page.
        ((1, 1, 1), 8, [8, 1, 1], [True, True, True]),
        # Room for one copy alone: slot 2 is refused, so slot 0 may not keep the
        # page, and its copy takes the place of slot 1's.
        ((1, 1, 1), 3, [1, 3, 3], [True, False, False]),
        ((1, 1, 1), 4, [4, 1, 1], [True, True, True]),
        # A row that is full does not write either.
        ((1, 1, 99), 8, [1, 1, 8], [True, True, False]),
    ],
)
def test_a_shared_page_is_copied_unless_all_its_owners_write(
    num_tokens: tuple[int, ...], num_pages: int, src: list[int], ok: list[bool]
) -> None:
    table = shared_three_ways(num_pages)
    after, plan, served = pj.append(table, ints(*num_tokens))
    assert served.tolist() == ok
    assert plan.src_pages.tolist() == src
    fresh = [s for s in range(3) if src[s] != num_pages]
    assert [int(plan.dst_pages[s]) for s in fresh] == list(range(2, 2 + len(fresh)))
    assert pj.check_integrity(after) == []


def test_a_pin_counts_as_an_owner_that_does_not_write() -> None:
    table = appended(new_table(), 6, 0, 0)
    table = pj.inc_ref(table, ints(1))
    after, plan, _ = pj.append(table, ints(1, 0, 0))
    assert plan.src_pages.tolist() == [1, 8, 8]
    assert after.page_indices[0].tolist() == [0, 2, 8, 8]
    assert after.refcounts.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]


def test_fork_shares_a_prefix_and_takes_no_page() -> None:
    table = appended(new_table(), 10, 0, 0)
    after = pj.fork(table, ints(0, 0), ints(2, 1), ints(5, 0))
    assert after.page_indices[2].tolist() == [0, 1, 8, 8]
    assert after.seq_lens.tolist() == [10, 0, 5]
    assert after.num_free == table.num_free
    assert after.refcounts.tolist() == [2, 2, 1, 0, 0, 0, 0, 0]


def test_reorder_permutes_duplicates_and_drops() -> None:
    table = appended(new_table(), 5, 4, 3)
    after = pj.reorder(table, ints(2, 0, 0))
    assert after.page_indices.tolist() == [[3, 8, 8, 8], [0, 1, 8, 8], [0, 1, 8, 8]]
    assert after.seq_lens.tolist() == [3, 5, 5]
    assert after.refcounts.tolist() == [2, 2, 0, 1, 0, 0, 0, 0]
    assert pj.check_integrity(after) == []


def test_attach_adopts_pinned_pages_in_the_order_given() -> None:
    table = appended(new_table(), 8, 0, 0)
    table = pj.inc_ref(table, ints(1, 0, 1))
    table = pj.free(table, jnp.array([True, False, False]))
    after = pj.attach(table, jnp.int32(2), ints(1, 0, -5, 99), jnp.int32(8))
    assert after.page_indices[2].tolist() == [1, 0, 8, 8]
    assert after.refcounts.tolist()[:2] == [2, 3]
    assert pj.check_integrity(after, np.array([1, 2, 0, 0, 0, 0, 0, 0])) == []


def test_translate_gives_null_outside_the_sequence() -> None:
    table = appended(new_table(), 6, 16, 0)
    slots = ints(0, 0, 0, 0, 1, 1, 2, 3, -1, 0)
    positions = ints(0, 5, 6, -1, 15, 16, 0, 0, 0, 2**31 - 1)
    pages, _ = pj.translate(table, slots, positions)
    assert pages.tolist() == [0, 1, 8, 8, 5, 8, 8, 8, 8, 8]


def test_grow_keeps_ids_and_shrink_refuses_to_lose_a_page() -> None:
    table = appended(new_table(), 9, 0, 0)
    large = pj.grow(table, 11)
    assert large.page_indices.tolist() == [[0, 1, 2, 11], [11] * 4, [11] * 4]
    assert pj.check_integrity(large) == []
    assert appended(large, 0, 16, 16).page_indices[2].tolist() == [7, 8, 9, 10]
    again = pj.shrink(large, 8)
    assert again.free_pages[:5].tolist() == table.free_pages[:5].tolist()
    chex.assert_trees_all_equal(
        dataclasses.replace(again, free_pages=table.free_pages), table
    )
    small = pj.shrink(table, 3)
    assert int(small.num_free) == 0 and pj.check_integrity(small) == []
    with pytest.raises(ValueError, match="1 of the pages from 2 on .* page 2"):
        pj.shrink(table, 2)
    with pytest.raises(ValueError, match="shrink: num_pages=9 is above the present 8"):
        pj.shrink(table, 9)
    with pytest.raises(ValueError, match="grow: num_pages=7 is below the present 8"):
        pj.grow(table, 7)
    with pytest.raises(ValueError, match="does not fit int32"):
        pj.grow(table, 2**30)


@pytest.mark.parametrize("resize", [pj.grow, pj.shrink])
def test_resizing_takes_whole_numbers_of_any_kind_and_no_others(resize: Any) -> None:
    table = appended(new_table(), 9, 0, 0)
    want = resize(table, 8)
    for size in (np.int64(8), np.array(8), jnp.int32(8)):
        chex.assert_trees_all_equal(resize(table, size), want)
        chex.assert_trees_all_equal_dtypes(resize(table, size), want)
    for wrong in (0, 10.5, 8.0, True, np.array([8])):
        with pytest.raises(ValueError, match="num_pages must be a whole number >= 1"):
            resize(table, wrong)
    with pytest.raises(ValueError, match="num_pages must be known when tracing"):
        jax.jit(resize)(table, 8)


def test_the_bound_of_an_append_is_a_whole_number_known_when_tracing() -> None:
    table, one = new_table(), ints(1, 0, 0)
    want = appended(table, 1, 0, 0, max_tokens=1)
    chex.assert_trees_all_equal(appended(table, 1, 0, 0, max_tokens=jnp.int32(1)), want)
    chex.assert_trees_all_equal(appended(table, 1, 0, 0, max_tokens=2**40), want)
    for wrong in (0, 1.5, True):
        with pytest.raises(ValueError, match="max_tokens must be a whole number >= 1"):
            pj.append(table, one, max_tokens=wrong)
    for made in (lambda n: n, lambda n: jnp.int32(1)):
        with pytest.raises(ValueError, match="max_tokens must be known when tracing"):
            jax.jit(lambda n, made=made: pj.append(table, one, max_tokens=made(n)))(1)


def test_what_is_read_off_a_table_outlives_it() -> None:
    """The table is donated to the next step, and what was read before is not."""
    step = jax.jit(lambda table: pj.append(table, ints(1, 1, 1))[0], donate_argnums=0)
    table = appended(new_table(), 9, 0, 0)
    counts = pj.num_free_pages(table), pj.num_used_pages(table)
    step(table)
    assert table.num_free.is_deleted()
    assert [int(count) for count in counts] == [5, 3]
    table = appended(new_table(), 9, 0, 0)
    held, made = (
        {array.unsafe_buffer_pointer() for array in jax.tree.leaves(tree)}
        for tree in (table, (pj.grow(table, 9), pj.shrink(table, 4)))
    )
    assert not held & made


def test_weakly_typed_arguments_leave_nothing_weak() -> None:
    """A table of weak types would compile its step anew."""

    def fill(value: int, *shape: int) -> jax.Array:
        array = jnp.full(shape, value)
        assert array.weak_type
        return array

    table, plan, ok = pj.append(new_table(), fill(4, 3), priority=fill(1, 3))
    table = pj.truncate(table, fill(4, 3))
    table = pj.free(table, jnp.array([False, True, True]))
    table = pj.fork(table, fill(0, 1), fill(1, 1), fill(4, 1))
    table = pj.attach(table, fill(2), fill(0, table.pages_per_slot), fill(4))
    table = pj.dec_ref(pj.inc_ref(table, fill(0, 1)), fill(0, 1))
    table = pj.reorder(table, fill(0, 3))
    results = (table, plan, ok, pj.translate(table, fill(0, 2), fill(1, 2)))
    assert not any(array.weak_type for array in jax.tree.leaves(results))


def test_utilization_counts_a_shared_token_once() -> None:
    table = new_table()
    assert float(pj.utilization(table)) == 1.0
    table = appended(table, 6, 0, 0)
    assert float(pj.utilization(table)) == 6 / 8
    table = pj.fork(table, ints(0), ints(1), ints(5))
    assert float(pj.utilization(table)) == 6 / 8
    table = appended(table, 0, 0, 1)
    assert pj.utilization(table) == np.float32(7 / 12)
    table = pj.inc_ref(table, ints(0))
    table = pj.free(table, jnp.array([True, True, True]))
    assert float(pj.utilization(table)) == 1.0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda t: pj.append(t, ints(1, 1)), ValueError, "num_tokens"),
        (lambda t: pj.append(t, jnp.ones(3)), TypeError, "num_tokens must be int32"),
        (lambda t: pj.append(t, ints(1, 1, 1), max_tokens=0), ValueError, "max_tokens"),
        (
            lambda t: pj.append(t, ints(1, 1, 1), priority=ints(1)),
            ValueError,
            "priority",
        ),
        (lambda t: pj.fork(t, ints(0), ints(1, 2)), ValueError, "dst"),
        (lambda t: pj.fork(t, ints(0), ints(1), ints()), ValueError, "num_tokens"),
        (lambda t: pj.reorder(t, ints(0)), ValueError, "parents"),
        (lambda t: pj.truncate(t, ints(0)), ValueError, "new_lens"),
        (lambda t: pj.free(t, ints(0, 0, 0)), ValueError, r"bool\[3\], got int32"),
        (lambda t: pj.free(t, jnp.array([True])), ValueError, r"bool\[3\]"),
        (lambda t: pj.attach(t, jnp.int32(0), ints(0), 0), ValueError, "pages"),
        (lambda t: pj.inc_ref(t, jnp.int32(0)), ValueError, "pages"),
        (lambda t: pj.dec_ref(t, jnp.ones(2)), TypeError, "pages"),
        (lambda t: pj.translate(t, ints(0), ints(0, 1)), ValueError, "positions"),
    ],
)
def test_a_wrong_argument_is_named_when_traced(
    call: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        jax.eval_shape(call, new_table())


def story(table: pj.PageTable, num_tokens: jax.Array) -> pj.PageTable:
    """Every verb once, on three slots."""
    table, _, _ = pj.append(table, num_tokens)
    table = pj.fork(table, ints(0), ints(1))
    pinned = table.page_indices[0]
    table = pj.inc_ref(table, pinned)
    table, _, ok = pj.append(table, ints(1, 1, 1), max_tokens=1, priority=ints(2, 1, 0))
    table = pj.reorder(table, ints(1, 1, 2))
    pages = table.page_indices[0]
    table = pj.free(table, ok & jnp.array([False, True, True]))
    table = pj.attach(table, jnp.int32(2), pages, jnp.int32(4))
    table = pj.truncate(table, table.seq_lens - 1)
    return pj.dec_ref(table, pinned[1:])


STORIES = [ints(5, 0, 3), ints(8, 0, 0), ints(7, 0, 9), ints(12, 0, 16)]


class WithAndWithoutJit(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_the_story_ends_the_same(self) -> None:
        after = self.variant(story)(new_table(), STORIES[0])
        assert after.page_indices.tolist() == [[0, 4, 8, 8], [8] * 4, [0, 8, 8, 8]]
        assert after.seq_lens.tolist() == [5, 0, 3]
        assert after.refcounts.tolist() == [3, 0, 0, 0, 1, 0, 0, 0]
        pins = np.array([1, 0, 0, 0, 0, 0, 0, 0])
        assert pj.check_integrity(after, pins) == []


def stacked() -> pj.PageTable:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *[new_table()] * 4)


def told_apart() -> list[pj.PageTable]:
    return [jax.device_get(jax.jit(story)(new_table(), counts)) for counts in STORIES]


def assert_equal_to_each_alone(batch: pj.PageTable) -> None:
    for i, alone in enumerate(told_apart()):
        one = jax.tree.map(lambda leaf, i=i: leaf[i], jax.device_get(batch))
        chex.assert_trees_all_equal(one, alone)


def test_vmap_over_tables_equals_each_alone() -> None:
    batch = jax.jit(jax.vmap(story))(stacked(), jnp.stack(STORIES))
    assert_equal_to_each_alone(batch)
    sizes = (batch.num_pages, batch.max_slots, batch.pages_per_slot)
    assert sizes == (8, 3, 4)


def test_shard_map_gives_every_device_a_table_of_its_own() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    spec = PartitionSpec("data")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
    def each(table: pj.PageTable, num_tokens: jax.Array) -> pj.PageTable:
        alone = jax.tree.map(lambda leaf: leaf[0], table)
        after = story(alone, num_tokens[0])
        return jax.tree.map(lambda leaf: leaf[None], after)

    assert_equal_to_each_alone(jax.jit(each)(stacked(), jnp.stack(STORIES)))


def one_step(table: pj.PageTable) -> pj.PageTable:
    table, _, _ = pj.append(table, ints(2, 1, 3), max_tokens=3)
    table = pj.reorder(table, ints(0, 0, 2))
    return pj.free(table, table.seq_lens > 9)


def test_scan_and_while_loop_equal_one_step_after_another() -> None:
    want = new_table()
    for _ in range(7):
        want = jax.jit(one_step)(want)
    scanned, _ = lax.scan(lambda t, _: (one_step(t), None), new_table(), length=7)
    chex.assert_trees_all_equal(scanned, want)
    _, looped = lax.while_loop(
        lambda state: state[0] < 7,
        lambda state: (state[0] + 1, one_step(state[1])),
        (0, new_table()),
    )
    chex.assert_trees_all_equal(looped, want)
    assert want.seq_lens.any() and pj.check_integrity(want) == []
