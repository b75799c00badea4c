"""Paged attention on TPU: what callers use.

Arguments are checked, sizes are chosen for the chip, and page tables that do not fit
scalar memory are worked through a few slots at a time.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from pallas_kernels import mesh_axes
from pallas_kernels import tpu_blocks as blocks
from pallas_kernels import tpu_chips as chips
from pallas_kernels.tpu_decode import run_decode
from pallas_kernels.tpu_ragged import run_ragged


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_indices: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
    chip: chips.Chip | None = None,
    block_sizes: chips.BlockSizes | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Attend with one query per slot: the decode step.

    Args:
        q: queries, float[S, H, D].
        k_pages: keys, [pages, page_size, K, D]; H must be a multiple of K. Row-major
            on the device, or the compiler copies all of it (`docs/kernels.md`).
        v_pages: values, as `k_pages`.
        page_indices: int32[S, P], the physical page of each logical page. Entries past
            the last live token may hold anything.
        seq_lens: int32[S], tokens held by each slot, clipped to 0 .. P * page_size.
        scale: factor of the scores; None means 1/sqrt(D).
        window: how many keys a token sees, itself included; None means all. Pages
            outside it are not read.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`; None means no cap.
        k_scales: float32[pages, page_size, K], with int8 and float8_e4m3fn pages only.
        v_scales: as `k_scales`.
        chip: the chip to run on; None for the one that is traced for, or in an
            interpreter, v6e.
        block_sizes: sizes to use as they are, not those of `tpu_chips.BLOCK_SIZES`.
        interpret: as in `pl.pallas_call`.

    Returns:
        The output [S, H, D] in the dtype of `q`, and the log-sum-exp of the scores,
        float32[S, H]. A slot without keys is exactly 0, with -inf.

    Raises:
        NotImplementedError: the chip cannot do the call; the message says why.

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_kernels import tpu_attention
        >>> pages = jnp.ones((4, 2, 1, 8))  # 4 pages of 2 tokens, one kv head
        >>> table = jnp.array([[3, 1], [0, 4]])  # 4 means: no page
        >>> out, _ = tpu_attention.paged_attention(
        ...     jnp.ones((2, 2, 8)), pages, pages * 5, table, jnp.array([3, 0]),
        ...     interpret=True,
        ... )
        >>> out[:, 0, 0].tolist()
        [5.0, 0.0]
    """
    arrays = (q, k_pages, v_pages, page_indices, seq_lens)
    scales = () if k_scales is None or v_scales is None else (k_scales, v_scales)
    options = _options(q, scale, window, soft_cap)
    run = partial(_decode, options, chip, block_sizes, interpret)
    return _batched(run, foldable=True)(*arrays, *scales)


