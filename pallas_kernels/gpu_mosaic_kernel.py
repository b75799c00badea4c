"""The Mosaic GPU kernel of attention: one block of rows, one kv head.

It walks over the keys of a slot, 64 at a time; those of the next turns are on their way
while it multiplies::

    HBM   k_pages, v_pages  [pages, page_size, K, D]
            |  TMA: one head of one page, `chunk` tokens, a copy each
            v
    SMEM  keys   [stages, 64, D]  -- wgmma -->  scores [64 rows, 64 keys], float32
          values [stages, 64, D]  -- wgmma -->  sums   [64 rows, D],       float32

Weights meet the values as a sum of two halves, `high + low`: rounded to one, they would
err more than the result's last bit.

Quantised pages are widened between the two lines, through registers: keys to the dtype
of the queries, values to bfloat16, both exact. The scales of keys multiply the scores,
those of values the weights, in float32. One head's lie K apart, which TMA cannot fetch:
it brings those of four heads, a row for each of 128 threads, who pick one::

    HBM   scales [pages, page_size, K]
            |  TMA: 4 heads, `chunk` tokens, a copy each for keys and values
            v
    SMEM  [64 of keys + 64 of values, 4]  --  one head  -->  [128]
"""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu_mosaic_sizes import (
    BLOCK_ROWS,
    BLOCK_TOKENS,
    COLUMNS,
    SCALE_HEADS,
    Geometry,
)

_SCORES = plgpu.Layout.WGMMA
_ROWS = plgpu.Layout.WGMMA.reduce(1)
_KEYS = plgpu.Layout.WGMMA.reduce(0)
_NARROW = plgpu.Layout.WGMMA_UPCAST_2X  # four 8-bit numbers of a row per thread
_ROW_EACH = plgpu.Layout.TCGEN05_TMEM_NATIVE(SCALE_HEADS)  # a row per thread
# jax 0.10 wants an index beside the reference, which 0.11 deprecates.
_INDEX = inspect.signature(plgpu.load).parameters["idx"]
_WANTED: dict[str, Any] = {"idx": ()} if _INDEX.default is _INDEX.empty else {}
_load: Any = functools.partial(plgpu.load, **_WANTED)


