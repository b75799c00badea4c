"""Real faults of other paged-KV systems, as small tests of the table and the pool.

Every test names a public report. The numbers (A1, E5, ...) are those of the list the
project keeps; what they have in common with one another is in the machine.
"""

import functools
import itertools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pagedjax as pj

pytestmark = pytest.mark.core

SIZE, WIDTH, PAGES, LAYERS = 4, 6, 16, 2
NULL = PAGES

append = jax.jit(pj.append, static_argnames="max_tokens")
fork, truncate, free = jax.jit(pj.fork), jax.jit(pj.truncate), jax.jit(pj.free)
reorder, attach = jax.jit(pj.reorder), jax.jit(pj.attach)
inc_ref, dec_ref = jax.jit(pj.inc_ref), jax.jit(pj.dec_ref)


def ints(*values: int) -> jax.Array:
    return jnp.array(values, jnp.int32)


def only(slot: int, slots: int = 4) -> jax.Array:
    return jnp.arange(slots) == slot


def new_table(num_pages: int = PAGES, slots: int = 4, width: int = WIDTH) -> Any:
    return pj.init_page_table(
        num_pages=num_pages, page_size=SIZE, max_slots=slots, pages_per_slot=width
    )


def new_pool(num_pages: int = PAGES) -> pj.KVPool:
    pool = pj.init_kv_pool(
        num_layers=LAYERS,
        num_pages=num_pages,
        page_size=SIZE,
        num_kv_heads=2,
        head_dim=4,
    )
    return jax.tree.map(lambda held: jnp.full_like(held, jnp.nan), pool)


def row_of(table: pj.PageTable, slot: int) -> list[int]:
    return [
        page for page in table.page_indices[slot].tolist() if page < table.num_pages
    ]


@functools.partial(jax.jit, static_argnames="places", donate_argnums=(0, 1))
def step(
    table: pj.PageTable,
    pool: pj.KVPool,
    num_tokens: jax.Array,
    values: jax.Array,
    *,
    places: int = 32,
) -> tuple[pj.PageTable, pj.KVPool, jax.Array]:
    """Room, copies, and `values[s]` written as every new token of slot s."""
    table, plan, ok = pj.append(table, num_tokens)
    pool = pj.copy_pages(pool, plan)
    q_lens = jnp.where(ok, num_tokens, 0)
    batch = pj.pack_ragged(table, q_lens, num_tokens=places)
    token = jnp.arange(places, dtype=jnp.int32)
    slot = jnp.searchsorted(batch.cu_q_lens[1:], token, side="right")
    value = values.at[slot].get(mode="clip").astype(jnp.float32)
    for layer in range(LAYERS):
        k = jnp.broadcast_to((value + layer)[:, None, None], (places, 2, 4))
        pool = pj.write_kv(pool, layer, k, -k, batch.pages, batch.offsets)
    return table, pool, ok


@functools.partial(jax.jit, static_argnums=2)
def gather(pool: pj.KVPool, table: pj.PageTable, layer: int, slot: Any) -> Any:
    return pj.gather_kv(pool, layer, table, slot)


def read_back(table: pj.PageTable, pool: pj.KVPool, slot: int) -> list[float]:
    """Reads the value of every token of a slot; all layers, k, v and heads agree."""
    held = int(table.seq_lens[slot])
    found = []
    for layer in range(LAYERS):
        k, v = (np.asarray(x)[:held] for x in gather(pool, table, layer, slot))
        found += [k - layer, -v - layer]
    values = found[0][:, 0, 0]
    for one in found:
        np.testing.assert_array_equal(
            one, np.broadcast_to(values[:, None, None], one.shape)
        )
    return values.tolist()


def rows_of_page(pool: pj.KVPool, pages: list[int]) -> list[np.ndarray]:
    rows = [layer * pool.num_pages + page for layer in range(LAYERS) for page in pages]
    return [np.asarray(leaf)[rows] for leaf in jax.tree.leaves(pool)]


