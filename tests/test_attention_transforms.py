"""Attention under vmap, loops, shard_map and grad, and what it costs."""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    Arrays,
    attention_of,
    make_arrays,
    small_decode,
    small_ragged,
)
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pagedjax import paged_attention, ragged_paged_attention

BOTH = pytest.mark.parametrize("make", [small_decode, small_ragged])


# --- transformations ------------------------------------------------------------------


@BOTH
def test_vmap_is_a_loop(make: Callable) -> None:
    many = [make(seed=seed) for seed in range(3)]
    stacked = [jnp.stack(x) for x in zip(*(a.args() for a in many), strict=True)]
    attention = partial(attention_of(many[0]), return_lse=True, window=6)
    out, lse = jax.vmap(attention)(*stacked)
    for i, arrays in enumerate(many):
        expected = attention(*arrays.args())
        np.testing.assert_allclose(out[i], expected[0], atol=2e-6)
        np.testing.assert_allclose(lse[i], expected[1], atol=2e-6)
    # Queries batched, pool and table shared.
    out, _ = jax.vmap(attention, in_axes=(0, *[None] * (len(stacked) - 1)))(
        stacked[0], *many[0].args()[1:]
    )
    np.testing.assert_allclose(out[0], attention(*many[0].args())[0], atol=2e-6)


@pytest.mark.core
@BOTH
def test_inside_scan_and_while_loop(make: Callable) -> None:
    # A flat pool of three layers; the layer is a traced offset of the page ids.
    arrays = make()
    layers = [make(seed=0) for _ in range(3)]
    num_pages = len(arrays.k_pages)
    k_pages = jnp.concatenate([x.k_pages * (i + 1) for i, x in enumerate(layers)])
    v_pages = jnp.concatenate([x.v_pages - i for i, x in enumerate(layers)])
    q, _, _, page_indices, *lens = arrays.args()
    live = (page_indices >= 0) & (page_indices < num_pages)
    attention = attention_of(arrays)

    def layer(i):
        ids = jnp.where(live, page_indices + i * num_pages, 3 * num_pages)
        return attention(q, k_pages, v_pages, ids, *lens)

    _, scanned = jax.jit(
        lambda: lax.scan(lambda c, i: (c, layer(i)), 0, jnp.arange(3))
    )()
    for i in range(3):
        expected = attention(
            q,
            k_pages[i * num_pages : (i + 1) * num_pages],
            v_pages[i * num_pages : (i + 1) * num_pages],
            page_indices,
            *lens,
        )
        np.testing.assert_allclose(scanned[i], expected, atol=2e-6)

    def step(state):
        i, total = state
        return i + 1, total + layer(i)

    _, total = jax.jit(
        lambda: lax.while_loop(lambda s: s[0] < 3, step, (0, jnp.zeros_like(q)))
    )()
    np.testing.assert_allclose(total, scanned.sum(0), atol=1e-5)


@BOTH
def test_shard_map_over_kv_heads(make: Callable) -> None:
    arrays = make(heads=(8, 4))
    mesh = jax.make_mesh((4,), ("kv",), axis_types=(AxisType.Auto,))
    by_head, whole = P(None, "kv"), P()
    in_specs = (by_head, P(None, None, "kv"), P(None, None, "kv"), whole, whole)
    if arrays.cu_q_lens is not None:
        in_specs = (*in_specs, whole)
    attention = partial(attention_of(arrays), return_lse=True, window=9)
    sharded = jax.jit(
        jax.shard_map(
            attention, mesh=mesh, in_specs=in_specs, out_specs=(by_head, by_head)
        )
    )
    expected = attention(*arrays.args())
    out = sharded(*arrays.args())
    np.testing.assert_allclose(out[0], expected[0], atol=2e-6)
    np.testing.assert_allclose(out[1], expected[1], atol=2e-6)

    def loss(attention, q, k_pages, v_pages):
        return jnp.sum(jnp.sin(attention(q, k_pages, v_pages, *arrays.args()[3:])[0]))

    grads = [
        jax.grad(partial(loss, f), argnums=(0, 1, 2))(*arrays.args()[:3])
        for f in (sharded, attention)
    ]
    for mine, theirs in zip(*grads, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=4e-6)


@pytest.mark.core
@BOTH
@pytest.mark.parametrize("heads", [None, "x"], ids=["replicated", "by head"])
def test_arrays_on_an_explicit_mesh(make: Callable, heads: str | None) -> None:
    """`jax.make_mesh` makes Explicit axes: each result must say where it is."""
    arrays = make(heads=(8, 4))
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    places = (P(None, heads), P(None, None, heads), P(None, None, heads))
    attention = partial(attention_of(arrays), return_lse=True)

    def loss(*qkv: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, lse = attention(*qkv, *arrays.args()[3:])
        return loss_of(out, lse), out

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
    (_, want), want_grads = run(*arrays.args()[:3])
    placed = [
        jax.device_put(x, NamedSharding(mesh, place))
        for x, place in zip(arrays.args(), places, strict=False)
    ]
    (_, out), grads = run(*placed)
    assert jax.typeof(out).sharding.spec == P(None, heads, None)
    np.testing.assert_allclose(out, want, atol=2e-6)
    for mine, theirs in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=4e-6)


# --- gradients ------------------------------------------------------------------------


