"""Paged attention on Hopper through Mosaic GPU: TMA and wgmma.

Both functions run one kernel over blocks of up to 64 rows (query heads counted) of one
slot and kv head: all query heads of a decode row, or 64 / G tokens of a longer run. A
block walks over its slot's keys, 64 at a time; those of the next turns are on their
way while it multiplies::

    HBM   k_pages, v_pages  [pages, page_size, K, D]
            |  TMA: one head of one page, `chunk` tokens, a copy each
            v
    SMEM  keys   [stages, 64, D]  -- wgmma -->  scores [64 rows, 64 keys], float32
          values [stages, 64, D]  -- wgmma -->  sums   [64 rows, D],       float32

Weights meet the values as a sum of two halves, `high + low`: rounded to one, they would
err more than the result's last bit. Decode splits a context over blocks and merges the
parts. Sizes are explained in `gpu_mosaic_sizes`.
"""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import gpu_mosaic_sizes as sizes
from pallas_kernels import mesh_axes
from pallas_kernels.gpu_blocks import cut_blocks, merge_splits, num_splits_for
from pallas_kernels.gpu_mosaic_sizes import BLOCK_ROWS, BLOCK_TOKENS, COLUMNS, Geometry

_SCORES = plgpu.Layout.WGMMA
_ROWS = plgpu.Layout.WGMMA.reduce(1)
# jax 0.10 wants an index beside the reference, which 0.11 deprecates.
_INDEX = inspect.signature(plgpu.load).parameters["idx"]
_WANTED: dict[str, Any] = {"idx": ()} if _INDEX.default is _INDEX.empty else {}
_load: Any = functools.partial(plgpu.load, **_WANTED)


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
    k_scales: None = None,
    v_scales: None = None,
    num_splits: int | None = None,
    stages: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Attend with one query per slot.

    Args:
        q: [S, H, D] in the dtype of the pages.
        k_pages: bfloat16 or float16[pages, page_size, K, D].
        v_pages: as `k_pages`.
        page_indices: int32[S, P].
        seq_lens: int32[S].
        scale: factor of the scores.
        window: keys a token sees, itself included; None for all.
        soft_cap: cap of the scores, or None.
        k_scales: must be None: quantised pages are refused by `supports`.
        v_scales: must be None.
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
        k_pages, scale=scale, window=window, soft_cap=soft_cap, stages=stages
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
    k_scales: None = None,
    v_scales: None = None,
    stages: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Attend with any number of queries per slot, causally.

    Args:
        q: [T, H, D], in slot order without gaps, in the dtype of the pages.
        k_pages: bfloat16 or float16[pages, page_size, K, D].
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
        k_pages, scale=scale, window=window, soft_cap=soft_cap, stages=stages
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


# --- the kernel -----------------------------------------------------------------------


def _attend(
    geometry: Geometry,
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_indices: jax.Array,
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
        (q, k_pages, v_pages, page_indices, slot, positions, oldest, end)
    )
    q = operands[0]
    dtype = q.dtype if num_splits == 1 else jnp.dtype(jnp.float32)
    where = (num_splits, blocks, kv_heads)
    tiled, stages = functools.partial(_tiled_smem, dtype=q.dtype), geometry.stages
    arrivals = BLOCK_TOKENS // geometry.chunk
    pages = plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)
    out, lse = plgpu.kernel(
        functools.partial(_kernel, geometry, copied),
        out_type=(
            mesh_axes.result((*where, copied, dim), dtype, q),
            mesh_axes.result((*where, BLOCK_ROWS), jnp.float32, q),
        ),
        scratch_types=dict(
            q_smem=tiled((BLOCK_ROWS, dim)),
            k_smem=tiled((stages, BLOCK_TOKENS, dim)),
            v_smem=tiled((stages, BLOCK_TOKENS, dim)),
            high_smem=tiled((BLOCK_ROWS, BLOCK_TOKENS)),
            low_smem=tiled((BLOCK_ROWS, BLOCK_TOKENS)),
            out_smem=_tiled_smem((BLOCK_ROWS, COLUMNS), dtype=dtype),
            lse_smem=plgpu.SMEM((BLOCK_ROWS,), jnp.float32),
            q_here=plgpu.Barrier(),
            k_here=pages,
            v_here=pages,
        ),
        grid=where,
        grid_names=("split", "block", "head"),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        kernel_name="paged_attention",
        **({} if interpret is None else {"interpret": interpret}),
    )(*operands)
    return out[..., :rows, :], lse[..., :rows]


