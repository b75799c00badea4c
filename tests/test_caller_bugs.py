"""What a caller may get wrong: named under checkify, and harmless to others without."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import pagedjax as pj

pytestmark = pytest.mark.core

NULL = 8


def ints(*values: int) -> jax.Array:
    return jnp.array(values, jnp.int32)


@functools.cache
def new_state() -> tuple[pj.PageTable, pj.KVPool]:
    """Slot 0 holds pages 0 and 1, slot 1 shares page 0, slot 2 holds page 2."""

    @jax.jit
    def build() -> tuple[pj.PageTable, pj.KVPool]:
        table = pj.init_page_table(
            num_pages=NULL, page_size=4, max_slots=4, pages_per_slot=3
        )
        table, _, _ = pj.append(table, ints(6, 0, 3, 0))
        table = pj.fork(table, ints(0), ints(1), ints(4))
        pool = pj.init_kv_pool(
            num_layers=2, num_pages=NULL, page_size=4, num_kv_heads=1, head_dim=1
        )
        count = jnp.arange(pool.k_pages.size, dtype=jnp.float32)
        filled = count.reshape(pool.k_pages.shape)
        return table, pj.KVPool(filled, -filled, num_layers=2)

    return build()


def attach(table: pj.PageTable, slot: int, page: int, num: int) -> pj.PageTable:
    return pj.attach(table, jnp.int32(slot), ints(page, NULL, NULL), jnp.int32(num))


Call = Callable[[pj.PageTable], Any]

# What is called; what checkify says; the slots it may change.
BUGS: dict[str, tuple[Call, str, set[int]]] = {
    "append a negative number": (
        lambda t: pj.append(t, ints(0, -4, 0, 0)),
        "append: num_tokens of slot 1 is -4",
        set(),
    ),
    "append over max_tokens": (
        lambda t: pj.append(t, ints(0, 0, 3, 1), max_tokens=1),
        "append: num_tokens of slot 2 is 3, over max_tokens=1",
        {3},
    ),
    "fork onto a live slot": (
        lambda t: pj.fork(t, ints(0), ints(2)),
        "fork: dst slot 2 is not an empty slot named once",
        set(),
    ),
    "fork onto itself": (
        lambda t: pj.fork(t, ints(0), ints(0)),
        "fork: dst slot 0 is not an empty slot named once",
        set(),
    ),
    "fork twice onto a slot": (
        lambda t: pj.fork(t, ints(0, 2), ints(3, 3)),
        "fork: dst slot 3 is not an empty slot named once",
        {3},
    ),
    "fork onto no slot": (
        lambda t: pj.fork(t, ints(0), ints(-1)),
        "fork: dst slot -1 is not an empty slot named once",
        set(),
    ),
    "fork from past the table": (
        lambda t: pj.fork(t, ints(7), ints(3)),
        "fork: src slot 7 is not in the table",
        set(),
    ),
    "fork from before the table": (
        lambda t: pj.fork(t, ints(-1), ints(3)),
        "fork: src slot -1 is not in the table",
        set(),
    ),
    "fork more than there is": (
        lambda t: pj.fork(t, ints(0), ints(3), ints(7)),
        "fork: num_tokens of entry 0 is 7, not within what src holds",
        {3},
    ),
    "fork a negative number": (
        lambda t: pj.fork(t, ints(0), ints(3), ints(-2)),
        "fork: num_tokens of entry 0 is -2, not within what src holds",
        set(),
    ),
    "reorder by no slot": (
        lambda t: pj.reorder(t, ints(0, 9, 2, 3)),
        "reorder: parent 9 of slot 1 is not a slot",
        set(),
    ),
    "reorder by a negative slot": (
        lambda t: pj.reorder(t, ints(0, 1, 2, -1)),
        "reorder: parent -1 of slot 3 is not a slot",
        set(),
    ),
    "truncate to a negative length": (
        lambda t: pj.truncate(t, ints(6, 4, -1, 0)),
        "truncate: new length of slot 2 is -1",
        {2},
    ),
    "attach to a live slot": (
        lambda t: attach(t, 2, 0, 4),
        "attach: slot 2 is not an empty slot",
        set(),
    ),
    "attach to no slot": (
        lambda t: attach(t, -1, 0, 4),
        "attach: slot -1 is not an empty slot",
        set(),
    ),
    "attach half a page": (
        lambda t: attach(t, 3, 0, 3),
        "attach: num_tokens 3 is not a multiple of 4 up to 12",
        set(),
    ),
    "attach more than a row": (
        lambda t: attach(t, 3, 0, 16),
        "attach: num_tokens 16 is not a multiple of 4 up to 12",
        set(),
    ),
    "attach a free page": (
        lambda t: attach(t, 3, 5, 4),
        "attach: page 5 of cell 0 has no owner",
        set(),
    ),
    "attach a negative page": (
        lambda t: attach(t, 3, -1, 4),
        "attach: page -1 of cell 0 has no owner",
        set(),
    ),
    "attach NULL": (
        lambda t: attach(t, 3, NULL, 4),
        "attach: page 8 of cell 0 has no owner",
        set(),
    ),
    "pin a free page": (
        lambda t: pj.inc_ref(t, ints(NULL, 6)),
        "inc_ref: page 6 has no owner",
        set(),
    ),
    "pin no page": (
        lambda t: pj.inc_ref(t, ints(-1)),
        "inc_ref: page -1 has no owner",
        set(),
    ),
    "unpin no page": (
        lambda t: pj.dec_ref(t, ints(NULL, 9)),
        "dec_ref: page 9 is not a page",
        set(),
    ),
    "unpin a negative page": (
        lambda t: pj.dec_ref(t, ints(-1, NULL)),
        "dec_ref: page -1 is not a page",
        set(),
    ),
    "unpin a free page": (
        lambda t: pj.dec_ref(t, ints(NULL, 6)),
        "dec_ref: page 6 has no owner to lose",
        set(),
    ),
    "unpin twice": (
        lambda t: pj.dec_ref(pj.inc_ref(t, ints(2)), ints(2, 2, 2)),
        "dec_ref: page 2 has no owner to lose",
        {2},
    ),
    "pack more than a slot holds": (
        lambda t: pj.pack_ragged(t, ints(0, 5, 0, 0), num_tokens=8),
        "pack_ragged: slot 1 does not hold its q_len of 5",
        set(),
    ),
    "pack a negative number": (
        lambda t: pj.pack_ragged(t, ints(0, -1, 0, 0), num_tokens=8),
        "pack_ragged: slot 1 does not hold its q_len of -1",
        set(),
    ),
    "pack more than there is room for": (
        lambda t: pj.pack_ragged(t, ints(6, 0, 3, 0), num_tokens=8),
        "pack_ragged: up to slot 2 there are 9 tokens, over 8",
        set(),
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_checkify_names_it(name: str) -> None:
    call, message, _ = BUGS[name]
    table, _ = new_state()
    error, _ = jax.jit(checkify.checkify(call))(table)
    assert message in (error.get() or "nothing")


def test_checkify_has_nothing_against_right_calls() -> None:
    def right(table: pj.PageTable) -> pj.PageTable:
        table = pj.fork(table, ints(0, 0), ints(3, 4), ints(5, 99))
        table, _, _ = pj.append(table, ints(0, 0, 0, 1), max_tokens=1)
        table, _, _ = pj.append(table, ints(99, 0, 0, 0))
        table = pj.inc_ref(table, ints(0, 0, NULL))
        table = pj.reorder(table, ints(3, 2, 1, 0))
        table = pj.free(table, jnp.array([True, False, True, False]))
        table = attach(table, 0, 0, 4)
        table = pj.dec_ref(table, ints(0, 0, NULL))
        pj.pack_ragged(table, ints(0, 3, 0, 1), num_tokens=4)
        return pj.truncate(table, ints(0, 99, 0, 2))

    error, table = jax.jit(checkify.checkify(right))(new_state()[0])
    error.throw()
    assert pj.check_integrity(table) == []


@functools.partial(jax.jit, static_argnums=0)
def run(call: Call, table: pj.PageTable) -> pj.PageTable:
    out = call(table)
    if isinstance(out, tuple):
        out = out[0]
    return out if isinstance(out, pj.PageTable) else table


@jax.jit
def read_all(table: pj.PageTable, pool: pj.KVPool) -> list[Any]:
    slots = jnp.arange(4, dtype=jnp.int32)
    return [
        jax.vmap(lambda s, layer=layer: pj.gather_kv(pool, layer, table, s))(slots)
        for layer in range(2)
    ]


@pytest.mark.parametrize("name", BUGS)
def test_without_checkify_no_other_slot_is_touched(name: str) -> None:
    call, _, may_change = BUGS[name]
    before, pool = new_state()
    after = run(call, before)
    others = [s for s in range(4) if s not in may_change]
    for was, now in zip(
        jax.tree.leaves([before.page_indices, before.seq_lens, read_all(before, pool)]),
        jax.tree.leaves([after.page_indices, after.seq_lens, read_all(after, pool)]),
        strict=True,
    ):
        if was.shape[0] == 4:
            np.testing.assert_array_equal(was[np.array(others)], now[np.array(others)])
    if not name.startswith("unpin"):
        assert pj.check_integrity(after) == []
    # The pages of slots 0 and 1 have the owners they had, or one more.
    assert after.refcounts[0] >= 2 and after.refcounts[1] >= 1


def test_a_page_unpinned_too_often_is_whole_again_when_it_is_taken() -> None:
    table, _ = new_state()
    table = run(lambda t: pj.dec_ref(t, ints(6, 6, 5)), table)
    assert pj.check_integrity(table) == [
        "(1) page 5: refcount -1, but 0 cells and 0 pins name it",
        "(1) page 6: refcount -2, but 0 cells and 0 pins name it",
        "(2) page 5: free, but refcount -1",
        "(2) page 6: free, but refcount -2",
    ]
    table = run(lambda t: pj.append(t, ints(4, 4, 0, 12)), table)
    assert int(table.num_free) == 0
    assert pj.check_integrity(table) == []


def test_taking_a_page_from_under_a_slot_is_named() -> None:
    """A count cannot tell a pin from a cell; the cells can."""
    table, _ = new_state()
    call = jax.jit(checkify.checkify(pj.dec_ref))
    table = pj.inc_ref(table, ints(2))
    error, table = call(table, ints(2))
    assert error.get() is None
    error, _ = call(table, ints(2))
    assert "page 2 has fewer owners left than cells" in (error.get() or "")


def test_releasing_no_pages_changes_nothing() -> None:
    table, _ = new_state()
    after = pj.dec_ref(table, jnp.zeros((0,), jnp.int32))
    np.testing.assert_array_equal(after.refcounts, table.refcounts)


@pytest.mark.parametrize("wrong", [2**32 + 1, -(2**31) - 1])
def test_a_number_that_is_no_int32_is_refused(wrong: int) -> None:
    table, _ = new_state()
    with pytest.raises(ValueError, match="num_tokens must fit int32"):
        pj.append(table, np.array([wrong, 0, 0, 0]))


@pytest.mark.parametrize("size", [4.0, "4", None])
def test_a_size_that_is_no_whole_number_is_named(size: Any) -> None:
    with pytest.raises(ValueError, match="page_size must be a whole number"):
        pj.init_page_table(num_pages=4, page_size=size, max_slots=1, pages_per_slot=1)
