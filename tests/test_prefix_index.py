"""The prefix index by hand, and against a dictionary of tuples."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pagedjax as pj
from pagedjax import _prefix_index

PAGE, LENGTH, SLOTS, PAGES, ENTRIES = 2, 9, 3, 24, 7
insert = jax.jit(pj.insert_prefix)
lookup = jax.jit(pj.lookup_prefix)
evict = jax.jit(pj.evict_prefixes)
append = jax.jit(pj.append)
attach = jax.jit(pj.attach)
free = jax.jit(pj.free)


def start():
    table = pj.init_page_table(
        num_pages=PAGES, page_size=PAGE, max_slots=SLOTS, pages_per_slot=6
    )
    return pj.init_prefix_index(num_entries=ENTRIES, page_size=PAGE), table


def pad(tokens):
    return jnp.asarray([*tokens, *[0] * (LENGTH - len(tokens))], jnp.int32)


def hold(table, slot, num_tokens):
    """Gives a slot room for so many tokens."""
    table, _, ok = append(
        table, jnp.zeros((SLOTS,), jnp.int32).at[slot].set(num_tokens)
    )
    assert ok[slot]
    return table


def release(table, slot):
    return free(table, jnp.arange(SLOTS) == slot)


def add(index, table, slot, tokens):
    """Holds a prompt without looking it up, and inserts it."""
    table = hold(table, slot, len(tokens))
    return insert(index, table, slot, pad(tokens), len(tokens))


def find(index, table, tokens):
    index, pages, found = lookup(index, table, pad(tokens), len(tokens))
    found = int(found)
    assert pages[found // PAGE :].tolist() == [PAGES] * (6 - found // PAGE)
    return index, pages.tolist()[: found // PAGE], found


def sound(index, table):
    assert pj.check_integrity(table, pj.prefix_pins(index, table)) == []


def test_one_token_is_left_to_feed():
    index, table = add(*start(), 0, [1, 2, 3, 4, 5, 6])
    for tokens, found in [([1, 2, 3, 4, 5, 6], 4), ([1, 2, 3, 4, 5, 6, 7], 6)]:
        index, pages, got = find(index, table, tokens)
        assert got == found and pages == [0, 1, 2][: found // PAGE]
    sound(index, table)


@pytest.mark.parametrize("length", [0, 1])
def test_less_than_a_page(length):
    """C14: nothing is remembered and nothing found."""
    index, table = add(*start(), 0, [1, 2][:length])
    table = release(table, 0)
    assert int(table.num_free) == PAGES
    assert find(index, table, [1, 2, 3])[2] == 0


def test_the_whole_prefix_must_be_equal():
    index, table = add(*start(), 0, [1, 2, 3, 4, 5, 6])
    for tokens, found in [
        ([9, 2, 3, 4, 5, 6, 7], 0),
        ([1, 2, 3, 9, 5, 6, 7], 2),
        ([3, 4, 5, 6, 7], 0),  # known pages, elsewhere in a prompt
        ([1, 2, 5, 6, 7], 2),
    ]:
        assert find(index, table, tokens)[2] == found, tokens


def test_a_collision_gives_no_page():
    """C1: with a hash that is always 7, only equal tokens are a hit."""

    def seven(tokens, page_size):
        return jnp.full((tokens.shape[0] // page_size, 2), 7, jnp.uint32)

    with mock.patch.object(_prefix_index, "_hash_prefixes", seven):
        # New functions: the cached ones have the real hash.
        put, get = (
            jax.jit(functools.partial(f)) for f in (pj.insert_prefix, pj.lookup_prefix)
        )
        index, table = start()
        table = hold(table, 0, 4)
        index, table = put(index, table, 0, pad([1, 2, 3, 4]), 4)
        for tokens, found in [([1, 2, 9], 2), ([3, 4, 9], 0), ([5, 6, 9], 0)]:
            assert int(get(index, table, pad(tokens), 3)[2]) == found
        table = hold(table, 1, 4)
        index, table = put(index, table, 1, pad([5, 6, 3, 4]), 4)
        assert int(get(index, table, pad([5, 6, 9]), 3)[2]) == 0
        sound(index, table)


def test_an_evicted_page_is_not_found():
    """A13: evict, let another slot take all pages, look the first prompt up."""
    index, table = add(*start(), 0, [1, 2, 3, 4])
    table = release(table, 0)
    index, table = evict(index, table, ENTRIES)
    table = hold(hold(table, 0, 12), 1, 12)
    assert find(index, table, [1, 2, 3, 4, 5])[2] == 0
    assert int(table.num_free) == PAGES - 12


def test_two_pages_of_the_same_tokens():
    """A14: the first stays known; the second goes with its slot."""
    index, table = add(*start(), 0, [1, 2, 3, 4])
    index, table = add(index, table, 1, [1, 2, 3, 4])
    assert int(np.sum(np.asarray(index.serials) > 0)) == 2
    table = release(table, 0)
    index, pages, found = find(index, table, [1, 2, 3, 4, 5])
    assert (pages, found) == ([0, 1], 4)
    table = release(table, 1)
    index, table = evict(index, table, ENTRIES)
    assert int(table.num_free) == PAGES and not np.any(index.serials)


def test_a_page_in_use_is_never_evicted():
    index, table = add(*start(), 0, [1, 2, 3, 4])
    index, table = add(index, table, 1, [5, 6])
    table = release(table, 1)
    index, table = evict(index, table, ENTRIES)
    assert find(index, table, [1, 2, 3, 4, 5])[2] == 4
    assert find(index, table, [5, 6, 7])[2] == 0
    sound(index, table)


def test_least_recently_used_goes_first_and_leaves_before_parents():
    index, table = add(*start(), 0, [1, 2, 3, 4])
    index, table = add(index, table, 1, [5, 6, 7, 8])
    table = release(release(table, 0), 1)
    index, _, _ = find(index, table, [1, 2, 9])  # only the first page
    order = []
    for _ in range(4):
        index, table = evict(index, table, 1)
        order.append(
            [
                int(pj.lookup_prefix(index, table, pad(p), 5)[2])
                for p in ([1, 2, 3, 4, 9], [5, 6, 7, 8, 9])
            ]
        )
    assert order == [[2, 4], [2, 2], [2, 0], [0, 0]]


def test_a_full_index_makes_room_by_itself():
    index, table = add(*start(), 0, [1] * 8)
    index, table = add(index, table, 1, [2] * 6)
    assert int(np.sum(np.asarray(index.serials) > 0)) == ENTRIES
    table = release(table, 0)
    index, table = add(index, table, 0, [3] * 4)
    assert find(index, table, [1] * 9)[2] == 4  # lost its last two
    assert find(index, table, [2] * 7)[2] == 6  # in use
    assert find(index, table, [3] * 5)[2] == 4
    # All in use: the first pages of a prompt go in, as many as there is room for.
    index, table = add(index, table, 2, [4] * 8)
    assert find(index, table, [4] * 9)[2] == 4
    sound(index, table)


def test_a_parent_that_came_back_is_not_the_same():
    """A page whose parent was evicted cannot be hit through the parent's successor."""
    index, table = add(*start(), 0, [1, 2, 3, 4])
    leaf = table.page_indices[0, 1:2]
    table = release(pj.inc_ref(table, leaf), 0)  # somebody else holds the leaf only
    index, table = evict(index, table, ENTRIES)
    assert find(index, table, [1, 2, 3, 4, 5])[2] == 0
    index, table = add(index, table, 0, [1, 2])
    assert find(index, table, [1, 2, 3, 4, 5])[2] == 2
    table = pj.dec_ref(table, leaf)
    sound(index, table)