def test_a1_a_row_that_repeats_a_page_counts_every_cell() -> None:
    """vllm-project/vllm#1556: fork and free must count cells, or pages, alike."""
    table = append(new_table(), ints(8, 0, 0, 0))[0]
    table = inc_ref(table, ints(0, 1))
    table = free(table, only(0))
    pins = np.zeros(PAGES, int)
    pins[:2] = 1
    row = ints(0, 1, 0, 1, NULL, NULL)
    table = attach(table, jnp.int32(0), row, jnp.int32(16))
    assert table.refcounts[:2].tolist() == [3, 3]
    table = fork(table, ints(0), ints(1))
    assert table.refcounts[:2].tolist() == [5, 5]
    assert pj.check_integrity(table, pins) == []
    table = dec_ref(table, ints(0, 1))
    for mask, num_free in ((only(0), PAGES - 2), (only(1), PAGES)):
        table = free(table, mask)
        assert pj.check_integrity(table) == []
        assert int(table.num_free) == num_free


def test_a2_a_page_named_twice_in_one_release_is_freed_once() -> None:
    """vllm-project/vllm#42571."""
    table = append(new_table(), ints(4, 0, 0, 0))[0]
    table = inc_ref(table, ints(0))
    table = free(table, only(0))
    table = inc_ref(table, ints(0))
    before = int(table.num_free)
    table = dec_ref(table, ints(0, 0))
    assert int(table.num_free) == before + 1
    assert pj.check_integrity(table) == []
    # Once too often: reported, and not free a second time.
    table = dec_ref(table, ints(0, 0))
    assert int(table.num_free) == before + 1
    assert "(2) page 0: free, but refcount -2" in pj.check_integrity(table)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_a4_a_tree_of_forks_comes_down_in_any_order(order: tuple[int, ...]) -> None:
    """apache/tvm#17045, mlc-ai/mlc-llm#2462: a parent may leave before its child."""
    table, pool = new_table(), new_pool()
    table, pool, _ = step(table, pool, ints(6, 0, 0, 0), ints(1, 0, 0, 0))
    table = fork(table, ints(0), ints(1))
    table, pool, _ = step(table, pool, ints(1, 3, 0, 0), ints(2, 3, 0, 0))
    table = fork(table, ints(1, 0), ints(2, 3), ints(8, 5))
    table, pool, _ = step(table, pool, ints(0, 1, 2, 4), ints(0, 4, 5, 6))
    histories = [read_back(table, pool, slot) for slot in range(4)]
    assert histories == [
        [1] * 6 + [2],
        [1] * 6 + [3] * 3 + [4],
        [1] * 6 + [3] * 2 + [5] * 2,
        [1] * 5 + [6] * 4,
    ]
    for slot in order:
        lens = np.array(table.seq_lens)
        lens[slot] -= 1 + slot
        table = truncate(table, jnp.array(lens))
        assert read_back(table, pool, slot) == histories[slot][: lens[slot]]
        table = free(table, only(slot))
        assert pj.check_integrity(table) == []
        for other in range(4):
            if table.seq_lens[other]:
                assert read_back(table, pool, other) == histories[other]
    assert int(table.num_free) == PAGES


@pytest.mark.parametrize("offset", range(1, SIZE))
def test_a5_a_copied_page_is_whole_and_no_other_changes(offset: int) -> None:
    """mlc-ai/mlc-llm#2644: a fork inside a page."""
    table, pool = new_table(), new_pool()
    table, pool, _ = step(table, pool, ints(SIZE, 0, 0, 9), ints(1, 0, 0, 7))
    table, pool, _ = step(table, pool, ints(offset, 0, 0, 0), ints(2, 0, 0, 0))
    table = fork(table, ints(0), ints(2))
    table, plan, _ = append(table, ints(0, 0, 1, 0))
    before = pool
    pool = jax.jit(pj.copy_pages)(pool, plan)
    src, dst = int(plan.src_pages[2]), int(plan.dst_pages[2])
    assert [src, dst] == [row_of(table, 0)[-1], row_of(table, 2)[-1]] and src != dst
    chex.assert_trees_all_equal(rows_of_page(pool, [dst]), rows_of_page(before, [src]))
    others = [page for page in range(PAGES) if page != dst]
    chex.assert_trees_all_equal(
        rows_of_page(pool, others), rows_of_page(before, others)
    )


