"""Packing one step's tokens, and the write-then-attend that uses it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pagedjax as pj

pytestmark = pytest.mark.core

SLOTS, WIDTH, SIZE, PAGES = 4, 4, 3, 20
NULL = PAGES

append = jax.jit(pj.append)
pack = jax.jit(pj.pack_ragged, static_argnames="num_tokens")


def ints(*values: int) -> jax.Array:
    return jnp.array(values, jnp.int32)


def table_of(*num_tokens: int) -> pj.PageTable:
    table = pj.init_page_table(
        num_pages=PAGES, page_size=SIZE, max_slots=SLOTS, pages_per_slot=WIDTH
    )
    return append(table, ints(*num_tokens))[0]


def packed_one_by_one(
    table: pj.PageTable, q_lens: list[int], seq_lens: list[int], num_tokens: int
) -> list[tuple[int, int, int]]:
    """(position, page, offset) of each token, from the definition."""
    tokens = [
        (i, int(table.page_indices[s, i // SIZE]), i % SIZE)
        for s in range(SLOTS)
        for i in range(seq_lens[s] - q_lens[s], seq_lens[s])
    ]
    return tokens + [(0, NULL, 0)] * (num_tokens - len(tokens))


@pytest.mark.parametrize(
    ("q_lens", "seq_lens"),
    [
        ((3, 0, 2, 1), None),
        ((0, 0, 0, 0), None),
        ((7, 5, 12, 1), None),
        ((0, 0, 12, 0), None),
        ((0, 0, 0, 1), None),
        ((1, 1, 1, 1), None),
        ((2, 0, 3, 1), (4, 5, 3, 1)),
        ((3, 2, 0, 0), (3, 2, 6, 0)),
    ],
)
@pytest.mark.parametrize("num_tokens", [25, 31])
def test_a_batch_holds_the_last_tokens_of_each_slot_in_slot_order(
    q_lens: tuple[int, ...], seq_lens: tuple[int, ...] | None, num_tokens: int
) -> None:
    table = table_of(7, 5, 12, 1)
    upto = None if seq_lens is None else ints(*seq_lens)
    batch = pack(table, ints(*q_lens), num_tokens=num_tokens, seq_lens=upto)
    ends = list(seq_lens or (7, 5, 12, 1))
    got = zip(
        batch.positions.tolist(),
        batch.pages.tolist(),
        batch.offsets.tolist(),
        strict=True,
    )
    assert list(got) == packed_one_by_one(table, list(q_lens), ends, num_tokens)
    assert batch.cu_q_lens.tolist() == [0, *np.cumsum(q_lens).tolist()]
    takes_part = np.array(q_lens) > 0
    assert batch.seq_lens.tolist() == np.where(takes_part, ends, 0).tolist()
    np.testing.assert_array_equal(batch.page_indices, table.page_indices)
    last = np.cumsum(q_lens)[takes_part] - 1
    assert batch.last_rows[takes_part].tolist() == last.tolist()


def test_a_batch_without_room_keeps_to_the_tokens_it_has_room_for() -> None:
    table = table_of(4, 3, 0, 0)
    batch = pack(table, ints(4, 3, 0, 0), num_tokens=5)
    want = packed_one_by_one(table, [4, 3, 0, 0], [4, 3, 0, 0], 5)
    assert batch.pages.tolist() == [page for _, page, _ in want][:5]


@pytest.mark.parametrize("wrong", [-2, 9])
def test_a_wrong_q_len_does_not_move_the_tokens_of_other_slots(wrong: int) -> None:
    table = table_of(4, 3, 2, 0)
    batch = pack(table, ints(4, wrong, 2, 0), num_tokens=12)
    held = min(max(wrong, 0), 3)
    want = packed_one_by_one(table, [4, held, 2, 0], [4, 3, 2, 0], 12)
    assert batch.pages.tolist() == [page for _, page, _ in want]


def test_too_many_tokens_leave_a_batch_that_attention_accepts() -> None:
    table = table_of(4, 3, 2, 0)
    batch = pack(table, ints(4, 3, 2, 0), num_tokens=5)
    assert batch.cu_q_lens.tolist() == [0, 4, 5, 5, 5]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0]
    assert batch.seq_lens.tolist() == [4, 1, 0, 0]


def test_chunks_cover_a_prompt_without_gap_or_overlap() -> None:
    table = table_of(0, 11, 0, 0)
    whole = pack(table, ints(0, 11, 0, 0), num_tokens=12)
    places = []
    for first in range(0, 11, 4):
        last = min(first + 4, 11)
        chunk = pack(
            table,
            ints(0, last - first, 0, 0),
            num_tokens=4,
            seq_lens=ints(0, last, 0, 0),
        )
        places += zip(chunk.pages.tolist(), chunk.offsets.tolist(), strict=True)
    assert places == list(
        zip(whole.pages.tolist(), whole.offsets.tolist(), strict=True)
    )


def test_a_decode_batch_holds_the_last_token_of_each_active_slot() -> None:
    table = table_of(7, 5, 0, 1)
    batch = jax.jit(pj.pack_decode)(table, jnp.array([True, False, True, True]))
    cells = table.page_indices
    assert batch.pages.tolist() == [cells[0, 2], NULL, NULL, cells[3, 0]]
    assert batch.offsets.tolist() == [0, 0, 0, 0]
    assert batch.positions.tolist() == [6, 0, 0, 0]
    assert batch.seq_lens.tolist() == [7, 0, 0, 1]
    assert batch.cu_q_lens is None
    assert batch.last_rows.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("pack", ["decode", "ragged"])
def test_a_batch_made_outside_of_jit_does_not_share_the_table(pack: str) -> None:
    """Both may be donated to the step, or the table alone before the batch is used."""
    table, q_lens = table_of(7, 5, 0, 1), ints(1, 1, 0, 1)
    if pack == "decode":
        batch = pj.pack_decode(table, q_lens > 0)
    else:
        batch = pj.pack_ragged(table, q_lens, num_tokens=SLOTS, seq_lens=table.seq_lens)
    held = {array.unsafe_buffer_pointer() for array in jax.tree.leaves(table)}
    made = {array.unsafe_buffer_pointer() for array in jax.tree.leaves(batch)}
    assert not held & made
    step = jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)
    step(table)
    assert table.page_indices.is_deleted()
    assert batch.page_indices.tolist() == table_of(7, 5, 0, 1).page_indices.tolist()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda t: pj.pack_ragged(t, ints(0), num_tokens=4), ValueError, "q_lens"),
        (
            lambda t: pj.pack_ragged(t, jnp.zeros(SLOTS), num_tokens=4),
            TypeError,
            "q_lens must be int32, got float32",
        ),
        (
            lambda t: pj.pack_ragged(t, ints(0, 0, 0, 0), num_tokens=0),
            ValueError,
            "num_tokens must be a whole number >= 1, got 0",
        ),
        (
            lambda t: pj.pack_ragged(
                t, ints(0, 0, 0, 0), num_tokens=4, seq_lens=ints(1)
            ),
            ValueError,
            "seq_lens",
        ),
        (lambda t: pj.pack_decode(t, ints(0, 1, 0, 1)), ValueError, r"bool\[4\]"),
        (lambda t: pj.pack_decode(t, jnp.array([True])), ValueError, r"bool\[4\]"),
    ],
)
def test_a_wrong_argument_is_named(
    call: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(table_of(0, 0, 0, 0))


HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 8, 2


def attention(q: Any, k: Any, v: Any) -> np.ndarray:
    """One query [H, D] against all keys [T, K, D], in float64."""
    out = np.empty((HEADS, DIM))
    for head in range(HEADS):
        kv = head // (HEADS // KV_HEADS)
        scores = k[:, kv] @ q[head] / np.sqrt(DIM)
        weights = np.exp(scores - scores.max())
        out[head] = weights @ v[:, kv] / weights.sum()
    return out


def test_attend_writes_and_then_sees_the_whole_history() -> None:
    """A prefill in two chunks, a decode token and padding, in both layers."""
    rng = np.random.default_rng(0)
    full = table_of(7, 5, 0, 1)
    pool = pj.init_kv_pool(
        num_layers=LAYERS,
        num_pages=PAGES,
        page_size=SIZE,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
    )
    pool = jax.tree.map(lambda held: jnp.full_like(held, jnp.nan), pool)
    k_of = rng.normal(size=(LAYERS, SLOTS, WIDTH * SIZE, KV_HEADS, DIM))
    v_of = rng.normal(size=k_of.shape)
    attend = jax.jit(pj.attend)
    for q_lens, seq_lens in (
        ((4, 5, 0, 0), (4, 5, 0, 0)),
        ((3, 0, 0, 1), (7, 5, 0, 1)),
    ):
        batch = pack(full, ints(*q_lens), num_tokens=10, seq_lens=ints(*seq_lens))
        places = [
            (s, i)
            for s in range(SLOTS)
            for i in range(seq_lens[s] - q_lens[s], seq_lens[s])
        ]
        for layer in range(LAYERS):
            q = rng.normal(size=(10, HEADS, DIM))
            k, v = np.full((2, 10, KV_HEADS, DIM), np.nan)
            for t, (s, i) in enumerate(places):
                k[t], v[t] = k_of[layer, s, i], v_of[layer, s, i]
            f32 = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
            pool, out = attend(pool, jnp.int32(layer), *f32, batch)
            for t, (s, i) in enumerate(places):
                seen = k_of[layer, s, : i + 1], v_of[layer, s, : i + 1]
                np.testing.assert_allclose(out[t], attention(q[t], *seen), atol=2e-6)
            assert not np.asarray(out[len(places) :]).any()