def ragged_paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_indices: jax.Array,
    seq_lens: jax.Array,
    cu_q_lens: jax.Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
    chip: chips.Chip | None = None,
    block_sizes: chips.BlockSizes | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Attend with any number of queries per slot: prefill and decode mixed.

    Row i of the m rows of a slot sits at position `seq_lens[s] - m + i` and sees the
    keys up to and including that position.

    Args:
        q: queries in slot order, float[T, H, D].
        k_pages: as in `paged_attention`.
        v_pages: see there.
        page_indices: see there.
        seq_lens: int32[S], tokens held by each slot, these rows included.
        cu_q_lens: int32[S + 1], ascending within 0 .. T; the rows of slot s are
            `cu_q_lens[s]` to `cu_q_lens[s + 1]`. Rows of no slot give 0.
        scale: as in `paged_attention`; so are the arguments below.
        window: see there.
        soft_cap: see there.
        k_scales: see there.
        v_scales: see there.
        chip: see there.
        block_sizes: see there.
        interpret: see there.

    Returns:
        The output [T, H, D] in the dtype of `q`, and the log-sum-exp, float32[T, H].

    Raises:
        NotImplementedError: the chip cannot do the call; the message says why.

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_kernels import tpu_attention
        >>> v_pages = jnp.arange(8.0).reshape(4, 2, 1, 1)  # page p holds 2p, 2p + 1
        >>> out, _ = tpu_attention.ragged_paged_attention(
        ...     jnp.zeros((4, 1, 1)),  # equal scores: each row averages its values
        ...     v_pages,
        ...     v_pages,
        ...     jnp.array([[1, 0], [3, 4]]),
        ...     jnp.array([2, 1]),
        ...     jnp.array([0, 2, 3]),  # two rows, one row, and one of padding
        ...     interpret=True,
        ... )
        >>> out[:, 0, 0].tolist()  # 2, (2+3)/2, 6, padding
        [2.0, 2.5, 6.0, 0.0]
    """
    arrays = (q, k_pages, v_pages, page_indices, seq_lens, cu_q_lens)
    scales = () if k_scales is None or v_scales is None else (k_scales, v_scales)
    options = _options(q, scale, window, soft_cap)
    run = partial(_ragged, options, chip, block_sizes, interpret)
    return _batched(run, foldable=False)(*arrays, *scales)


def _options(
    q: jax.Array, scale: float | None, window: int | None, soft_cap: float | None
) -> dict[str, Any]:
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[-1])
    return {"scale": float(scale), "window": window, "soft_cap": soft_cap}


def _batched(run: Any, *, foldable: bool) -> Any:
    """Return `run` with a rule for vmap.

    Decode over common pages lays the slots of all members end to end; other batches
    go one member after the other.
    """
    call = custom_vmap(run)

    @call.def_vmap
    def rule(size: int, in_batched: list[bool], *arrays: jax.Array) -> tuple:
        own_pages = any(in_batched[1:3]) or any(in_batched[5:])
        if foldable and not own_pages:
            q, table, lens = (
                x if batched else jnp.broadcast_to(x[None], (size, *x.shape))
                for x, batched in ((arrays[i], in_batched[i]) for i in (0, 3, 4))
            )
            q, table, lens = (x.reshape(-1, *x.shape[2:]) for x in (q, table, lens))
            results = call(q, *arrays[1:3], table, lens, *arrays[5:])
            results = tuple(x.reshape(size, -1, *x.shape[1:]) for x in results)
            return results, (True, True)

        def one(mapped: list[jax.Array]) -> tuple:
            rest = iter(mapped)
            return call(
                *(
                    next(rest) if batched else x
                    for x, batched in zip(arrays, in_batched, strict=True)
                )
            )

        mapped = [x for x, batched in zip(arrays, in_batched, strict=True) if batched]
        return lax.map(one, mapped), (True, True)

    return call


def _decode(
    options: dict[str, Any],
    chip: chips.Chip | None,
    sizes: chips.BlockSizes | None,
    interpret: Any,
    *arrays: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Run the kernel once, or once per so many slots as fit."""
    arrays = mesh_axes.vary_alike(arrays)
    q, k_pages, v_pages, table, lens, *scales = arrays
    fit, geometry = _choose(arrays, options, chip, sizes, interpret, ragged=False)
    table, lens = _made_safe(table, lens, k_pages)

    def run(q: jax.Array, table: jax.Array, lens: jax.Array) -> tuple:
        return run_decode(
            _as_computed(q),
            k_pages,
            v_pages,
            table,
            lens,
            tuple(scales),
            geometry=geometry,
            vmem_bytes=fit.vmem,
            interpret=interpret,
        )

    if fit.slots_per_call >= q.shape[0]:
        out, lse = run(q, table, lens)
    else:
        parts = [_in_parts(x, fit.slots_per_call) for x in (q, table, lens)]
        out, lse = (
            x.reshape(-1, *x.shape[2:])[: q.shape[0]]
            for x in lax.map(lambda part: run(*part), parts)
        )
    return out.astype(q.dtype), lse