def test_a7_beams_do_not_write_through_to_each_other() -> None:
    """nod-ai/amd-shark-ai#2276: three beams from a prompt of a page and a token."""
    table, pool = new_table(), new_pool()
    table, pool, _ = step(table, pool, ints(SIZE + 1, 0, 0, 0), ints(1, 0, 0, 0))
    table = reorder(table, ints(0, 0, 0, 3))
    table, pool, ok = step(table, pool, ints(1, 1, 1, 0), ints(2, 3, 4, 0))
    assert ok.all() and int(pj.num_used_pages(table)) == 4
    for beam in range(3):
        assert read_back(table, pool, beam) == [1] * (SIZE + 1) + [2 + beam]
    table = reorder(table, ints(2, 2, 0, 3))
    table, pool, _ = step(table, pool, ints(1, 1, 1, 0), ints(5, 6, 7, 0))
    heads = [4, 4, 2]
    for beam in range(3):
        history = [1] * (SIZE + 1) + [heads[beam], 5 + beam]
        assert read_back(table, pool, beam) == history
    table = free(table, jnp.ones((4,), bool))
    assert pj.check_integrity(table) == [] and int(table.num_free) == PAGES


def test_a8_a_shared_tail_is_copied_by_whoever_writes_first() -> None:
    """Avarok-Cybersecurity/atlas#1193."""
    table, pool = new_table(), new_pool()
    table, pool, _ = step(table, pool, ints(SIZE + 2, 0, 0, 0), ints(1, 0, 0, 0))
    table = fork(table, ints(0), ints(1))
    table, pool, _ = step(table, pool, ints(0, 1, 0, 0), ints(0, 3, 0, 0))
    table, pool, _ = step(table, pool, ints(1, 0, 0, 0), ints(2, 0, 0, 0))
    assert read_back(table, pool, 0) == [1] * (SIZE + 2) + [2]
    assert read_back(table, pool, 1) == [1] * (SIZE + 2) + [3]


def test_a11_what_a_page_holds_outlives_the_slot_that_wrote_it() -> None:
    """mlx-node/mlx-node#7."""
    table, pool = new_table(), new_pool()
    table, pool, _ = step(table, pool, ints(7, 0, 0, 0), ints(1, 0, 0, 0))
    table = fork(table, ints(0), ints(1))
    table = free(table, only(0))
    table, pool, _ = step(table, pool, ints(16, 0, 8, 0), ints(8, 0, 9, 0))
    assert read_back(table, pool, 1) == [1] * 7
    table, pool, _ = step(table, pool, ints(0, 2, 0, 0), ints(0, 2, 0, 0))
    assert read_back(table, pool, 1) == [1] * 7 + [2] * 2


def test_a16_all_the_tokens_of_the_last_page_may_go() -> None:
    """apache/tvm#16871."""
    table = append(new_table(), ints(2 * SIZE, 0, 0, 0))[0]
    table = truncate(table, ints(SIZE, 0, 0, 0))
    assert row_of(table, 0) == [0] and int(table.num_free) == PAGES - 1
    table = append(table, ints(1, 0, 0, 0))[0]
    assert row_of(table, 0) == [0, 1]
    table = truncate(table, ints(0, 0, 0, 0))
    assert row_of(table, 0) == [] and int(table.num_free) == PAGES


def test_d7_pages_freed_in_a_step_are_there_for_the_same_step() -> None:
    """vllm-project/vllm#30166."""

    @jax.jit
    def replace(table: pj.PageTable) -> Any:
        return pj.append(pj.free(table, only(0)), ints(0, 16, 0, 0))

    table = append(new_table(num_pages=4), ints(16, 0, 0, 0))[0]
    table, _, ok = replace(table)
    assert ok.all() and len(row_of(table, 1)) == 4