def attend_block(
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
    *refs: Any,
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
    scales_smem: Any = None,
    scales_here: Any = None,
    row_smem: Any = None,
    k_wide: Any = None,
    v_wide: Any = None,
) -> None:
    """Attend with one block of rows, one kv head, one part of the context.

    Args:
        geometry: the sizes.
        copied: rows of `q_ref` and of the result.
        q_ref: [B, K, copied, D].
        k_ref: [pages, page_size, K, D].
        v_ref: as `k_ref`.
        table_ref: int32[S, P].
        slot_ref: int32[B].
        positions_ref: int32[B, 64], of each row; -1 for one that sees nothing.
        oldest_ref: int32[B], the first token that any row sees.
        end_ref: int32[B], the token after the last that any row sees.
        *refs: the scales of keys and of values, float32[pages, page_size, K], if any;
            the results, [splits, B, K, copied, D] and float32[splits, B, K, 64].
        q_smem: [64, D].
        k_smem: [stages, 64, D] in the dtype of the pages.
        v_smem: as `k_smem`.
        high_smem: [64, 64], weights rounded.
        low_smem: [64, 64], what rounding took.
        out_smem: [64, 64].
        lse_smem: float32[64].
        q_here: barrier of the queries.
        k_here: a barrier per stage.
        v_here: as `k_here`.
        scales_smem: float32[stages, 128, 4], or None, as all below.
        scales_here: as `k_here`.
        row_smem: float32[128].
        k_wide: [64, D] in the dtype of the queries.
        v_wide: bfloat16[64, D]; None if `k_wide` will do.
    """
    *scale_refs, out_ref, lse_ref = refs
    split, block, head = (lax.axis_index(x) for x in ("split", "block", "head"))
    some_rows = pl.ds(0, copied)
    plgpu.copy_gmem_to_smem(q_ref.at[block, head], q_smem.at[some_rows], q_here)
    slot, oldest, end = slot_ref[block], oldest_ref[block], end_ref[block]
    first = lax.div(oldest, BLOCK_TOKENS)
    turns = jnp.maximum(_ceil_div(end, BLOCK_TOKENS) - first, 0)
    share = _ceil_div(turns, out_ref.shape[0])
    low = first + split * share
    high = jnp.minimum(low + share, first + turns)
    # What pages bring: from where, which heads, to which row of what, and who waits.
    streams: list[tuple[Any, ...]] = [
        (k_ref, head, k_smem, 0, k_here),
        (v_ref, head, v_smem, 0, v_here),
    ]
    some_heads = pl.ds(lax.div(head, SCALE_HEADS) * SCALE_HEADS, SCALE_HEADS)
    for i, ref in enumerate(scale_refs):
        to = i * BLOCK_TOKENS
        streams.append((ref, some_heads, scales_smem, to, scales_here))

    def fetch(turn: jax.Array, stage: jax.Array | int) -> None:
        for part in range(BLOCK_TOKENS // geometry.chunk):
            start = turn * BLOCK_TOKENS + part * geometry.chunk
            wanted = (start < end) & (start + geometry.chunk > oldest)

            @pl.when(wanted)
            def _(start: Any = start, part: int = part) -> None:
                cell = lax.div(start, geometry.page_size)
                # An id out of range is a bug of the caller; it must not fault.
                page = jnp.clip(table_ref[slot, cell], 0, geometry.num_pages - 1)
                offset = pl.ds(start - cell * geometry.page_size, geometry.chunk)
                for ref, heads, smem, row, here in streams:
                    rows = pl.ds(row + part * geometry.chunk, geometry.chunk)
                    plgpu.copy_gmem_to_smem(
                        ref.at[page, offset, heads],
                        smem.at[stage, rows],
                        here.at[stage],
                    )

            @pl.when(jnp.logical_not(wanted))
            def _() -> None:
                for *_, here in streams:
                    plgpu.barrier_arrive(here.at[stage])

    for stage in range(geometry.stages):
        pl.when(low + stage < high)(functools.partial(fetch, low + stage, stage))
    plgpu.barrier_wait(q_here)
    positions = _load(positions_ref.at[block], layout=_ROWS, optimized=False)

    def walk(turn: jax.Array, carry: tuple) -> tuple:
        sums, peak, total = carry
        stage = lax.rem(turn - low, geometry.stages)
        keys, values = k_smem.at[stage], v_smem.at[stage]
        start = turn * BLOCK_TOKENS
        seen = (oldest - start, end - start)
        plgpu.barrier_wait(k_here.at[stage])
        if geometry.quantised:
            plgpu.barrier_wait(scales_here.at[stage])
            column = lax.rem(head, SCALE_HEADS)
            row_smem[...] = _pick(scales_smem.at[stage], column, seen)
            _widen(keys, k_wide)
            plgpu.commit_smem()
            keys = k_wide
        scores = _multiply((q_smem, keys.T)) * geometry.scale
        if geometry.quantised:
            scores *= _scales(row_smem.at[pl.ds(0, BLOCK_TOKENS)])
        if geometry.soft_cap is not None:
            scores = geometry.soft_cap * jnp.tanh(scores / geometry.soft_cap)
        token = start + plgpu.broadcasted_iota(
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
        total = total * decay + jnp.sum(weights, axis=1)
        if geometry.quantised:
            weights *= _scales(row_smem.at[pl.ds(BLOCK_TOKENS, BLOCK_TOKENS)])
        rounded = weights.astype(high_smem.dtype)
        high_smem[...] = rounded
        low_smem[...] = (weights - rounded.astype(jnp.float32)).astype(low_smem.dtype)
        plgpu.barrier_wait(v_here.at[stage])
        if geometry.quantised:
            wide = k_wide if v_wide is None else v_wide
            _widen(values, wide, seen)
            values = wide
        else:

            @pl.when((start < oldest) | (start + BLOCK_TOKENS > end))
            def _() -> None:
                _clear_unseen(values, seen)

        plgpu.commit_smem()
        new_sums = []
        for i, held in enumerate(sums):
            part = values.at[:, pl.ds(i * COLUMNS, COLUMNS)]
            added = _multiply((high_smem, part), (low_smem, part))
            new_sums.append(held * _across(decay, COLUMNS) + added)

        @pl.when(turn + geometry.stages < high)
        def _() -> None:
            fetch(turn + geometry.stages, stage)

        return tuple(new_sums), new_peak, total

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


# --- its parts ------------------------------------------------------------------------


def _multiply(*pairs: tuple[Any, Any]) -> jax.Array:
    """Return the sum of the products of pairs in shared memory, in float32."""

    def run(sums: Any) -> jax.Array:
        for left, right in pairs:
            plgpu.wgmma(sums, left, right)
        return sums[...]

    left, right = pairs[0]
    shape = (left.shape[0], right.shape[1])
    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


def _clear_unseen(values: Any, seen: tuple[jax.Array, jax.Array]) -> None:
    """Clear the rows of values[64, D] outside of [seen[0], seen[1]).

    Nobody sees them, but 0 times NaN is NaN.
    """
    for i in range(values.shape[1] // COLUMNS):
        part = values.at[:, pl.ds(i * COLUMNS, COLUMNS)]
        part[...] = _keep_seen(_load(part, layout=_SCORES), seen, _SCORES)


def _widen(
    narrow: Any, wide: Any, seen: tuple[jax.Array, jax.Array] | None = None
) -> None:
    """Convert narrow[64, D] to the dtype of wide[64, D].

    Floats outside of the rows [seen[0], seen[1]) become 0, as in `_clear_unseen`; there
    is no integer that 0 times it is not 0.
    """
    is_float = jnp.issubdtype(narrow.dtype, jnp.floating)
    for i in range(wide.shape[1] // COLUMNS):
        columns = (slice(None), pl.ds(i * COLUMNS, COLUMNS))
        held = _load(narrow.at[columns], layout=_NARROW, optimized=False)
        if is_float and wide.dtype == jnp.bfloat16:
            held = held.astype(jnp.float32)  # no instruction goes all the way
        held = held.astype(wide.dtype)
        if is_float and seen is not None:
            held = _keep_seen(held, seen, _NARROW)
        wide[columns] = held


def _keep_seen(
    held: jax.Array, seen: tuple[jax.Array, jax.Array], layout: Any
) -> jax.Array:
    """Return the rows in [seen[0], seen[1]) as they are, 0 elsewhere."""
    row = plgpu.broadcasted_iota(jnp.int32, held.shape, 0, layout=layout)
    return jnp.where((row >= seen[0]) & (row < seen[1]), held, jnp.zeros_like(held))


def _pick(
    table: Any, column: jax.Array, seen: tuple[jax.Array, jax.Array]
) -> jax.Array:
    """Return a column of table[64 keys + 64 values, 4], 0 for what nobody sees."""
    held = _load(table, layout=_ROW_EACH, optimized=False)
    row, here = (
        plgpu.broadcasted_iota(jnp.int32, held.shape, axis, layout=_ROW_EACH)
        for axis in (0, 1)
    )
    token = lax.rem(row, BLOCK_TOKENS)
    wanted = (here == column) & (token >= seen[0]) & (token < seen[1])
    return jnp.sum(jnp.where(wanted, held, 0.0), axis=1)


def _scales(row: Any) -> jax.Array:
    """Return a scale per key as [rows, keys]."""
    held = _load(row, layout=_KEYS, optimized=False)
    return lax.broadcast_in_dim(held, (BLOCK_ROWS, BLOCK_TOKENS), [1])


def _across(column: jax.Array, width: int) -> jax.Array:
    """Return a value per row as [rows, width]."""
    return lax.broadcast_in_dim(column, (column.shape[0], width), [0])


def _ceil_div(a: jax.Array, b: int) -> jax.Array:
    return lax.div(a + (b - 1), b)
