"""The backward pass of paged attention, for every implementation.

The scores are recomputed block by block from the saved log-sum-exp, as in section 3.1
of https://arxiv.org/abs/2205.14135; nothing the size of the score matrix is kept. With
weights p = exp(s - lse), output gradient do and log-sum-exp gradient dlse:

    dv = p^T do        ds = p * (do v^T - sum(do * out) + dlse)
    dq = ds k * scale  dk = ds^T q * scale

and the gradient of a page is the sum over every slot that shares it. Quantised pages
are whole numbers, without a gradient; their scales have one, the sum over a head of the
gradient of what they multiply.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax import _attention_xla as xla
from pagedjax import _page_ops as ops
from pagedjax._attention_call import AttentionCall

Gradients = tuple[jax.Array, jax.Array, jax.Array]


def attend_backward(
    call: AttentionCall,
    arrays: tuple,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array,
) -> Gradients:
    """Return the gradients of the queries, keys and values.

    Args:
        call: the description of the forward call.
        arrays: the arguments of the forward call after `call`, as in
            `_attention_xla.attend`.
        out: the forward output, [T, H, D].
        lse: its log-sum-exp, float32[T, H].
        d_out: cotangent of `out`.
        d_lse: cotangent of `lse`.

    Returns:
        Gradients with the shapes and dtypes of `q`, `k_pages` and `v_pages`; for
        quantised pages those of `q`, `k_scales` and `v_scales`.
    """
    q, k_pages, v_pages, page_indices, seq_lens, cu_q_lens, k_scales, v_scales = arrays
    if cu_q_lens is None:
        cu_q_lens = jnp.arange(call.num_slots + 1, dtype=jnp.int32)
        rows = 1
    else:
        rows = xla.block_rows(call)
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    blocks = xla.RowBlocks(q_lens, rows)
    # A row that saw nothing is constant: no gradient, whatever its cotangent is.
    some = lse != -jnp.inf
    d_out = jnp.where(some[..., None], d_out.astype(jnp.float32), 0.0)
    d_lse = jnp.where(some, d_lse, 0.0)
    # ds = p * (do v^T + bias): both terms that are the same for every key of a row.
    bias = d_lse - jnp.sum(out.astype(jnp.float32) * d_out, axis=-1)
    q, d_out, bias = (xla.pad_rows(x, rows) for x in (q, d_out, bias))
    lse = xla.pad_rows(lse, rows, -jnp.inf)

    keys, values = (k_pages, k_scales), (v_pages, v_scales)

    def body(i: jax.Array, carry: Gradients) -> Gradients:
        dq, dk, dv = carry
        slot, offset, num_rows = blocks.locate(i)
        start = cu_q_lens[slot] + offset
        parts = [
            lax.dynamic_slice_in_dim(x, start, rows) for x in (q, lse, d_out, bias)
        ]
        first_position = seq_lens[slot] - q_lens[slot] + offset
        walk = xla.KeyWalk(call, rows, first_position, num_rows)
        dq_rows, dk, dv = _block_backward(
            call, walk, parts, keys, values, page_indices[slot], dk, dv
        )
        # A block's surplus rows fall on the rows of later blocks, which come later.
        return lax.dynamic_update_slice_in_dim(dq, dq_rows, start, 0), dk, dv

    stored = (k_scales, v_scales) if call.has_scales else (k_pages, v_pages)
    carry: Gradients = ops.vary_together(
        jax.tree.map(lambda x: jnp.zeros(x.shape), (q, *stored)),
        (*arrays, d_out, bias),
    )
    dq, dk, dv = lax.fori_loop(0, blocks.total, body, carry)
    dq = dq[: call.num_tokens].astype(q.dtype)
    return dq, dk.astype(stored[0].dtype), dv.astype(stored[1].dtype)


def _block_backward(
    call: AttentionCall,
    walk: xla.KeyWalk,
    parts: list[jax.Array],
    keys: xla.Stored,
    values: xla.Stored,
    table_row: jax.Array,
    dk: jax.Array,
    dv: jax.Array,
) -> Gradients:
    """Return the query gradient of one block of rows; add to those of the others."""
    q, lse, d_out, bias = (xla.split_heads(call, part) for part in parts)
    scale = jnp.float32(call.scale)
    q = q * scale
    # Rows that saw nothing have lse -inf; their weights are masked, not computed.
    lse = jnp.where(lse != -jnp.inf, lse, 0.0)

    def body(i: jax.Array, carry: Gradients) -> Gradients:
        dq, dk, dv = carry
        ids, visible, live = walk.block(i, table_row)
        k = jnp.where(live[None, :, None], xla.read_block(call, keys, ids), 0.0)
        v = jnp.where(live[None, :, None], xla.read_block(call, values, ids), 0.0)
        scores = xla.cap_scores(call, xla.dot(q, k, "krd,ktd->krt"))
        masked = jnp.where(visible[None], scores - lse[..., None], -jnp.inf)
        weights = jnp.exp(masked)
        d_weights = xla.dot(d_out, v, "krd,ktd->krt")
        d_scores = weights * (d_weights + bias[..., None])
        if call.soft_cap is not None:
            d_scores *= 1.0 - jnp.square(scores / call.soft_cap)
        dq += xla.dot(d_scores, k, "krt,ktd->krd")
        page_is_live = jnp.any(live.reshape(-1, call.page_size), axis=1)
        targets = jnp.where(page_is_live, ids, call.num_pages)
        d_keys = xla.dot(d_scores, q, "krt,krd->ktd")
        d_values = xla.dot(weights, d_out, "krt,krd->ktd")
        dk = _add_block(call, dk, targets, keys, d_keys, live)
        dv = _add_block(call, dv, targets, values, d_values, live)
        return dq, dk, dv

    start = ops.vary_together(jnp.zeros(q.shape), (dk, dv))
    dq, dk, dv = lax.fori_loop(0, walk.num_blocks, body, (start, dk, dv))
    return xla.join_heads(call, dq * scale), dk, dv


def _add_block(
    call: AttentionCall,
    gradient: jax.Array,
    ids: jax.Array,
    stored: xla.Stored,
    block: jax.Array,
    live: jax.Array,
) -> jax.Array:
    """Add the gradient of T tokens as read, [K, T, D], to that of what is stored."""
    if call.has_scales:
        numbers = xla.read_block(call, (stored[0], None), ids)
        block = jnp.sum(block * jnp.where(live[None, :, None], numbers, 0.0), axis=-1)
    block = jnp.swapaxes(block, 0, 1).reshape(-1, *gradient.shape[1:])
    return gradient.at[ids].add(block, mode="drop")