def test_random_prompts_against_a_dictionary():
    """Whatever is found has the right tokens, page by page; nothing leaks."""
    rng = np.random.default_rng(0)
    index, table = start()
    content = {}  # page -> the prefix it holds
    rows = {}
    hits = 0
    for _ in range(150):
        slot = int(rng.integers(SLOTS))
        if slot in rows:
            table = release(table, slot)
            del rows[slot]
        elif rng.random() < 0.8:
            tokens = rng.integers(0, 2, int(rng.integers(1, LENGTH + 1))).tolist()
            index, pages, found = find(index, table, tokens)
            hits += found
            for k, page in enumerate(pages):
                assert content[page] == tuple(tokens[: (k + 1) * PAGE])
            padded = (
                jnp.full((6,), PAGES, jnp.int32)
                .at[: len(pages)]
                .set(jnp.asarray(pages, jnp.int32))
            )
            table = attach(table, slot, padded, found)
            table = hold(table, slot, len(tokens) - found)
            row = table.page_indices[slot].tolist()
            for k in range(found // PAGE, len(tokens) // PAGE):
                content[row[k]] = tuple(tokens[: (k + 1) * PAGE])
            index, table = insert(index, table, slot, pad(tokens), len(tokens))
            rows[slot] = tokens
        else:
            index, table = evict(index, table, int(rng.integers(4)))
        sound(index, table)
    assert hits > 50
    for slot in rows:
        table = release(table, slot)
    index, table = evict(index, table, ENTRIES)
    assert int(table.num_free) == PAGES


def test_page_sizes_must_agree():
    _, table = start()
    index = pj.init_prefix_index(num_entries=2, page_size=PAGE + 1)
    with pytest.raises(ValueError, match="pages of 3 tokens, but the table has .* 2"):
        pj.lookup_prefix(index, table, pad([1]), 1)
    with pytest.raises(ValueError, match="num_entries must be"):
        pj.init_prefix_index(num_entries=0, page_size=2)
