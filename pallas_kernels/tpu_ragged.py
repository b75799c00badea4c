"""Prefill and decode mixed on TPU: runs of queries, against the pages of their slot.

The queries of a slot are cut into runs of up to `block_queries`; a run is an item of
the stream. Runs start at any row: they are copied from and to HBM by parts of 2**n
rows, so that nothing beside them is read or written::

    rows of slot    0 0 0 0 0 0 0 0 0 0 0 1 2 2 2 . .
    runs of 4      [0 . . .|1 . . .|2 . .|3|4 . .]      run 2: 2 rows, then 1

A run of few rows, as in decode, is computed at the width of one tile.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import mesh_axes
from pallas_kernels import tpu_blocks as blocks

_FEW_ROWS = 8  # sublanes of a float32 tile


def run_ragged(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_indices: jax.Array,
    seq_lens: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
    scales: tuple[jax.Array, ...],
    results: tuple[jax.Array, jax.Array],
    *,
    geometry: blocks.Geometry,
    block_queries: int,
    vmem_bytes: int,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Call the kernel once; the page table must fit SMEM.

    Args:
        q: float32 or bfloat16[T, H, D].
        k_pages: [pages, page_size, K, D].
        v_pages: likewise.
        page_indices: int32[S, P]; ids of live cells lie in 0 .. pages - 1.
        seq_lens: int32[S], within 0 .. P * page_size.
        starts: int32[S], the first row of each slot.
        ends: int32[S], one past its last row.
        scales: float32[pages, page_size, K] of keys and of values, or nothing.
        results: (out float32[T, H, D], lse float32[T, H, 1]), taken over and changed
            in the rows of these slots.
        geometry: sizes and options.
        block_queries: rows of a run, a power of 2.
        vmem_bytes: what the kernel may use of VMEM.
        interpret: as in `pl.pallas_call`.

    Returns:
        The new `results`.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_slots = seq_lens.shape[0]
    num_items = min(num_tokens, num_slots + num_tokens // block_queries)
    geometry = dataclasses.replace(geometry, cores=min(geometry.cores, num_items))
    items = _cut_runs(seq_lens, starts, ends, num_items, block_queries, geometry.window)
    shape = (num_heads, head_dim)
    width = geometry.group_size * block_queries
    kv_heads = geometry.num_kv_heads
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    num_prefetch, num_inputs = 1 + len(items), 3 + len(scales)
    return pl.pallas_call(
        functools.partial(_kernel, geometry, num_items, block_queries),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=num_prefetch,
            grid=(geometry.cores, -(-num_items // geometry.cores)),
            in_specs=[hbm] * (num_inputs + 2),
            out_specs=[hbm] * 2,
            scratch_shapes=[
                pltpu.SMEM((1,), jnp.int32),
                pltpu.VMEM((2, block_queries, *shape), q.dtype),
                pltpu.VMEM((block_queries, *shape), jnp.float32),
                pltpu.VMEM((block_queries, num_heads, 1), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA,
                pltpu.VMEM((kv_heads, width, head_dim), jnp.float32),
                pltpu.VMEM((kv_heads, width, 1), jnp.float32),
                pltpu.VMEM((kv_heads, width, 1), jnp.float32),
                pltpu.VMEM((kv_heads, width, head_dim), jnp.float32),
                *geometry.scratch(),
            ],
        ),
        out_shape=[mesh_axes.result(x.shape, x.dtype, x) for x in results],
        input_output_aliases={
            num_prefetch + num_inputs + i: i for i in range(len(results))
        },
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=vmem_bytes,
        ),
        interpret=interpret,
        name="ragged_paged_attention",
    )(page_indices.reshape(-1), *items, q, k_pages, v_pages, *scales, *results)


def _cut_runs(
    seq_lens: jax.Array,
    row_starts: jax.Array,
    row_ends: jax.Array,
    num_items: int,
    block_queries: int,
    window: int | None,
) -> tuple[jax.Array, ...]:
    """Cut the rows of each slot into runs.

    Returns:
        (slot, low, high, row, rows), int32[items] each: the slot of a run, the range
        of tokens that its rows see, its first row and their number. All runs come
        first; what is left over has 0 rows.
    """
    q_lens = jnp.maximum(row_ends - row_starts, 0)
    # Rows before position 0 see nothing; only a caller's bug makes them.
    visible = jnp.minimum(q_lens, seq_lens)
    runs = -(-visible // block_queries)
    ends = jnp.cumsum(runs)
    item = jnp.arange(num_items, dtype=jnp.int32)
    slot = jnp.sum((item[:, None] >= ends[None, :]).astype(jnp.int32), axis=1)
    slot = jnp.minimum(slot, seq_lens.shape[0] - 1)
    start = (item - (ends - runs)[slot]) * block_queries
    rows = jnp.clip(visible[slot] - start, 0, block_queries)
    rows = jnp.where(item < ends[-1], rows, 0)
    row = row_ends[slot] - visible[slot] + start
    high = seq_lens[slot] - visible[slot] + start + rows
    high = jnp.where(rows > 0, high, 0)
    low = jnp.zeros_like(high)
    if window is not None:
        low = jnp.maximum(high - rows + 1 - window, 0)
    return slot, low, high, row, rows


def _kernel(
    geometry: blocks.Geometry,
    num_items: int,
    block_queries: int,
    table: Any,
    slots: Any,
    lows: Any,
    highs: Any,
    first_rows: Any,
    num_rows: Any,
    q: Any,
    *refs: Any,
) -> None:
    """Attend with one run; refs are as the specs in `run_ragged` say."""
    pages = 4 if geometry.quantised else 2
    # The results come twice, as operands and as results: one array each.
    hbm, (out, lse), refs = refs[:pages], refs[pages + 2 : pages + 4], refs[pages + 4 :]
    turn, q_rows, out_rows, lse_rows, q_arrived, out_left, *rest = refs
    queries, peak, total, summed, k_buffer, v_buffer, arrived, *scale_buffers = rest
    stream = blocks.Stream(
        geometry=geometry,
        table=table,
        slots=slots,
        lows=lows,
        highs=highs,
        hbm=hbm,
        buffers=(k_buffer, v_buffer, *scale_buffers),
        arrived=arrived,
    )
    core, step = pl.program_id(0), pl.program_id(1)
    item = blocks.item_of(core, step, geometry.cores, num_items)
    place = step * geometry.cores + core
    rows = jnp.where(place < num_items, num_rows[item], 0)

    def q_copies(item: jax.Array, step: jax.Array, act: Callable) -> None:
        buffer = step & 1

        def copy(start: jax.Array, size: int) -> None:
            source = q.at[pl.ds(first_rows[item] + start, size)]
            room = q_rows.at[buffer, pl.ds(start, size)]
            act(pltpu.make_async_copy(source, room, q_arrived.at[buffer]))

        _each_part(num_rows[item], block_queries, copy)

    def begin(item: jax.Array, step: jax.Array) -> None:
        q_copies(item, step, lambda copy: copy.start())

    def out_copies(item: jax.Array, act: Callable) -> None:
        def copy(start: jax.Array, size: int) -> None:
            for held, room in ((out_rows, out), (lse_rows, lse)):
                source = held.at[pl.ds(start, size)]
                target = room.at[pl.ds(first_rows[item] + start, size)]
                act(pltpu.make_async_copy(source, target, out_left))

        _each_part(num_rows[item], block_queries, copy)

    def attend(width: int) -> None:
        """Attend with the first `width` rows of the buffer."""
        group = geometry.group_size
        used = pl.ds(0, group * width)
        softmax = [
            (peak.at[head, used], total.at[head, used], summed.at[head, used])
            for head in range(geometry.num_kv_heads)
        ]

        def compute(block: jax.Array, buffer: jax.Array) -> None:
            low, high = stream.seen(item, block)
            tokens = geometry.buffer_tokens
            token_of = lax.broadcasted_iota(jnp.int32, (tokens, 1), 0)
            live_tokens = (token_of >= low) & (token_of < high)
            # Rows of the queries: all rows of query head 0, of query head 1, ...
            shape = (group * width, tokens)
            nth = lax.broadcasted_iota(jnp.int32, shape, 0) & (width - 1)
            column = lax.broadcasted_iota(jnp.int32, shape, 1)
            position = highs[item] - rows + nth - block * geometry.block_tokens
            live = (column <= position) & (column < geometry.block_tokens)
            if geometry.window is not None:
                live &= column > position - geometry.window
            for head in range(geometry.num_kv_heads):
                keys = stream.head(0, buffer, head)
                values = stream.head(1, buffer, head)
                products = blocks.exact_dot(
                    queries[head, used].astype(q.dtype), keys, transpose=True
                )
                scores = blocks.cap_scores(geometry, products)
                blocks.accumulate(
                    *softmax[head],
                    jnp.where(live, scores, -jnp.inf),
                    jnp.where(live_tokens, values, jnp.zeros_like(values)),
                )

        for head in range(geometry.num_kv_heads):
            blocks.reset(*softmax[head])
        blocks.open_stream(stream, turn, step, item, begin)
        q_copies(item, step, lambda copy: copy.wait())
        for nth in range(group * geometry.num_kv_heads):
            head, of_group = divmod(nth, group)
            x = q_rows[step & 1, pl.ds(0, width), nth, :].astype(jnp.float32)
            queries[head, pl.ds(of_group * width, width)] = x
        blocks.stream_blocks(stream, turn, step, item, num_items, compute, begin)

    def store(width: int) -> None:
        """Move the first `width` rows of the softmax to where they are copied from."""
        group = geometry.group_size
        for nth in range(group * geometry.num_kv_heads):
            head, of_group = divmod(nth, group)
            part = pl.ds(of_group * width, width)
            attended, log_sum = blocks.finish(
                *(x.at[head, part] for x in (peak, total, summed))
            )
            out_rows[pl.ds(0, width), nth, :] = attended
            lse_rows[pl.ds(0, width), nth, :] = log_sum

    def for_width(act: Callable[[int], None]) -> None:
        few = min(_FEW_ROWS, block_queries)
        pl.when((rows > 0) & (rows <= few))(lambda: act(few))
        if few < block_queries:
            pl.when(rows > few)(lambda: act(block_queries))

    for_width(attend)

    # The results of one item leave while the next is computed.
    @pl.when(step > 0)
    def _() -> None:
        out_copies(place - geometry.cores, lambda copy: copy.wait())

    for_width(store)

    @pl.when(rows > 0)
    def _() -> None:
        out_copies(item, lambda copy: copy.start())

        @pl.when(step == pl.num_programs(1) - 1)
        def _() -> None:
            out_copies(item, lambda copy: copy.wait())


def _each_part(
    rows: jax.Array, most: int, act: Callable[[jax.Array, int], None]
) -> None:
    """Cut 0 .. rows into parts whose sizes are powers of 2, largest first."""
    size = most
    while size:
        start = rows - (rows & (2 * size - 1))
        pl.when((rows & size) != 0)(functools.partial(act, start, size))
        size //= 2