def dense_attention(q, k_pages, v_pages, arrays: Arrays, *, window=None, soft_cap=None):
    """Return (out, lse) by the plain formula, slot by slot; differentiable."""
    page_size, num_kv_heads = k_pages.shape[1:3]
    group = q.shape[1] // num_kv_heads
    out, lse = jnp.zeros_like(q), jnp.full(q.shape[:2], -jnp.inf)
    cu_q_lens = arrays.cu_q_lens
    if cu_q_lens is None:
        cu_q_lens = np.arange(len(arrays.seq_lens) + 1)
    for slot, length in enumerate(arrays.seq_lens):
        rows = slice(cu_q_lens[slot], cu_q_lens[slot + 1])
        num_rows = rows.stop - rows.start
        if length == 0 or num_rows == 0:
            continue
        tokens = np.arange(length)
        places = np.arange(length - num_rows, length)[:, None]
        seen = tokens <= places
        if window is not None:
            seen &= tokens > places - window
        used = tokens[seen.any(axis=0)]  # the others may be NaN
        at = arrays.page_indices[slot, used // page_size], used % page_size
        keys = jnp.repeat(k_pages[at], group, axis=1)
        values = jnp.repeat(v_pages[at], group, axis=1)
        scores = jnp.einsum("rhd,nhd->hrn", q[rows], keys) / math.sqrt(q.shape[-1])
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(seen[None][..., used], scores, -jnp.inf)
        part = jnp.einsum("hrn,nhd->rhd", jax.nn.softmax(scores), values)
        out = out.at[rows].set(part)
        lse = lse.at[rows].set(jax.nn.logsumexp(scores, axis=-1).T)
    return out, lse


def loss_of(out: jax.Array, lse: jax.Array) -> jax.Array:
    """Return a number that depends on every element of both, and on no -inf."""
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(jnp.where(lse > -jnp.inf, lse, 0)))


@pytest.mark.core
@BOTH
@pytest.mark.parametrize(
    "options", [{}, {"window": 3}, {"soft_cap": 1.5}, {"window": 5, "soft_cap": 2.0}]
)
def test_gradients_are_those_of_the_formula(make: Callable, options: dict) -> None:
    arrays = make()
    # Slots 2 and 4 share their first page, whose gradient is the sum over both.
    arrays.page_indices[2, 0] = arrays.page_indices[4, 0]
    args = arrays.args()

    def mine(q, k_pages, v_pages):
        attention = partial(attention_of(arrays), return_lse=True, **options)
        return loss_of(*attention(q, k_pages, v_pages, *args[3:]))

    def theirs(q, k_pages, v_pages):
        return loss_of(*dense_attention(q, k_pages, v_pages, arrays, **options))

    grads = jax.jit(jax.grad(mine, argnums=(0, 1, 2)))(*args[:3])
    # NaN pages stay out of the plain formula, so its gradient there is 0, not NaN.
    expected = jax.jit(jax.grad(theirs, argnums=(0, 1, 2)))(*args[:3])
    for grad, other in zip(grads, expected, strict=True):
        np.testing.assert_allclose(grad, other, atol=4e-6)
        assert np.any(np.asarray(other) != 0)


def test_gradients_over_many_blocks() -> None:
    arrays = make_arrays([290, 150], q_lens=[140, 1], padding=3, page_size=16)
    args = arrays.args()

    def loss(attention, *qkv):
        return loss_of(*attention(*qkv))

    grads = jax.jit(
        jax.grad(
            partial(
                loss, lambda *x: ragged_paged_attention(*x, *args[3:], return_lse=True)
            ),
            argnums=(0, 1, 2),
        )
    )(*args[:3])
    expected = jax.jit(
        jax.grad(
            partial(loss, lambda *x: dense_attention(*x, arrays)), argnums=(0, 1, 2)
        )
    )(*args[:3])
    for grad, other in zip(grads, expected, strict=True):
        np.testing.assert_allclose(grad, other, atol=2e-5)


def test_gradients_of_bfloat16_and_of_rows_that_see_nothing() -> None:
    arrays = small_decode(dtype="bfloat16")
    args = arrays.args()

    def loss(*qkv):
        out, lse = paged_attention(*qkv, *args[3:], return_lse=True)
        # The cotangent of the empty slot is NaN: 0 * inf.
        return jnp.sum(out.astype(jnp.float32)) + jnp.sum(lse * 0)

    grads = jax.grad(loss, argnums=(0, 1, 2))(*args[:3])
    for grad, arg in zip(grads, args, strict=False):
        assert grad.dtype == arg.dtype and grad.shape == arg.shape
        assert np.all(np.isfinite(np.asarray(grad).astype(np.float32)))


# --- cost -----------------------------------------------------------------------------


@BOTH
def test_memory_does_not_grow_with_the_table(make: Callable) -> None:
    def program(pages_per_slot):
        arrays = make(pages_per_slot=pages_per_slot, page_size=16)
        return jax.jit(attention_of(arrays)).lower(*arrays.args()).compile()

    narrow, wide = program(64), program(512)
    extra = (
        wide.memory_analysis().temp_size_in_bytes
        - narrow.memory_analysis().temp_size_in_bytes
    )
    # At most a copy of the table itself: six rows of 448 more cells.
    assert extra <= 6 * 448 * 4
    # And no copy of the pages.
    pool = f"f32[{','.join(map(str, make(page_size=16).k_pages.shape))}]"
    copies = [s for s in wide.as_text().splitlines() if " copy(" in s and pool in s]
    assert not copies


@pytest.mark.core
@BOTH
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_lowers_for_every_platform(make: Callable, platform: str) -> None:
    arrays = make(pages_per_slot=70)  # more than a block: a loop
    traced = jax.jit(attention_of(arrays)).trace(*arrays.args())
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo.while" in text
    assert "custom_call" not in text
