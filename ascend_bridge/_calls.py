"""The custom calls as functions of arrays, and what `vmap` makes of them.

A batch of calls becomes one call: the slots of all members are laid end to end, and so
are the pools where each member has its own.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from ascend_bridge import _library


def attention_caller(
    ragged: bool,
    scale: float,
    window: int,
    soft_cap: float,
    share_prefixes: bool,
    target: str | None = None,
) -> Callable[..., list[jax.Array]]:
    """Return the call as a function of arrays that folds a batch into the slots.

    `target` names another custom call with the operands and attributes of the usual.
    """
    name = target or ("ragged_paged_attention" if ragged else "paged_attention")

    @custom_vmap
    def call(*arrays: jax.Array) -> list[jax.Array]:
        arrays = _varying_alike(arrays)
        q = arrays[0]
        lse = jax.typeof(q[:, :, 0].astype(jnp.float32))
        run = jax.ffi.ffi_call(
            _library.PREFIX + name,
            [jax.typeof(q), lse],
        )
        results = run(
            *arrays,
            scale=np.float32(scale),
            window=np.int64(window),
            soft_cap=np.float32(soft_cap),
            share_prefixes=np.bool_(share_prefixes),
        )
        return list(results)

    @call.def_vmap
    def fold(
        axis_size: int, in_batched: list[bool], *arrays: jax.Array
    ) -> tuple[list[jax.Array], list[bool]]:
        folded = _fold_attention(ragged, axis_size, in_batched, arrays)
        tokens = arrays[0].shape[1] if in_batched[0] else arrays[0].shape[0]
        results = call(*folded)
        return (
            [x.reshape(axis_size, tokens, *x.shape[1:]) for x in results],
            [True, True],
        )

    return call


def _fold_attention(
    ragged: bool, size: int, in_batched: list[bool], arrays: tuple[jax.Array, ...]
) -> list[jax.Array]:
    """Turn a batch of calls into one call with more slots.

    Pages that all share stay as they are; else the pools are laid end to end and the
    ids shifted. A ragged call gets one more, empty, slot per member of the batch, which
    takes the member's padding rows: rows must not have gaps.
    """

    def every(i: int) -> jax.Array:
        x = arrays[i]
        return x if in_batched[i] else jnp.broadcast_to(x[None], (size, *x.shape))

    def end_to_end(x: jax.Array) -> jax.Array:
        return x.reshape(-1, *x.shape[2:])

    q, table, lens = every(0), every(3), every(4)
    scales = range(6 if ragged else 5, len(arrays))
    pools = [1, 2, *scales]
    if any(in_batched[i] for i in pools):
        table = _shift_pages(table, every(1).shape[1])
        folded_pools = [end_to_end(every(i)) for i in pools]
    else:
        folded_pools = [arrays[i] for i in pools]
    if ragged:
        tokens, cu = q.shape[1], every(5)
        starts = jnp.arange(size, dtype=jnp.int32)[:, None] * tokens
        cu = jnp.append((cu + starts).reshape(-1), jnp.int32(size * tokens))
        table = jnp.pad(table, ((0, 0), (0, 1), (0, 0)))
        lens = jnp.pad(lens, ((0, 0), (0, 1)))
    head = [end_to_end(q), *folded_pools[:2], end_to_end(table), end_to_end(lens)]
    return [*head, *([cu] if ragged else []), *folded_pools[2:]]


def _shift_pages(ids: jax.Array, num_pages: int) -> jax.Array:
    """Turn page ids of a batch of pools, [B, ...], into ids of the pools end to end.

    Ids that name no page become the one past the last pool, not a page of the next.
    """
    size = ids.shape[0]
    pool = jnp.arange(size, dtype=jnp.int32).reshape(-1, *(1,) * (ids.ndim - 1))
    return jnp.where(
        (ids >= 0) & (ids < num_pages), ids + pool * num_pages, size * num_pages
    )


@custom_vmap
def write(*arrays: jax.Array) -> list[jax.Array]:
    """Call write_kv; the results take the place of the first two arguments."""
    return changing_pages("write_kv")(*arrays)


@write.def_vmap
def _fold_write(
    axis_size: int, in_batched: list[bool], *arrays: jax.Array
) -> tuple[list[jax.Array], list[bool]]:
    k_pages, v_pages, k, v, pages, offsets = _all_batched(axis_size, in_batched, arrays)
    pages = _shift_pages(pages, k_pages.shape[1])
    flat = (x.reshape(-1, *x.shape[2:]) for x in (k_pages, v_pages, k, v))
    results = write(*flat, pages.reshape(-1), offsets.reshape(-1))
    out = [results[0].reshape(k_pages.shape), results[1].reshape(v_pages.shape)]
    return out, [True, True]


def copier(num_layers: int) -> Callable[..., list[jax.Array]]:
    """Return copy_pages as a function of arrays that folds a batch into the pages."""

    @custom_vmap
    def copy(*arrays: jax.Array) -> list[jax.Array]:
        return changing_pages("copy_pages")(*arrays, num_layers=np.int64(num_layers))

    @copy.def_vmap
    def fold(
        axis_size: int, in_batched: list[bool], *arrays: jax.Array
    ) -> tuple[list[jax.Array], list[bool]]:
        k_pages, v_pages, src, dst = _all_batched(axis_size, in_batched, arrays)
        # Each member has its own pairs, so the layers are spelled out: [B, L, M].
        of_layer = k_pages.shape[1] // num_layers

        def spell_out(ids: jax.Array) -> jax.Array:
            ids = jnp.broadcast_to(
                ids[:, None], (axis_size, num_layers, ids.shape[1])
            ).reshape(axis_size * num_layers, -1)
            return _shift_pages(ids, of_layer).reshape(-1)

        flat = (x.reshape(-1, *x.shape[2:]) for x in (k_pages, v_pages))
        results = copier(1)(*flat, spell_out(src), spell_out(dst))
        out = [results[0].reshape(k_pages.shape), results[1].reshape(v_pages.shape)]
        return out, [True, True]

    return copy


def changing_pages(name: str) -> Callable[..., list[jax.Array]]:
    """Return a call whose two results are its first two arguments, changed in place."""

    def call(*arrays: jax.Array, **attributes: Any) -> list[jax.Array]:
        arrays = _varying_alike(arrays)
        shapes = [jax.typeof(x) for x in arrays[:2]]
        run = jax.ffi.ffi_call(
            _library.PREFIX + name, shapes, input_output_aliases={0: 0, 1: 1}
        )
        return list(run(*arrays, **attributes))

    return call


def _all_batched(
    size: int, in_batched: list[bool], arrays: tuple[jax.Array, ...]
) -> list[jax.Array]:
    """Give every array a leading batch axis."""
    return [
        x if batched else jnp.broadcast_to(x[None], (size, *x.shape))
        for x, batched in zip(arrays, in_batched, strict=True)
    ]


def _varying_alike(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Under shard_map, make all operands vary over the axes that any varies over.

    A custom call takes no part in this bookkeeping by itself: its results are what
    they are declared to be, here of the types of operands.
    """
    held = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    every = frozenset().union(*held)
    return tuple(
        lax.pcast(x, tuple(sorted(every - axes)), to="varying") if every - axes else x
        for x, axes in zip(arrays, held, strict=True)
    )