def _ragged(
    options: dict[str, Any],
    chip: chips.Chip | None,
    sizes: chips.BlockSizes | None,
    interpret: Any,
    *arrays: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Run the kernel once, or once per so many slots as fit, into the same results."""
    arrays = mesh_axes.vary_alike(arrays)
    q, k_pages, v_pages, table, lens, cu, *scales = arrays
    fit, geometry = _choose(arrays, options, chip, sizes, interpret, ragged=True)
    table, lens = _made_safe(table, lens, k_pages)
    cu = jnp.clip(cu, 0, q.shape[0])
    out, lse, _ = mesh_axes.vary_alike(
        (
            jnp.zeros(q.shape, jnp.float32),
            jnp.full((*q.shape[:2], 1), -jnp.inf, jnp.float32),
            q,
        )
    )

    def run(results: tuple, part: tuple) -> tuple[tuple, None]:
        table, lens, starts, ends = part
        new = run_ragged(
            _as_computed(q),
            k_pages,
            v_pages,
            table,
            lens,
            starts,
            ends,
            tuple(scales),
            results,
            geometry=geometry,
            block_queries=fit.block_queries,
            vmem_bytes=fit.vmem,
            interpret=interpret,
        )
        return tuple(new), None

    parts = (table, lens, cu[:-1], cu[1:])
    if fit.slots_per_call >= lens.shape[0]:
        (out, lse), _ = run((out, lse), parts)
    else:
        cut = tuple(_in_parts(x, fit.slots_per_call) for x in parts)
        (out, lse), _ = lax.scan(run, (out, lse), cut)
    return out.astype(q.dtype), lse[:, :, 0]


def _choose(
    arrays: tuple[jax.Array, ...],
    options: dict[str, Any],
    chip: chips.Chip | None,
    sizes: chips.BlockSizes | None,
    interpret: Any,
    *,
    ragged: bool,
) -> tuple[chips.Fit, blocks.Geometry]:
    """Choose sizes for the chip, or raise NotImplementedError with the reason."""
    q, k_pages, _, table, *_ = arrays
    call = chips.Call(
        num_tokens=q.shape[0],
        num_slots=table.shape[0],
        pages_per_slot=table.shape[1],
        page_size=k_pages.shape[1],
        num_heads=q.shape[1],
        num_kv_heads=k_pages.shape[2],
        head_dim=q.shape[2],
        q_dtype=jnp.dtype(q.dtype).name,
        kv_dtype=jnp.dtype(k_pages.dtype).name,
        ragged=ragged,
        has_scales=len(arrays) > 5 + ragged,
    )
    if chip is None:
        chip, reason = chips.target_chip()
        if chip is None and interpret:
            chip = chips.CHIPS["v6e"]
        if chip is None:
            raise NotImplementedError(reason)
    fit = chips.fit(call, chip, sizes)
    geometry = blocks.Geometry(
        page_size=call.page_size,
        pages_per_slot=call.pages_per_slot,
        pages_per_block=fit.pages_per_block,
        num_kv_heads=call.num_kv_heads,
        group_size=call.num_heads // call.num_kv_heads,
        head_dim=call.head_dim,
        kv_dtype=k_pages.dtype,
        quantised=call.has_scales,
        cores=chip.cores,
        **options,
    )
    return fit, geometry


def _made_safe(
    table: jax.Array, lens: jax.Array, k_pages: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Keep a caller's wrong ids and lengths from reading outside of the pages."""
    num_pages, page_size = k_pages.shape[:2]
    table = jnp.clip(table, 0, num_pages - 1).astype(jnp.int32)
    return table, jnp.clip(lens, 0, table.shape[1] * page_size).astype(jnp.int32)


def _as_computed(q: jax.Array) -> jax.Array:
    """Return queries in a dtype that the chip has."""
    return q.astype(jnp.float32) if q.dtype == jnp.float16 else q


def _in_parts(x: jax.Array, size: int) -> jax.Array:
    """Cut the first axis into parts, filled up with zeros: slots that hold nothing."""
    parts = -(-x.shape[0] // size)
    filled = jnp.pad(x, ((0, parts * size - x.shape[0]), *((0, 0),) * (x.ndim - 1)))
    return filled.reshape(parts, size, *x.shape[1:])
