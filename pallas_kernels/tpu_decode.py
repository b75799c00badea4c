"""Decode on TPU: one query per slot, against the pages of its sequence."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import mesh_axes
from pallas_kernels import tpu_blocks as blocks


def run_decode(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_indices: jax.Array,
    seq_lens: jax.Array,
    scales: tuple[jax.Array, ...],
    *,
    geometry: blocks.Geometry,
    vmem_bytes: int,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Call the kernel once; the page table must fit SMEM.

    Args:
        q: float32 or bfloat16[S, H, D].
        k_pages: [pages, page_size, K, D].
        v_pages: likewise.
        page_indices: int32[S, P]; ids of live cells lie in 0 .. pages - 1.
        seq_lens: int32[S], within 0 .. P * page_size.
        scales: float32[pages, page_size, K] of keys and of values, or nothing.
        geometry: sizes and options.
        vmem_bytes: what the kernel may use of VMEM.
        interpret: as in `pl.pallas_call`.

    Returns:
        (out[S, H, D] in q's dtype, lse float32[S, H]).
    """
    num_slots, num_heads, head_dim = q.shape
    kv_heads, group = geometry.num_kv_heads, geometry.group_size
    cores = min(geometry.cores, num_slots)
    geometry = dataclasses.replace(geometry, cores=cores)
    steps = -(-num_slots // cores)
    # Slots that hold something first: then an empty item is followed by no other.
    empty = seq_lens == 0
    order = jnp.argsort(empty, stable=True).astype(jnp.int32)
    highs = seq_lens[order]
    lows = jnp.zeros_like(highs)
    if geometry.window is not None:
        lows = jnp.maximum(highs - geometry.window, 0)

    def block_of(core: Any, step: Any, table: Any, order: Any, *_: Any) -> tuple:
        del table
        return (order[blocks.item_of(core, step, cores, num_slots)], 0, 0, 0)

    def spec(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, kv_heads, group, width), block_of)

    hbm = pl.BlockSpec(memory_space=pl.ANY)
    rows = (kv_heads, group)
    out, lse = pl.pallas_call(
        functools.partial(_kernel, geometry, num_slots),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(cores, steps),
            in_specs=[spec(head_dim), *[hbm] * (2 + len(scales))],
            out_specs=[spec(head_dim), spec(1)],
            scratch_shapes=[
                pltpu.SMEM((1,), jnp.int32),
                pltpu.VMEM((*rows, 1), jnp.float32),
                pltpu.VMEM((*rows, 1), jnp.float32),
                pltpu.VMEM((*rows, head_dim), jnp.float32),
                *geometry.scratch(),
            ],
        ),
        out_shape=[
            mesh_axes.result((num_slots, *rows, head_dim), q.dtype, q),
            mesh_axes.result((num_slots, *rows, 1), jnp.float32, q),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=vmem_bytes,
        ),
        interpret=interpret,
        name="paged_attention",
    )(
        page_indices.reshape(-1),
        order,
        lows,
        highs,
        q.reshape(num_slots, *rows, head_dim),
        k_pages,
        v_pages,
        *scales,
    )
    return out.reshape(q.shape), lse.reshape(num_slots, num_heads)


def _kernel(
    geometry: blocks.Geometry,
    num_slots: int,
    table: Any,
    order: Any,
    lows: Any,
    highs: Any,
    q: Any,
    *refs: Any,
) -> None:
    """Attend with the query of one slot; refs are as the specs in `run_decode` say."""
    pages = 4 if geometry.quantised else 2
    hbm, (out, lse), refs = refs[:pages], refs[pages : pages + 2], refs[pages + 2 :]
    turn, peak, total, summed, k_buffer, v_buffer, arrived, *scale_buffers = refs
    stream = blocks.Stream(
        geometry=geometry,
        table=table,
        slots=order,
        lows=lows,
        highs=highs,
        hbm=hbm,
        buffers=(k_buffer, v_buffer, *scale_buffers),
        arrived=arrived,
    )
    core, step = pl.program_id(0), pl.program_id(1)
    item = blocks.item_of(core, step, geometry.cores, num_slots)

    def compute(block: jax.Array, buffer: jax.Array) -> None:
        low, high = stream.seen(item, block)
        row_of = jax.lax.broadcasted_iota(jnp.int32, (geometry.buffer_tokens, 1), 0)
        live_rows = (row_of >= low) & (row_of < high)
        shape = (geometry.group_size, geometry.buffer_tokens)
        column_of = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        live = (column_of >= low) & (column_of < high)
        for head in range(geometry.num_kv_heads):
            keys = stream.head(0, buffer, head)
            values = stream.head(1, buffer, head)
            products = blocks.exact_dot(q[0, head], keys, transpose=True)
            scores = blocks.cap_scores(geometry, products)
            blocks.accumulate(
                peak.at[head],
                total.at[head],
                summed.at[head],
                jnp.where(live, scores, -jnp.inf),
                jnp.where(live_rows, values, jnp.zeros_like(values)),
            )

    # A core without an item left has its last block of results in place: keep it.
    @pl.when(step * geometry.cores + core < num_slots)
    def _() -> None:
        blocks.reset(peak, total, summed)
        blocks.open_stream(stream, turn, step, item)
        blocks.stream_blocks(stream, turn, step, item, num_slots, compute)
        for head in range(geometry.num_kv_heads):
            attended, log_sum = blocks.finish(
                peak.at[head], total.at[head], summed.at[head]
            )
            out[0, head] = attended.astype(out.dtype)
            lse[0, head] = log_sum