def test_d8_a_row_grows_to_its_width_and_no_further() -> None:
    """gittensor-ai-lab/sparkinfer#33: one token at a time."""
    table = append(new_table(slots=2, width=2), ints(0, 3))[0]
    for length in range(1, 2 * SIZE + 1):
        table, _, ok = append(table, ints(1, 0), max_tokens=1)
        assert ok[0] and int(table.seq_lens[0]) == length
        assert len(row_of(table, 0)) == -(-length // SIZE)
    after, _, ok = append(table, ints(1, 1), max_tokens=1)
    assert ok.tolist() == [False, True]
    assert after.page_indices.tolist() == table.page_indices.tolist()


def test_d13_a_decode_step_in_a_full_pool_is_refused_and_harms_nobody() -> None:
    """MaxText's page manager moved the length and wrote over slot 0."""
    table, pool = new_table(num_pages=3), new_pool(num_pages=3)
    table, pool, _ = step(table, pool, ints(4, 4, 3, 0), ints(1, 2, 3, 0))
    table, pool, ok = step(table, pool, ints(1, 1, 1, 1), ints(7, 8, 9, 9))
    assert ok.tolist() == [False, False, True, False]
    histories = [read_back(table, pool, slot) for slot in range(4)]
    assert histories == [[1] * 4, [2] * 4, [3] * 3 + [9], []]


def test_e1_padding_rows_leave_the_last_page_alone() -> None:
    """vllm-project/vllm#43810: -1 wraps to the last page."""
    table, pool = new_table(num_pages=4), new_pool(num_pages=4)
    table, pool, _ = step(table, pool, ints(0, 0, 16, 0), ints(0, 0, 1, 0))
    assert 3 in row_of(table, 2)
    before = jax.device_get(pool)
    batch = pj.pack_decode(table, jnp.array([True, True, False, True]))
    assert batch.pages.tolist() == [4] * 4
    kv = jnp.full((4, 2, 4), 99.0)
    for layer in range(LAYERS):
        pool = pj.write_kv(pool, layer, kv, kv, batch.pages, batch.offsets)
    pool = pj.write_kv(pool, 0, kv, kv, jnp.full((4,), -1), batch.offsets)
    chex.assert_trees_all_equal(jax.device_get(pool), before)


@pytest.mark.parametrize("stray", [-1, PAGES, PAGES + 5, 2**31 - 1, 0])
def test_e2_what_a_row_names_past_its_end_is_not_read(stray: int) -> None:
    """microsoft/onnxruntime#32391: neither page 0 nor anything out of range."""
    table, pool = new_table(), new_pool()
    table, pool, _ = step(table, pool, ints(4, 6, 0, 0), ints(1, 2, 0, 0))
    batch = pj.pack_decode(table, jnp.array([False, True, False, False]))
    q, kv = jnp.ones((4, 2, 4)), jnp.full((4, 2, 4), 2.0)
    _, want = pj.attend(pool, 0, q, kv, -kv, batch)
    past = jnp.arange(WIDTH)[None, :] >= -(-table.seq_lens // SIZE)[:, None]
    cells = jnp.where(past, stray, table.page_indices)
    odd = pj.PageTable(
        cells, table.seq_lens, table.refcounts, table.free_pages, table.num_free, SIZE
    )
    batch = pj.pack_decode(odd, jnp.array([False, True, False, False]))
    after, got = pj.attend(pool, 0, q, kv, -kv, batch)
    np.testing.assert_array_equal(got, want)
    assert read_back(odd, after, 1) == read_back(table, pool, 1)
    assert pj.check_integrity(odd) or stray == NULL


def test_e5_a_step_of_padding_alone_changes_no_byte() -> None:
    """vllm-project/vllm#56734: warm-up steps of an idle worker on a live state."""
    table, pool = new_table(), new_pool()
    table, pool, _ = step(table, pool, ints(9, 5, 0, 0), ints(1, 2, 0, 0))
    table = free(table, only(1))
    before = jax.device_get((table, pool))
    table, pool, ok = step(table, pool, ints(0, 0, 0, 0), ints(9, 9, 9, 9))
    assert ok.all()
    kv = jnp.full((4, 2, 4), 99.0)
    idle = pj.pack_decode(table, jnp.zeros((4,), bool))
    for layer in range(LAYERS):
        pool, out = pj.attend(pool, layer, kv, kv, kv, idle)
        assert not np.asarray(out).any()
    chex.assert_trees_all_equal(jax.device_get((table, pool)), before)


def test_e10_a_position_past_the_room_is_not_written() -> None:
    """gittensor-ai-lab/sparkinfer#41."""
    table, pool = new_table(), new_pool()
    table, pool, _ = step(table, pool, ints(5, 8, 0, 0), ints(1, 2, 0, 0))
    before = jax.device_get(pool)
    positions = ints(5, 7, 8, 24, 1000, 2**31 - 1, -1)
    pages, offsets = pj.translate(table, jnp.zeros_like(positions), positions)
    assert pages.tolist() == [NULL] * 7
    kv = jnp.full((7, 2, 4), 99.0)
    pool = pj.write_kv(pool, 1, kv, kv, pages, offsets)
    chex.assert_trees_all_equal(jax.device_get(pool), before)


def test_e11_a_row_that_moves_leaves_no_old_ids_behind() -> None:
    """tenstorrent/vllm-tt-plugin#103: the old occupant's ids stayed in the tail."""
    table, pool = new_table(), new_pool()
    table, pool, _ = step(table, pool, ints(22, 6, 0, 0), ints(1, 2, 0, 0))
    former = row_of(table, 0)
    table = free(table, only(0))
    table = reorder(table, ints(1, 0, 2, 3))
    assert table.page_indices[0, 2:].tolist() == [NULL] * 4
    assert table.page_indices[1].tolist() == [NULL] * WIDTH
    before = rows_of_page(pool, former)
    table, pool, _ = step(table, pool, ints(2, 0, 0, 0), ints(3, 0, 0, 0))
    chex.assert_trees_all_equal(rows_of_page(pool, former), before)
    assert read_back(table, pool, 0) == [2] * 6 + [3] * 2


def test_g2_a_refused_step_leaves_the_state_it_found() -> None:
    """ggml-org/llama.cpp#12695: too large a batch, then a smaller one."""
    table, pool = new_table(num_pages=4), new_pool(num_pages=4)
    table, pool, _ = step(table, pool, ints(6, 0, 0, 0), ints(1, 0, 0, 0))
    table = fork(table, ints(0), ints(1))
    before = jax.device_get((table, pool))
    table, pool, ok = step(table, pool, ints(12, 11, 24, 0), ints(7, 8, 9, 0))
    assert ok.tolist() == [False, False, False, True]
    chex.assert_trees_all_equal(jax.device_get((table, pool)), before)
    table, pool, ok = step(table, pool, ints(1, 1, 4, 0), ints(2, 3, 4, 0))
    assert ok.all()
    histories = [read_back(table, pool, slot) for slot in range(3)]
    assert histories == [[1] * 6 + [2], [1] * 6 + [3], [4] * 4]


def test_g7_every_rollback_keeps_what_was_accepted() -> None:
    """paiml/aprender#2014: accept j of k drafted tokens, from every start in a page."""
    for start, kept in itertools.product(range(SIZE), (0, 1, 4, 5)):
        table, pool = new_table(), new_pool()
        table, pool, _ = step(table, pool, ints(start, 9, 0, 0), ints(1, 2, 0, 0))
        table, pool, _ = step(table, pool, ints(5, 0, 0, 0), ints(3, 0, 0, 0))
        table = truncate(table, ints(start + kept, 9, 0, 0))
        assert len(row_of(table, 0)) == -(-(start + kept) // SIZE)
        table, pool, _ = step(table, pool, ints(2, 0, 0, 0), ints(4, 0, 0, 0))
        assert read_back(table, pool, 0) == [1] * start + [3] * kept + [4] * 2
        assert read_back(table, pool, 1) == [2] * 9
        assert pj.check_integrity(table) == []
