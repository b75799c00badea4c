"""The audit and the picture: every fault is found, and nothing makes them raise."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pagedjax as pj

pytestmark = pytest.mark.core


def small_table() -> pj.PageTable:
    """Slots of 6 and 5 tokens that share page 0, on the host; pages 3 to 7 free."""
    table = pj.init_page_table(num_pages=8, page_size=4, max_slots=3, pages_per_slot=3)
    table, _, _ = pj.append(table, jnp.array([6, 0, 0]))
    table = pj.fork(table, jnp.array([0]), jnp.array([1]), jnp.array([4]))
    table, _, _ = pj.append(table, jnp.array([0, 1, 0]))
    return jax.tree.map(np.array, table)


def broken(**changes: Any) -> pj.PageTable:
    """Sets single entries: `field=(index, value)`."""
    table = small_table()
    for name, (index, value) in changes.items():
        getattr(table, name)[index] = value
    return table


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        (
            {"refcounts": (0, 3)},
            ["(1) page 0: refcount 3, but 2 cells (slots 0, 1) and 0 pins name it"],
        ),
        (
            {"refcounts": (7, -1)},
            [
                "(1) page 7: refcount -1, but 0 cells and 0 pins name it",
                "(2) page 7: free, but refcount -1",
            ],
        ),
        ({"num_free": ((), 9)}, ["(2) num_free is 9, outside [0, 8]"]),
        ({"num_free": ((), -2)}, ["(2) num_free is -2, outside [0, 8]"]),
        (
            {"num_free": ((), 4)},
            ["(2) page 3: refcount 0, but not among the free pages"],
        ),
        (
            {"free_pages": (0, 6)},
            [
                "(2) page 6: free 2 times over",
                "(2) page 7: refcount 0, but not among the free pages",
            ],
        ),
        (
            {"free_pages": (0, 2)},
            [
                "(2) page 2: free, but refcount 1",
                "(4) page 2: free, but slot 1 names it",
            ],
        ),
        ({"seq_lens": (1, -3)}, ["(3) slot 1: -3 tokens, outside [0, 12]"]),
        ({"seq_lens": (2, 13)}, ["(3) slot 2: 13 tokens, outside [0, 12]"]),
        (
            {"seq_lens": (0, 4)},
            ["(3) slot 0: 4 tokens need 1 cell, but cell 1 names page 1"],
        ),
        (
            {"page_indices": ((1, 1), 8)},
            [
                "(1) page 2: refcount 1, but 0 cells and 0 pins name it",
                "(3) slot 1: 5 tokens need 2 cells, but cell 1 is NULL",
            ],
        ),
        ({"page_indices": ((2, 0), -1)}, ["(5) slot 2: cell 0 names page -1"]),
        ({"page_indices": ((0, 2), 2**31 - 1)}, ["(5) slot 0: cell 2 names page 2147"]),
        ({"free_pages": (4, 8)}, ["(5) free_pages[4]: page 8, outside [0, 8)"]),
    ],
)
def test_a_fault_is_named(changes: dict[str, Any], faults: list[str]) -> None:
    assert pj.check_integrity(small_table()) == []
    table = broken(**changes)
    found = pj.check_integrity(table)
    for fault in faults:
        assert any(line.startswith(fault) for line in found), found
    assert {line[:3] for line in found} >= {fault[:3] for fault in faults}
    assert all(line in pj.describe(table, np.zeros(8, int)) for line in found)


def test_pins_are_accounted_for() -> None:
    table = jax.tree.map(jnp.asarray, small_table())
    table = pj.inc_ref(table, jnp.array([1, 1, 8]))
    pins = np.array([0, 2, 0, 0, 0, 0, 0, 0])
    assert pj.check_integrity(table, pins) == []
    assert pj.check_integrity(table, pins + np.eye(8, dtype=int)[5]) == [
        "(1) page 5: refcount 0, but 0 cells and 1 pin name it"
    ]
    assert pj.check_integrity(table) == [
        "(1) page 1: refcount 3, but 1 cell (slot 0) and 0 pins name it"
    ]
    assert "pinned: 1\n" in pj.describe(table)
    assert pj.describe(table).endswith("no faults")


@pytest.mark.parametrize("pins", [np.zeros(7, int), np.zeros(8), np.zeros((8, 1), int)])
def test_pins_of_another_kind_are_refused(pins: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"pins must be int\[8\], got "):
        pj.check_integrity(small_table(), pins)


def test_a_batch_of_tables_is_refused() -> None:
    batch = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), small_table())
    with pytest.raises(ValueError, match=r"one table, got a batch of shape \(2,\)"):
        pj.describe(batch)


def test_the_picture() -> None:
    table = broken(page_indices=((1, 1), 9))
    assert pj.describe(table).splitlines() == [
        "8 pages of 4 tokens: 3 used, 5 free, 1 shared",
        "slot 0: 6 tokens  [0 x2][1 2/4]",
        "slot 1: 5 tokens  [0 x2][9?]",
        "1 of 3 slots is empty",
        "pinned: 2",
        'owners of each page, "." = free:',
        "0  211.....",
        "next free: 3 4 5 6 7",
        "(5) slot 1: cell 1 names page 9, outside [0, 8]",
    ]


def test_a_huge_table_gives_a_small_picture_and_few_messages() -> None:
    table = pj.init_page_table(
        num_pages=1_000_000, page_size=4, max_slots=300, pages_per_slot=40
    )
    table, _, _ = pj.append(table, jnp.full((300,), 157, jnp.int32))
    assert pj.check_integrity(table) == []
    picture = pj.describe(table)
    assert "[0][1][2][3] ... 32 more ... [36][37][38][39 1/4]" in picture
    assert "... and 284 live slots more" in picture
    assert "each mark 1954 pages" in picture
    wrong = dataclasses.replace(table, refcounts=table.refcounts + 1)
    faults = pj.check_integrity(wrong)
    assert "(1) ... and 999992 more" in faults and len(faults) < 20
    picture = pj.describe(wrong, np.zeros(1_000_000, int))
    assert len(picture.splitlines()) < 60 and max(map(len, picture.splitlines())) < 160


any_int = st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 10)


@given(st.data())
def test_neither_raises_on_any_table(data: st.DataObject) -> None:
    def draw(*shape: int) -> np.ndarray:
        size = int(np.prod(shape, dtype=int))
        values = data.draw(st.lists(any_int, min_size=size, max_size=size))
        return np.array(values, np.int32).reshape(shape)

    table = pj.PageTable(draw(3, 2), draw(3), draw(8), draw(8), draw(), 4)
    pins = data.draw(st.none() | st.just(draw(8)))
    assert all(line[0] == "(" for line in pj.check_integrity(table, pins))
    assert pj.describe(table, pins).isascii()
