"""Greedy decoding, dense and paged, of any small model: one driver for both flavours.

A dense model is `dense(tokens[B, L]) -> logits[B, L, V]` with a causal mask. A paged
one is `apply(params, pool, tokens, batch, rows)`, tokens packed [T] or padded [S, L].
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pagedjax as pj

SLOTS = 5
PROMPT_LENS = {0: 7, 1: 1, 3: 12}  # by slot; 2 stays empty, 4 is for the fork
FORK = (0, 4)
CHUNK = 5
MAX_LEN = 40
STEPS = 24
FORK_STEP = 8  # at 14 tokens: in the middle of a page of 5, and of 16
VOCAB = 31


@dataclasses.dataclass
class Sequence:
    """One slot's tokens, and the logits the paged model gave at each but the last."""

    tokens: list[int]
    logits: list[np.ndarray]
    forced: int | None = None  # the one place where the token is not the best


def prompts() -> dict[int, list[int]]:
    """Fixed prompts by slot."""
    rng = np.random.default_rng(0)
    return {s: rng.integers(0, VOCAB, n).tolist() for s, n in PROMPT_LENS.items()}


def make_cache(
    *,
    page_size: int = 5,
    num_layers: int = 2,
    num_kv_heads: int = 4,
    head_dim: int = 6,
    dtype: Any = jnp.float32,
) -> tuple[pj.PageTable, pj.KVPool]:
    """An empty table and a pool full of NaN: what nobody wrote must not matter."""
    pages_per_slot = -(-MAX_LEN // page_size)
    table = pj.init_page_table(
        num_pages=SLOTS * pages_per_slot,
        page_size=page_size,
        max_slots=SLOTS,
        pages_per_slot=pages_per_slot,
    )
    pool = pj.init_kv_pool(
        num_layers=num_layers,
        num_pages=table.num_pages,
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
    )
    return table, jax.tree.map(lambda pages: jnp.full_like(pages, jnp.nan), pool)


class PagedRun:
    """Compiled steps of one model; each may be traced once."""

    def __init__(self, apply: Any, params: Any, *, padded: bool):
        self.apply, self.params, self.padded = apply, params, padded
        self.traces: list[str] = []

        def prefill(*args):
            self.traces.append("prefill")
            return _prefill(*args)

        def decode(*args):
            self.traces.append("decode")
            return _decode(*args)

        self.prefill = jax.jit(prefill, static_argnums=0, donate_argnums=3)
        self.decode = jax.jit(decode, static_argnums=0, donate_argnums=(2, 3))

    def generate(self, table: pj.PageTable, pool: pj.KVPool) -> dict[int, Sequence]:
        """Prefills in chunks, decodes greedily, and forks a slot on the way."""
        sequences = {s: Sequence(list(p), []) for s, p in prompts().items()}
        lens = np.array([PROMPT_LENS.get(s, 0) for s in range(SLOTS)], np.int32)
        table = append(table, lens.tolist())
        for start in range(0, lens.max(), CHUNK):
            q_lens = np.clip(lens - start, 0, CHUNK)
            rows = {s: q.tokens[start : start + CHUNK] for s, q in sequences.items()}
            tokens = self.lay_out(rows, q_lens)
            held = jnp.minimum(lens, start + CHUNK)
            pool, logits = self.prefill(
                self.apply, self.params, table, pool, tokens, q_lens, held
            )
            for s, row in self.split(logits, q_lens).items():
                sequences[s].logits += list(row)
        for s in sequences:
            sequences[s].tokens.append(int(sequences[s].logits[-1].argmax()))
        for step in range(1, STEPS):
            if step == FORK_STEP:
                table = self.fork(table, sequences)
            ones = np.array([s in sequences for s in range(SLOTS)], np.int32)
            last = np.zeros((SLOTS,), np.int32)
            for s, sequence in sequences.items():
                last[s] = sequence.tokens[-1]
            where = pool.k_pages.unsafe_buffer_pointer()
            table, pool, logits, ok = self.decode(
                self.apply,
                self.params,
                table,
                pool,
                jnp.asarray(last[:, None] if self.padded else last),
                jnp.asarray(ones),
            )
            assert ok.all()
            assert pool.k_pages.unsafe_buffer_pointer() == where
            assert logits.shape == (
                (SLOTS, 1, VOCAB) if self.padded else (SLOTS, VOCAB)
            )
            for s, sequence in sequences.items():
                sequence.logits.append(np.asarray(logits)[s].reshape(VOCAB))
                sequence.tokens.append(int(sequence.logits[-1].argmax()))
        assert self.traces == ["prefill", "decode"]
        return sequences

    def fork(self, table: pj.PageTable, sequences: dict[int, Sequence]) -> pj.PageTable:
        """Shares a slot with the empty one, which goes on with another token."""
        src, dst = FORK
        parent = sequences[src]
        # The last token has no key yet; the tables agree up to it.
        second = int(np.argsort(parent.logits[-1])[-2])
        sequences[dst] = Sequence(
            [*parent.tokens[:-1], second],
            list(parent.logits),
            forced=len(parent.tokens) - 1,
        )
        return pj.fork(table, jnp.array([src]), jnp.array([dst]))

    def lay_out(self, rows: dict[int, list[int]], q_lens: np.ndarray) -> jax.Array:
        """Padded [S, CHUNK] or packed [S * CHUNK] tokens; padding is a real token."""
        if self.padded:
            tokens = np.full((SLOTS, CHUNK), 1, np.int32)
            for s, row in rows.items():
                tokens[s, : len(row)] = row
            return jnp.asarray(tokens)
        flat = [t for s in sorted(rows) for t in rows[s]]
        assert len(flat) == q_lens.sum()
        return jnp.asarray(flat + [1] * (SLOTS * CHUNK - len(flat)), jnp.int32)

    def split(self, logits: jax.Array, q_lens: np.ndarray) -> dict[int, np.ndarray]:
        """Each slot's rows of a prefill's logits."""
        logits = np.asarray(logits)
        assert np.isfinite(logits).all()
        if self.padded:
            return {s: logits[s, :n] for s, n in enumerate(q_lens) if n}
        ends = np.cumsum(q_lens)
        return {s: logits[ends[s] - n : ends[s]] for s, n in enumerate(q_lens) if n}


def _prefill(apply, params, table, pool, tokens, q_lens, held):
    batch = pj.pack_ragged(table, q_lens, num_tokens=SLOTS * CHUNK, seq_lens=held)
    return apply(params, pool, tokens, batch)


def _decode(apply, params, table, pool, tokens, ones):
    table, plan, ok = pj.append(table, ones, max_tokens=1)
    pool = pj.copy_pages(pool, plan)
    pool, logits = apply(params, pool, tokens, pj.pack_decode(table, ones > 0))
    return table, pool, logits, ok


def dense_logits(dense: Any, tokens: list[int]) -> np.ndarray:
    """[len(tokens), V]; the dense model over the whole sequence, padded at the end."""
    padded = np.zeros((1, MAX_LEN), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(dense(jnp.asarray(padded)))[0, : len(tokens)]


def dense_greedy(dense: Any, tokens: list[int], length: int) -> list[int]:
    """Continues a sequence, recomputing all of it for every token."""
    tokens = list(tokens)
    while len(tokens) < length:
        tokens.append(int(dense_logits(dense, tokens)[-1].argmax()))
    return tokens


def assert_equals_dense(dense: Any, sequences: dict[int, Sequence]) -> None:
    """Every token, and every logit within 1e-5, as the dense model has them."""
    assert set(sequences) == {*PROMPT_LENS, FORK[1]}
    for s, sequence in sequences.items():
        start = PROMPT_LENS[s] if sequence.forced is None else sequence.forced + 1
        length = PROMPT_LENS.get(s, PROMPT_LENS[FORK[0]]) + STEPS
        want = dense_greedy(dense, sequence.tokens[:start], length)
        assert sequence.tokens == want
        got = np.stack(sequence.logits)
        np.testing.assert_allclose(
            got, dense_logits(dense, want)[:-1], rtol=1e-5, atol=1e-5
        )
    fork, parent = sequences[FORK[1]].tokens, sequences[FORK[0]].tokens
    assert fork != parent


def positions_like(tokens: jax.Array, batch: pj.RaggedBatch) -> jax.Array:
    """Absolute positions in the form of the tokens, [T] or [S, L]."""
    if tokens.ndim == 1 or batch.cu_q_lens is None:
        return batch.positions.reshape(tokens.shape)
    first = batch.seq_lens - jnp.diff(batch.cu_q_lens)
    return first[:, None] + jnp.arange(tokens.shape[1])[None]


def run_layer(call: Any, pool: pj.KVPool, x: np.ndarray) -> np.ndarray:
    """Feeds x[SLOTS, L, E] to a layer: a packed prefill, then one decode step.

    Returns the pieces joined again, [SLOTS, L, F]. `call(pool, x, batch)` gives
    `(pool, y)`.
    """
    prefill, decode = lay_out_batches(x.shape[1], pool.page_size)
    call = jax.jit(call)
    pool, first = call(pool, jnp.asarray(x[:, :-1].reshape(-1, x.shape[2])), prefill)
    _, last = call(pool, jnp.asarray(x[:, -1]), decode)
    first = np.asarray(first).reshape(*x[:, :-1].shape[:2], -1)
    return np.concatenate([first, np.asarray(last)[:, None]], axis=1)


@functools.cache
def lay_out_batches(
    length: int, page_size: int
) -> tuple[pj.RaggedBatch, pj.RaggedBatch]:
    """SLOTS sequences: all but their last token, and that token."""
    table, _ = make_cache(page_size=page_size)
    table = append(table, [length] * SLOTS)
    before = jnp.full((SLOTS,), length - 1, jnp.int32)
    prefill = pack(table, before, num_tokens=SLOTS * (length - 1), seq_lens=before)
    return prefill, pack_decode(table, jnp.ones((SLOTS,), bool))


def append(table: pj.PageTable, num_tokens: list[int]) -> pj.PageTable:
    """Makes room, which there must be."""
    table, _, ok = _append(table, jnp.asarray(num_tokens, jnp.int32))
    assert ok.all()
    return table


# Compiled once for all tests: one by one, the operations take seconds to compile.
_append = jax.jit(pj.append)
pack = jax.jit(pj.pack_ragged, static_argnames="num_tokens")
pack_decode = jax.jit(pj.pack_decode)


def oracle_attention(*, rotate=None, scale=None, window=None, soft_cap=None):
    """Makes an `attention_fn` for a dense layer: softmax(QK)V, options by hand."""

    def attention(query, key, value, mask=None, **unused):
        length, heads = query.shape[1], query.shape[2]
        positions = jnp.arange(length, dtype=jnp.int32)
        if rotate is not None:
            turn = jax.vmap(lambda x: rotate(x, positions))
            query, key = turn(query), turn(key)
        key, value = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (key, value))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
        scores *= query.shape[-1] ** -0.5 if scale is None else scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        behind = positions[:, None] - positions[None, :]
        seen = (behind >= 0) & (behind < (length if window is None else window))
        scores = jnp.where(seen[None, None], scores, -jnp.inf)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)

    return attention


def rope(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary embedding of [T, heads, D] at positions[T], pairs half a head apart."""
    half = x.shape[-1] // 2
    angle = positions[:, None].astype(jnp.float32) / 100.0 ** (
        jnp.arange(half, dtype=jnp.float32)[None] / half
    )
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
