"""Paged attention on Hopper through Mosaic GPU: TMA and wgmma.

Both functions run the kernel of `gpu_mosaic_kernel` over blocks of up to 64 rows (query
heads counted) of one slot and kv head: all query heads of a decode row, or 64 / G
tokens of a longer run. Decode splits a context over blocks and merges the parts. Sizes
are explained in `gpu_mosaic_sizes`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import gpu_mosaic_sizes as sizes
from pallas_kernels import mesh_axes
from pallas_kernels.gpu_blocks import cut_blocks, merge_splits, num_splits_for
from pallas_kernels.gpu_mosaic_kernel import attend_block
from pallas_kernels.gpu_mosaic_sizes import (
    BLOCK_ROWS,
    BLOCK_TOKENS,
    COLUMNS,
    SCALE_HEADS,
    Geometry,
)


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
    stages: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Attend with one query per slot.

    Args:
        q: bfloat16 or float16[S, H, D].
        k_pages: [pages, page_size, K, D] in the dtype of `q`, or int8 or float8_e4m3fn.
        v_pages: as `k_pages`.
        page_indices: int32[S, P].
        seq_lens: int32[S].
        scale: factor of the scores.
        window: keys a token sees, itself included; None for all.
        soft_cap: cap of the scores, or None.
        k_scales: float32[pages, page_size, K] of quantised pages, or None.
        v_scales: as `k_scales`.
        num_splits: blocks that share a context; None for enough to fill a device.
        stages: turns of keys in flight; None for what fits.
        interpret: `plgpu.InterpretGPUParams` to run on CPU, for tests.

    Returns:
        The output [S, H, D] in the dtype of `q`, and the log-sum-exp, float32[S, H].

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from pallas_kernels import gpu_mosaic_attention
        >>> q, pages = jnp.zeros((2, 4, 64), "bfloat16"), jnp.zeros((8, 8, 2, 64))
        >>> call = jax.eval_shape(
        ...     lambda *args: gpu_mosaic_attention.paged_attention(*args, scale=0.1),
        ...     q, *(2 * [pages.astype("bfloat16")]), jnp.zeros((2, 4), "int32"),
        ...     jnp.zeros(2, "int32"),
        ... )
        >>> [x.shape for x in call]
        [(2, 4, 64), (2, 4)]
    """
    geometry = sizes.plan(
        q, k_pages, scale=scale, window=window, soft_cap=soft_cap, stages=stages
    )
    slots, heads, dim = q.shape
    kv_heads = k_pages.shape[2]
    capacity = page_indices.shape[1] * geometry.page_size
    if num_splits is None:
        num_splits = num_splits_for(slots * kv_heads, capacity)
    seq_lens = jnp.minimum(seq_lens, capacity)
    out, lse = _attend(
        geometry,
        q.reshape(slots, kv_heads, heads // kv_heads, dim),
        k_pages,
        v_pages,
        page_indices,
        () if k_scales is None or v_scales is None else (k_scales, v_scales),
        slot=jnp.arange(slots, dtype=jnp.int32),
        positions=jnp.broadcast_to(seq_lens[:, None] - 1, (slots, BLOCK_ROWS)),
        oldest=_oldest(geometry, seq_lens - 1),
        end=seq_lens,
        num_splits=num_splits,
        interpret=interpret,
    )
    out, lse = merge_splits(out.astype(jnp.float32), lse)
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(q.shape[:2])


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
    stages: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Attend with any number of queries per slot, causally.

    Args:
        q: bfloat16 or float16[T, H, D], in slot order without gaps.
        k_pages: [pages, page_size, K, D] in the dtype of `q`, or int8 or float8_e4m3fn.
        v_pages: as `k_pages`.
        page_indices: int32[S, P].
        seq_lens: int32[S], the tokens of each slot, its rows of `q` the last of them.
        cu_q_lens: int32[S + 1], running sum of the rows per slot.
        scale: as in `paged_attention`; so are the arguments below.
        window: see there.
        soft_cap: see there.
        k_scales: see there.
        v_scales: see there.
        stages: see there.
        interpret: see there.

    Returns:
        The output [T, H, D] in the dtype of `q`, and the log-sum-exp, float32[T, H];
        0 and -inf for rows past the last slot's.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from pallas_kernels import gpu_mosaic_attention as kernels
        >>> q, pages = jnp.zeros((5, 4, 64), "bfloat16"), jnp.zeros((8, 8, 2, 64))
        >>> call = jax.eval_shape(
        ...     lambda *args: kernels.ragged_paged_attention(*args, scale=0.1),
        ...     q, *(2 * [pages.astype("bfloat16")]), jnp.zeros((2, 4), "int32"),
        ...     jnp.zeros(2, "int32"), jnp.zeros(3, "int32"),
        ... )
        >>> [x.shape for x in call]
        [(5, 4, 64), (5, 4)]
    """
    geometry = sizes.plan(
        q, k_pages, scale=scale, window=window, soft_cap=soft_cap, stages=stages
    )
    tokens, heads, dim = q.shape
    kv_heads = k_pages.shape[2]
    group = heads // kv_heads
    # Row r of a block is head r % G of its token r // G.
    rows = BLOCK_ROWS // group
    cut = cut_blocks(seq_lens, cu_q_lens, num_tokens=tokens, rows=rows)
    token = jnp.arange(BLOCK_ROWS, dtype=jnp.int32) // group
    real = token[None] < cut.length[:, None]
    end = jnp.clip(
        cut.position + cut.length, 0, page_indices.shape[1] * k_pages.shape[1]
    )
    of_block = cut.start[:, None] + jnp.arange(rows, dtype=jnp.int32)[None]
    blocks = q.reshape(tokens, kv_heads, group, dim)
    blocks = blocks.at[of_block].get(mode="clip").transpose(0, 2, 1, 3, 4)
    out, lse = _attend(
        geometry,
        blocks.reshape(*blocks.shape[:2], rows * group, dim),
        k_pages,
        v_pages,
        page_indices,
        () if k_scales is None or v_scales is None else (k_scales, v_scales),
        slot=cut.slot,
        positions=jnp.where(real, cut.position[:, None] + token[None], -1),
        oldest=_oldest(geometry, cut.position),
        end=jnp.where(cut.length > 0, end, 0),
        num_splits=1,
        interpret=interpret,
    )
    # Back to where the rows came from.
    row = jnp.arange(tokens, dtype=jnp.int32)
    slot = jnp.sum((cu_q_lens[None, 1:] <= row[:, None]).astype(jnp.int32), axis=1)
    written = slot < seq_lens.shape[0]
    slot = jnp.minimum(slot, seq_lens.shape[0] - 1)
    offset = row - cu_q_lens[slot]
    places = (cut.first[slot] + offset // rows, slice(None), offset % rows)
    out = out[0].reshape(*blocks.shape).at[places].get(mode="clip")
    lse = lse[0].reshape(blocks.shape[:-1]).at[places].get(mode="clip")
    out = jnp.where(written[:, None, None], out.reshape(q.shape), 0)
    return out, jnp.where(written[:, None], lse.reshape(q.shape[:2]), -jnp.inf)


def _oldest(geometry: Geometry, position: jax.Array) -> jax.Array:
    """Return the first token that a row at this position sees."""
    if geometry.window is None:
        return jnp.zeros_like(position)
    return jnp.maximum(position - (geometry.window - 1), 0)


# --- the call -------------------------------------------------------------------------


def _attend(
    geometry: Geometry,
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_indices: jax.Array,
    scales: tuple[jax.Array, ...],
    *,
    slot: jax.Array,
    positions: jax.Array,
    oldest: jax.Array,
    end: jax.Array,
    num_splits: int,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Attend with blocks of rows.

    Args:
        geometry: the sizes.
        q: [B, K, rows, D], at most 64 rows.
        k_pages: [pages, page_size, K, D].
        v_pages: as `k_pages`.
        page_indices: int32[S, P].
        scales: float32[pages, page_size, K] of keys and of values, or none.
        slot: int32[B].
        positions: int32[B, 64], of each row; -1 for one that sees nothing.
        oldest: int32[B], the first token that any row sees.
        end: int32[B], the token after the last that any row sees.
        num_splits: parts of a context.
        interpret: see `paged_attention`.

    Returns:
        [splits, B, K, rows, D], float32 if there are several splits or else as `q`;
        and float32[splits, B, K, rows].
    """
    blocks, kv_heads, rows, dim = q.shape
    copied = -(-rows // 8) * 8  # tiles have 8 rows
    q = jnp.pad(q, ((0, 0), (0, 0), (0, copied - rows), (0, 0)))
    operands = mesh_axes.vary_alike(
        (q, k_pages, v_pages, page_indices, slot, positions, oldest, end, *scales)
    )
    q = operands[0]
    dtype = q.dtype if num_splits == 1 else jnp.dtype(jnp.float32)
    where = (num_splits, blocks, kv_heads)
    out, lse = plgpu.kernel(
        functools.partial(attend_block, geometry, copied),
        out_type=(
            mesh_axes.result((*where, copied, dim), dtype, q),
            mesh_axes.result((*where, BLOCK_ROWS), jnp.float32, q),
        ),
        scratch_types=_scratch(geometry, q.dtype, k_pages.dtype, dtype),
        grid=where,
        grid_names=("split", "block", "head"),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        kernel_name="paged_attention",
        **({} if interpret is None else {"interpret": interpret}),
    )(*operands)
    return out[..., :rows, :], lse[..., :rows]


def _scratch(
    geometry: Geometry, q_dtype: Any, kv_dtype: Any, out_dtype: Any
) -> dict[str, Any]:
    """Return the shared memory and barriers of a block, by name."""
    stages, dim = geometry.stages, geometry.head_dim
    arrivals = BLOCK_TOKENS // geometry.chunk

    def arriving(count: int) -> Any:
        return plgpu.Barrier(num_arrivals=count, num_barriers=stages)

    weights_dtype = jnp.dtype(jnp.bfloat16) if geometry.quantised else q_dtype
    scratch = dict(
        q_smem=_tiled_smem((BLOCK_ROWS, dim), q_dtype),
        k_smem=_tiled_smem((stages, BLOCK_TOKENS, dim), kv_dtype),
        v_smem=_tiled_smem((stages, BLOCK_TOKENS, dim), kv_dtype),
        high_smem=_tiled_smem((BLOCK_ROWS, BLOCK_TOKENS), weights_dtype),
        low_smem=_tiled_smem((BLOCK_ROWS, BLOCK_TOKENS), weights_dtype),
        out_smem=_tiled_smem((BLOCK_ROWS, COLUMNS), out_dtype),
        lse_smem=plgpu.SMEM((BLOCK_ROWS,), jnp.float32),
        q_here=plgpu.Barrier(),
        k_here=arriving(arrivals),
        v_here=arriving(arrivals),
    )
    if geometry.quantised:
        held = (stages, 2 * BLOCK_TOKENS, SCALE_HEADS)
        scratch |= dict(
            scales_smem=plgpu.SMEM(held, jnp.float32),
            scales_here=arriving(2 * arrivals),
            row_smem=plgpu.SMEM((2 * BLOCK_TOKENS,), jnp.float32),
            k_wide=_tiled_smem((BLOCK_TOKENS, dim), q_dtype),
        )
        if q_dtype != weights_dtype:
            scratch["v_wide"] = _tiled_smem((BLOCK_TOKENS, dim), weights_dtype)
    return scratch


def _tiled_smem(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return shared memory in the tiles that TMA and wgmma agree on."""
    size = jnp.dtype(dtype).itemsize
    lanes = min(128 // size, COLUMNS)
    tiles = (plgpu.TilingTransform((8, lanes)), plgpu.SwizzleTransform(lanes * size))
    return plgpu.SMEM(shape, dtype, transforms=tiles)