def _tiled_smem(shape: tuple[int, ...], *, dtype: Any) -> Any:
    """Return shared memory in the tiles of 128 bytes that TMA and wgmma agree on."""
    lanes = 128 // jnp.dtype(dtype).itemsize
    tiles = (plgpu.TilingTransform((8, lanes)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=tiles)


def _kernel(
    geometry: Geometry,
    copied: int,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    table_ref: Any,
    slot_ref: Any,
    positions_ref: Any,
    oldest_ref: Any,
    end_ref: Any,
    out_ref: Any,
    lse_ref: Any,
    *,
    q_smem: Any,
    k_smem: Any,
    v_smem: Any,
    high_smem: Any,
    low_smem: Any,
    out_smem: Any,
    lse_smem: Any,
    q_here: Any,
    k_here: Any,
    v_here: Any,
) -> None:
    """One block of rows, one kv head, one part of the context."""
    split, block, head = (lax.axis_index(x) for x in ("split", "block", "head"))
    some_rows = pl.ds(0, copied)
    plgpu.copy_gmem_to_smem(q_ref.at[block, head], q_smem.at[some_rows], q_here)
    slot, oldest, end = slot_ref[block], oldest_ref[block], end_ref[block]
    first = lax.div(oldest, BLOCK_TOKENS)
    turns = jnp.maximum(_ceil_div(end, BLOCK_TOKENS) - first, 0)
    share = _ceil_div(turns, out_ref.shape[0])
    low = first + split * share
    high = jnp.minimum(low + share, first + turns)

    def fetch(turn: jax.Array, stage: jax.Array | int) -> None:
        for part in range(BLOCK_TOKENS // geometry.chunk):
            start = turn * BLOCK_TOKENS + part * geometry.chunk
            wanted = (start < end) & (start + geometry.chunk > oldest)
            to = (stage, pl.ds(part * geometry.chunk, geometry.chunk))
            barriers = (k_here.at[stage], v_here.at[stage])

            @pl.when(wanted)
            def _(start: Any = start, to: Any = to, barriers: Any = barriers) -> None:
                cell = lax.div(start, geometry.page_size)
                # An id out of range is a bug of the caller; it must not fault.
                page = jnp.clip(table_ref[slot, cell], 0, geometry.num_pages - 1)
                offset = pl.ds(start - cell * geometry.page_size, geometry.chunk)
                for ref, smem, here in zip(
                    (k_ref, v_ref), (k_smem, v_smem), barriers, strict=True
                ):
                    plgpu.copy_gmem_to_smem(
                        ref.at[page, offset, head], smem.at[to], here
                    )

            @pl.when(jnp.logical_not(wanted))
            def _(barriers: Any = barriers) -> None:
                for here in barriers:
                    plgpu.barrier_arrive(here)

    for stage in range(geometry.stages):
        pl.when(low + stage < high)(functools.partial(fetch, low + stage, stage))
    plgpu.barrier_wait(q_here)
    positions = _load(positions_ref.at[block], layout=_ROWS, optimized=False)

    def walk(turn: jax.Array, carry: tuple) -> tuple:
        sums, peak, total = carry
        stage = lax.rem(turn - low, geometry.stages)
        plgpu.barrier_wait(k_here.at[stage])
        scores = _multiply((q_smem, k_smem.at[stage].T)) * geometry.scale
        if geometry.soft_cap is not None:
            scores = geometry.soft_cap * jnp.tanh(scores / geometry.soft_cap)
        token = turn * BLOCK_TOKENS + plgpu.broadcasted_iota(
            jnp.int32, scores.shape, 1, layout=_SCORES
        )
        position = _across(positions, BLOCK_TOKENS)
        visible = token <= position
        if geometry.window is not None:
            visible &= token > position - geometry.window
        scores = jnp.where(visible, scores, -jnp.inf)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        # A row that has seen nothing yet: exp(-inf - 0) is 0.
        shift = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
        weights = jnp.exp(scores - _across(shift, BLOCK_TOKENS))
        decay = jnp.exp(peak - shift)
        rounded = weights.astype(high_smem.dtype)
        high_smem[...] = rounded
        low_smem[...] = (weights - rounded.astype(jnp.float32)).astype(low_smem.dtype)
        plgpu.barrier_wait(v_here.at[stage])
        start = turn * BLOCK_TOKENS

        @pl.when((start < oldest) | (start + BLOCK_TOKENS > end))
        def _() -> None:
            _clear_unseen(v_smem.at[stage], oldest - start, end - start)

        plgpu.commit_smem()
        new_sums = []
        for i, held in enumerate(sums):
            values = v_smem.at[stage, :, pl.ds(i * COLUMNS, COLUMNS)]
            added = _multiply((high_smem, values), (low_smem, values))
            new_sums.append(held * _across(decay, COLUMNS) + added)

        @pl.when(turn + geometry.stages < high)
        def _() -> None:
            fetch(turn + geometry.stages, stage)

        return tuple(new_sums), new_peak, total * decay + jnp.sum(weights, axis=1)

    def filled(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    sums, peak, total = lax.fori_loop(
        low,
        high,
        walk,
        (
            tuple(
                filled((BLOCK_ROWS, COLUMNS), 0.0, _SCORES)
                for _ in range(geometry.head_dim // COLUMNS)
            ),
            filled((BLOCK_ROWS,), -jnp.inf, _ROWS),
            filled((BLOCK_ROWS,), 0.0, _ROWS),
        ),
    )
    some = total != 0  # also where it is NaN, which must not look like nothing
    total = jnp.where(some, total, 1.0)
    lse_smem[...] = jnp.where(some, peak + jnp.log(total), -jnp.inf)
    for i, held in enumerate(sums):
        out = held / _across(total, COLUMNS)
        out = jnp.where(_across(some, COLUMNS), out, 0.0)
        out_smem[...] = out.astype(out_smem.dtype)
        plgpu.commit_smem()
        columns = pl.ds(i * COLUMNS, COLUMNS)
        plgpu.copy_smem_to_gmem(
            out_smem.at[some_rows], out_ref.at[split, block, head, :, columns]
        )
        plgpu.wait_smem_to_gmem(0)
    plgpu.copy_smem_to_gmem(lse_smem, lse_ref.at[split, block, head])
    plgpu.wait_smem_to_gmem(0)


def _multiply(*pairs: tuple[Any, Any]) -> jax.Array:
    """Return the sum of the products of pairs in shared memory, in float32."""

    def run(sums: Any) -> jax.Array:
        for left, right in pairs:
            plgpu.wgmma(sums, left, right)
        return sums[...]

    left, right = pairs[0]
    shape = (left.shape[0], right.shape[1])
    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


def _clear_unseen(values: Any, low: jax.Array, high: jax.Array) -> None:
    """Clear the rows of values[64, D] before `low` and from `high` on.

    Nobody sees them, but 0 times NaN is NaN.
    """
    for i in range(values.shape[1] // COLUMNS):
        part = values.at[:, pl.ds(i * COLUMNS, COLUMNS)]
        row = plgpu.broadcasted_iota(jnp.int32, part.shape, 0, layout=_SCORES)
        held = _load(part, layout=_SCORES)
        seen = (row >= low) & (row < high)
        part[...] = jnp.where(seen, held, jnp.zeros_like(held))


def _across(column: jax.Array, width: int) -> jax.Array:
    """Return a value per row as [rows, width]."""
    return lax.broadcast_in_dim(column, (column.shape[0], width), [0])


def _ceil_div(a: jax.Array, b: int) -> jax.Array:
    return lax.div(a + (b - 1), b)
