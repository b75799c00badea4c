"""Paged attention on GPU through Triton: Ampere and later.

Both functions run the same walk over the keys of one slot, `block_tokens` at a time,
with a running softmax. A token's page is looked up as it is needed, so that any page
size, also one that is no power of two, is read in place::

    tokens   32 33 34 35 ...      cell = token // page_size
    pages     7  7  4  4 ...      pages[page, token % page_size, head, :]  gathered

Decode splits a context over programs and merges the parts by their log-sum-exp
(https://arxiv.org/abs/2311.01282, section 3), so that few long sequences fill the
device. Everything Triton needs to be a power of two is padded and masked.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import gpu_triton_sizes as sizes
from pallas_kernels import mesh_axes
from pallas_kernels.gpu_blocks import cut_blocks, merge_splits, num_splits_for


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_indices: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
    num_splits: int | None = None,
    block_tokens: int | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attend with one query per slot.

    Args:
        q: float[S, H, D].
        k_pages: [pages, page_size, K, D].
        v_pages: as `k_pages`.
        page_indices: int32[S, P].
        seq_lens: int32[S].
        scale: factor of the scores.
        window: keys a token sees, itself included; None for all.
        soft_cap: cap of the scores, or None.
        k_scales: float32[pages, page_size, K] of quantised pages, or None.
        v_scales: as `k_scales`.
        num_splits: programs that share a context; None for enough to fill a device.
        block_tokens: keys per turn, a power of two; None for what fits.
        interpret: run on CPU, for tests.

    Returns:
        The output [S, H, D] in the dtype of `q`, and the log-sum-exp, float32[S, H].

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_kernels import gpu_triton_attention
        >>> pages = jnp.arange(8.0).reshape(4, 2, 1, 1)
        >>> out, lse = gpu_triton_attention.paged_attention(
        ...     jnp.zeros((1, 1, 1)), pages, pages, jnp.array([[1, 0]]),
        ...     jnp.array([3]), scale=1.0, interpret=True,
        ... )  # the mean of 2, 3 and 0
        >>> round(float(out[0, 0, 0]), 4)
        1.6667
    """
    geometry = sizes.plan(
        q, k_pages, page_indices, scale, window, soft_cap, block_tokens, k_scales
    )
    slots, heads, head_dim = q.shape
    kv_heads = k_pages.shape[2]
    if num_splits is None:
        num_splits = num_splits_for(slots * kv_heads, geometry.capacity)
    scales = () if k_scales is None or v_scales is None else (k_scales, v_scales)
    operands = mesh_axes.vary_alike(
        (q, k_pages, v_pages, page_indices, seq_lens, *scales)
    )
    q = operands[0]
    call = pl.pallas_call(
        functools.partial(_decode_kernel, geometry, num_splits, k_scales is not None),
        grid=(slots, kv_heads, num_splits),
        out_shape=(
            mesh_axes.result((num_splits, slots, heads, head_dim), jnp.float32, q),
            mesh_axes.result((num_splits, slots, heads), jnp.float32, q),
        ),
        compiler_params=plt.CompilerParams(
            num_warps=sizes.num_warps_of_decode(geometry), num_stages=sizes.NUM_STAGES
        ),
        interpret=interpret,
        name="paged_attention_decode",
    )
    out, lse = call(*operands)
    out, lse = merge_splits(out, lse)
    return out.astype(q.dtype), lse


def ragged_paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_indices: jax.Array,
    seq_lens: jax.Array,
    cu_q_lens: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
    block_tokens: int | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attend with any number of queries per slot, causally.

    Args:
        q: float[T, H, D], in slot order without gaps.
        k_pages: [pages, page_size, K, D].
        v_pages: as `k_pages`.
        page_indices: int32[S, P].
        seq_lens: int32[S], the tokens of each slot, its rows of `q` the last of them.
        cu_q_lens: int32[S + 1], running sum of the rows per slot.
        scale: as in `paged_attention`; so are the arguments below.
        window: see there.
        soft_cap: see there.
        k_scales: see there.
        v_scales: see there.
        block_tokens: see there.
        interpret: see there.

    Returns:
        The output [T, H, D] in the dtype of `q`, and the log-sum-exp, float32[T, H];
        0 and -inf for rows past the last slot's.

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_kernels import gpu_triton_attention
        >>> pages = jnp.arange(8.0).reshape(4, 2, 1, 1)
        >>> out, _ = gpu_triton_attention.ragged_paged_attention(
        ...     jnp.zeros((3, 1, 1)), pages, pages, jnp.array([[1, 0]]),
        ...     jnp.array([3]), jnp.array([0, 2]), scale=1.0, interpret=True,
        ... )
        >>> [round(float(x), 4) for x in out.ravel()]
        [2.5, 1.6667, 0.0]
    """
    geometry = sizes.plan(
        q, k_pages, page_indices, scale, window, soft_cap, block_tokens, k_scales
    )
    tokens = q.shape[0]
    kv_heads = k_pages.shape[2]
    rows = sizes.rows_of_block(geometry)
    cut = cut_blocks(seq_lens, cu_q_lens, num_tokens=tokens, rows=rows)
    scales = () if k_scales is None or v_scales is None else (k_scales, v_scales)
    operands = mesh_axes.vary_alike(
        (q, k_pages, v_pages, page_indices, *cut[:4], *scales)
    )
    q = operands[0]
    call = pl.pallas_call(
        functools.partial(_ragged_kernel, geometry, rows, k_scales is not None),
        grid=(cut.slot.shape[0], kv_heads),
        out_shape=(
            mesh_axes.result(q.shape, q.dtype, q),
            mesh_axes.result(q.shape[:2], jnp.float32, q),
        ),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=sizes.NUM_STAGES),
        interpret=interpret,
        name="ragged_paged_attention",
    )
    out, lse = call(*operands)
    # No program writes the rows of padding.
    written = jnp.arange(tokens, dtype=jnp.int32)[:, None] < cu_q_lens[-1]
    return jnp.where(written[..., None], out, 0), jnp.where(written, lse, -jnp.inf)


# --- the kernels ----------------------------------------------------------------------


def _decode_kernel(
    geometry: sizes.Geometry, num_splits: int, has_scales: bool, *refs: Any
) -> None:
    """One slot, one kv head, one part of the context."""
    q_ref, k_ref, v_ref, table_ref, lens_ref, *rest = refs
    scale_refs, (out_ref, lse_ref) = _split_refs(rest, has_scales)
    slot, head, split = (pl.program_id(axis) for axis in range(3))
    length = jnp.minimum(plt.load(lens_ref.at[slot]), geometry.capacity)
    oldest = jnp.int32(0)
    if geometry.window is not None:
        oldest = jnp.maximum(length - geometry.window, 0)
    member = jnp.arange(geometry.padded_group, dtype=jnp.int32)
    real = member < geometry.group
    heads = head * geometry.group + member
    dims = jnp.arange(geometry.padded_dim, dtype=jnp.int32)
    mask = real[:, None] & (dims < geometry.head_dim)[None, :]
    q = plt.load(q_ref.at[slot, heads[:, None], dims[None, :]], mask=mask, other=0)
    positions = jnp.full(heads.shape, length - 1, jnp.int32)
    first_block = lax.div(oldest, geometry.block_tokens)
    blocks = pl.cdiv(length, geometry.block_tokens) - first_block
    share = pl.cdiv(jnp.maximum(blocks, 0), num_splits)
    low = first_block + split * share
    high = jnp.minimum(low + share, first_block + blocks)
    keys = _Keys(geometry, k_ref, v_ref, table_ref, scale_refs, slot, head)
    out, lse = keys.attend(q, positions, low, high, oldest, length)
    plt.store(out_ref.at[split, slot, heads[:, None], dims[None, :]], out, mask=mask)
    plt.store(lse_ref.at[split, slot, heads], lse, mask=real)


def _ragged_kernel(
    geometry: sizes.Geometry, num_rows: int, has_scales: bool, *refs: Any
) -> None:
    """Some rows of one slot, one kv head."""
    q_ref, k_ref, v_ref, table_ref, *rest = refs
    slot_ref, start_ref, count_ref, position_ref, *rest = rest
    scale_refs, (out_ref, lse_ref) = _split_refs(rest, has_scales)
    block, head = pl.program_id(0), pl.program_id(1)
    slot, start, count, position = (
        plt.load(ref.at[block])
        for ref in (slot_ref, start_ref, count_ref, position_ref)
    )
    # Row i of the product is head i % G' of token i // G', G' the padded group.
    index = jnp.arange(num_rows * geometry.padded_group, dtype=jnp.int32)
    row = index // geometry.padded_group
    member = index % geometry.padded_group
    heads = head * geometry.group + member
    dims = jnp.arange(geometry.padded_dim, dtype=jnp.int32)
    real = (row < count) & (member < geometry.group)
    mask = real[:, None] & (dims < geometry.head_dim)[None, :]
    where = ((start + row)[:, None], heads[:, None], dims[None, :])
    q = plt.load(q_ref.at[where], mask=mask, other=0)
    end = jnp.clip(position + count, 0, geometry.capacity)
    oldest = jnp.int32(0)
    if geometry.window is not None:
        oldest = jnp.maximum(position - (geometry.window - 1), 0)
    low = lax.div(oldest, geometry.block_tokens)
    high = jnp.where(count > 0, pl.cdiv(end, geometry.block_tokens), low)
    keys = _Keys(geometry, k_ref, v_ref, table_ref, scale_refs, slot, head)
    out, lse = keys.attend(q, position + row, low, high, oldest, end)
    plt.store(out_ref.at[where], out.astype(out_ref.dtype), mask=mask)
    plt.store(lse_ref.at[start + row, heads], lse, mask=real)


class _Keys:
    """The keys and values of one slot and kv head."""

    def __init__(
        self,
        geometry: sizes.Geometry,
        k_ref: Any,
        v_ref: Any,
        table_ref: Any,
        scale_refs: tuple[Any, ...],
        slot: jax.Array,
        head: jax.Array,
    ) -> None:
        """Take the references, and which slot and head to read."""
        self._geometry = geometry
        self._refs = (k_ref, v_ref)
        self._table_ref = table_ref
        self._scale_refs = scale_refs
        self._slot = slot
        self._head = head

    def attend(
        self,
        q: jax.Array,
        positions: jax.Array,
        low: jax.Array,
        high: jax.Array,
        oldest: jax.Array,
        end: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Attend with rows q[M, D'] to the blocks of tokens from `low` to `high`.

        Args:
            q: the rows, padded.
            positions: int32[M], the position of each.
            low: the first block.
            high: the block to stop at.
            oldest: the first token any row may see.
            end: the token after the last any row may see.

        Returns:
            float32[M, D'], float32[M].
        """
        geometry = self._geometry
        q = q.astype(geometry.dot_dtype)
        rows = q.shape[0]
        dims = jnp.arange(geometry.padded_dim, dtype=jnp.int32)
        step = jnp.arange(geometry.block_tokens, dtype=jnp.int32)

        def body(i: jax.Array, carry: tuple) -> tuple:
            peak, total, acc = carry
            tokens = i * geometry.block_tokens + step
            live = (tokens >= oldest) & (tokens < end)
            cells = tokens // geometry.page_size
            pages = plt.load(self._table_ref.at[self._slot, cells], mask=live, other=0)
            # An id out of range is a bug of the caller; it must not fault the device.
            pages = jnp.clip(pages, 0, geometry.num_pages - 1)
            places = (pages, tokens - cells * geometry.page_size)
            mask = live[:, None] & (dims < geometry.head_dim)[None, :]
            k, v = (self._read(ref, places, dims, mask) for ref in self._refs)
            scores = _dot(q, k, trans_b=True) * geometry.scale
            weights_by = None
            if self._scale_refs:
                k_scales, weights_by = (
                    plt.load(ref.at[*places, self._head], mask=live, other=0.0)
                    for ref in self._scale_refs
                )
                scores *= k_scales[None, :]
            if geometry.soft_cap is not None:
                scores = geometry.soft_cap * jnp.tanh(scores / geometry.soft_cap)
            visible = live[None, :] & (tokens[None, :] <= positions[:, None])
            if geometry.window is not None:
                visible &= tokens[None, :] > positions[:, None] - geometry.window
            scores = jnp.where(visible, scores, -jnp.inf)
            new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
            # A row that has seen nothing yet: exp(-inf - 0) is 0.
            shift = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
            weights = jnp.exp(scores - shift[:, None])
            decay = jnp.exp(peak - shift)
            total = total * decay + jnp.sum(weights, axis=1)
            if weights_by is not None:
                weights *= weights_by[None, :]
            acc = acc * decay[:, None] + _dot_weights(weights, v)
            return new_peak, total, acc

        carry = (
            jnp.full((rows,), -jnp.inf, jnp.float32),
            jnp.zeros((rows,), jnp.float32),
            jnp.zeros((rows, geometry.padded_dim), jnp.float32),
        )
        peak, total, acc = lax.fori_loop(low, high, body, carry)
        some = total != 0  # also where it is NaN, which must not look like nothing
        total = jnp.where(some, total, 1.0)
        out = jnp.where(some[:, None], acc / total[:, None], 0.0)
        return out, jnp.where(some, peak + jnp.log(total), -jnp.inf)

    def _read(
        self, ref: Any, places: tuple, dims: jax.Array, mask: jax.Array
    ) -> jax.Array:
        """Return [block_tokens, D'], 0 where masked."""
        pages, offsets = places
        where = (pages[:, None], offsets[:, None], self._head, dims[None, :])
        # Not `other=0`: Triton has no constants of float8.
        values = plt.load(ref.at[where], mask=mask)
        return jnp.where(mask, values.astype(self._geometry.dot_dtype), 0)


def _split_refs(refs: list, has_scales: bool) -> tuple[tuple, tuple]:
    """Return the references of the scales, and those of the results."""
    count = 2 if has_scales else 0
    return tuple(refs[:count]), tuple(refs[count:])


def _dot(a: jax.Array, b: jax.Array, *, trans_b: bool = False) -> jax.Array:
    """Multiply with float32 sums; float32 operands are not rounded to less."""
    return plt.dot(a, b, trans_b=trans_b, allow_tf32=False).astype(jnp.float32)


def _dot_weights(weights: jax.Array, values: jax.Array) -> jax.Array:
    """Multiply float32 weights with values, of half precision or not.

    Weights rounded to the values' 8 or 11 bits would err more than the values do. As
    a sum of two such numbers they do not, and decode waits for memory anyway.
    """
    if values.dtype == jnp.float32:
        return _dot(weights, values)
    high = weights.astype(values.dtype)
    low = (weights - high.astype(jnp.float32)).astype(values.dtype)
    return _dot(high, values) + _dot(low, values)
