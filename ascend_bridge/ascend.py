"""A page pool on an Ascend NPU, as a value that a program on the cpu platform holds.

The pages stay on the NPU; only queries, new keys and values, page ids and results cross
the bus (`step_traffic`). Without an NPU the same program runs on pages in the memory of
the host, with the same rules:

    pool = open_pool(...)                        handle 1, version 0
    pool, out = attend(pool, layer, q, k, v, …)  version 1: written, then attended to
    pool = copy_pages(pool, src, dst)            version 2
    close_pool(pool)                             the memory is free

A pool is two small arrays, `handle` and `version`. What changes it takes its last
version and gives the next, so that a program's data dependences order the calls; a
change of an older version is an error, "stale pool version". A read takes any version,
as long as no page that it sees was written since: then that is an error too, never
wrong numbers. Reads return the pool as well: use what they return, and later writes
come after them.

No `vmap`, no gradients, and a program that uses a pool is one for one device. What
failed half-way has used up versions: `latest` gives the pool as it is.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ascend_bridge import _device_library, _library
from ascend_bridge._device_pool import (
    DevicePool,
    PoolShape,
    PoolStatus,
    close_pool,
    diagnose,
    latest,
    npu_arch_and_cores,
    open_pool,
    pool_status,
    usable,
)
from ascend_bridge._one_device import on_one_device
from ascend_bridge._options import (
    checked_scale,
    checked_soft_cap,
    checked_window,
    int32,
)
from ascend_bridge._traffic import StepTraffic, step_traffic

__all__ = [
    "DevicePool",
    "PoolShape",
    "PoolStatus",
    "StepTraffic",
    "attend",
    "close_pool",
    "copy_pages",
    "diagnose",
    "latest",
    "npu_arch_and_cores",
    "open_pool",
    "paged_attention",
    "pool_status",
    "read_pages",
    "step_traffic",
    "usable",
    "write_kv",
]


def write_kv(
    pool: DevicePool,
    layer: int | jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: jax.Array,
    offsets: jax.Array,
) -> DevicePool:
    """Store the keys and values of some tokens in one layer.

    Args:
        pool: the last version.
        layer: which layer; may be traced.
        k: [T, K, D]; keys.
        v: [T, K, D]; values.
        pages: int32[T]; a token on a page outside 0 .. N - 1 is not stored.
        offsets: int32[T]; place inside the page. No two tokens may have the same.

    Returns:
        The next version.

    Raises:
        ValueError: a shape is wrong.
        TypeError: a dtype is wrong.
        JaxRuntimeError: when the program runs: two tokens have one place, there is no
            such layer, or the version is not the last.

    Example:
        >>> import jax.numpy as jnp
        >>> from ascend_bridge import ascend
        >>> pool = ascend.open_pool(
        ...     num_layers=1, num_pages=4, page_size=16, num_kv_heads=1, head_dim=16,
        ...     num_heads=2, max_slots=2, pages_per_slot=2
        ... )
        >>> kv = jnp.ones((1, 1, 16), jnp.float16)
        >>> pool = ascend.write_kv(pool, 0, kv, kv, jnp.array([3]), jnp.array([5]))
        >>> int(pool.version)
        1
        >>> ascend.close_pool(pool)
    """
    _check_tokens(pool, k, v, pages, offsets)
    (version,) = _call(
        pool,
        "pool_write_kv",
        [],
        _layer(layer),
        k,
        v,
        int32("pages", pages),
        int32("offsets", offsets),
    )
    return dataclasses.replace(pool, version=version)


def copy_pages(
    pool: DevicePool, src_pages: jax.Array, dst_pages: jax.Array
) -> DevicePool:
    """Copy whole pages in every layer: the copies that `append` plans.

    Args:
        pool: the last version.
        src_pages: int32[M], M at most `max_slots`.
        dst_pages: int32[M]; a pair with a page outside 0 .. N - 1 copies nothing.

    Returns:
        The next version.

    Raises:
        ValueError: a shape is wrong.
        JaxRuntimeError: when the program runs: a page is a source and a destination, or
            twice a destination, there are more copies than `max_slots`, or the version
            is not the last.

    Example:
        >>> import jax.numpy as jnp
        >>> from ascend_bridge import ascend
        >>> pool = ascend.open_pool(
        ...     num_layers=1, num_pages=4, page_size=16, num_kv_heads=1, head_dim=16,
        ...     num_heads=2, max_slots=2, pages_per_slot=2
        ... )
        >>> kv = jnp.ones((1, 1, 16), jnp.float16)
        >>> pool = ascend.write_kv(pool, 0, kv, kv, jnp.array([3]), jnp.array([0]))
        >>> pool = ascend.copy_pages(pool, jnp.array([3]), jnp.array([1]))
        >>> pool, k, _ = ascend.read_pages(pool, 0, jnp.array([1, 2]))
        >>> k[:, 0, 0, 0].tolist()
        [1.0, 0.0]
        >>> ascend.close_pool(pool)
    """
    if src_pages.ndim != 1 or src_pages.shape != dst_pages.shape:
        raise ValueError(
            f"src_pages {src_pages.shape} and dst_pages {dst_pages.shape} must be "
            "vectors of one length"
        )
    (version,) = _call(
        pool,
        "pool_copy_pages",
        [],
        int32("src_pages", src_pages),
        int32("dst_pages", dst_pages),
    )
    return dataclasses.replace(pool, version=version)


def paged_attention(
    pool: DevicePool,
    layer: int | jax.Array,
    q: jax.Array,
    page_indices: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
) -> tuple[DevicePool, Any]:
    """Attend with one query per slot.

    Args:
        pool: any version of which the pages that are seen are whole.
        layer: which layer; may be traced.
        q: queries, [S, H, D].
        page_indices: int32[S, P], pages of a layer; entries past the last live token
            may hold anything.
        seq_lens: int32[S].
        scale: factor of the scores; None means 1/sqrt(D).
        window: how many keys a token sees, itself included; None means all.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`; None means no cap.
        return_lse: also return the logarithm of the softmax denominator.

    Returns:
        `(pool, out)`, the same version and [S, H, D]; with `return_lse`
        `(pool, (out, lse))`, lse float32[S, H]. A slot without keys, or with a page
        that does not exist among them, is exactly 0, with -inf.

    Raises:
        ValueError: a shape or an option is wrong.
        TypeError: a dtype is wrong, or an option is traced.
        JaxRuntimeError: when the program runs: there is no such layer, or a page that
            is seen was written after this version.

    Example:
        >>> import jax.numpy as jnp
        >>> from ascend_bridge import ascend
        >>> pool = ascend.open_pool(
        ...     num_layers=1, num_pages=4, page_size=16, num_kv_heads=1, head_dim=16,
        ...     num_heads=2, max_slots=2, pages_per_slot=2
        ... )
        >>> kv = jnp.ones((1, 1, 16), jnp.float16)
        >>> pool = ascend.write_kv(pool, 0, kv, kv, jnp.array([3]), jnp.array([0]))
        >>> q = jnp.ones((2, 2, 16), jnp.float16)
        >>> table, lens = jnp.array([[3, 4], [0, 4]]), jnp.array([1, 0])
        >>> pool, out = ascend.paged_attention(pool, 0, q, table, lens)
        >>> out[:, 0, 0].tolist()  # one value of 1; an empty slot
        [1.0, 0.0]
        >>> ascend.close_pool(pool)
    """
    _check_queries(pool, q, page_indices, seq_lens)
    version, out, lse = _call(
        pool,
        "pool_paged_attention",
        _attention_results(q),
        _layer(layer),
        q,
        int32("page_indices", page_indices),
        int32("seq_lens", seq_lens),
        **_options(pool, scale, window, soft_cap),
    )
    pool = dataclasses.replace(pool, version=version)
    return pool, (out, lse) if return_lse else out


def attend(
    pool: DevicePool,
    layer: int | jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: jax.Array,
    offsets: jax.Array,
    page_indices: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[DevicePool, jax.Array]:
    """Store this step's keys and values in one layer, then attend to all.

    The same as `write_kv` and `paged_attention`, in one exchange with the device: one
    copy there, one copy back, one wait. This is what a decode step should call.

    Args:
        pool: the last version.
        layer: as in `paged_attention`; so are the others.
        q: see there.
        k: as in `write_kv`.
        v: see there.
        pages: see there.
        offsets: see there.
        page_indices: as in `paged_attention`.
        seq_lens: see there; the new tokens included.
        scale: see there.
        window: see there.
        soft_cap: see there.

    Returns:
        `(pool, out)`: the next version, and [S, H, D].

    Raises:
        ValueError: as `write_kv` and `paged_attention`.
        TypeError: likewise.
        JaxRuntimeError: likewise.

    Example:
        >>> import jax.numpy as jnp
        >>> from ascend_bridge import ascend
        >>> pool = ascend.open_pool(
        ...     num_layers=1, num_pages=4, page_size=16, num_kv_heads=1, head_dim=16,
        ...     num_heads=2, max_slots=2, pages_per_slot=2
        ... )
        >>> kv = jnp.ones((1, 1, 16), jnp.float16)
        >>> q, at = jnp.ones((1, 2, 16), jnp.float16), (jnp.array([3]), jnp.array([0]))
        >>> table, lens = jnp.array([[3, 4]]), jnp.array([1])
        >>> pool, out = ascend.attend(pool, 0, q, kv, kv * 7, *at, table, lens)
        >>> float(out[0, 0, 0]), int(pool.version)
        (7.0, 1)
        >>> ascend.close_pool(pool)
    """
    _check_tokens(pool, k, v, pages, offsets)
    _check_queries(pool, q, page_indices, seq_lens)
    version, out, _ = _call(
        pool,
        "pool_attend",
        _attention_results(q),
        _layer(layer),
        q,
        k,
        v,
        int32("pages", pages),
        int32("offsets", offsets),
        int32("page_indices", page_indices),
        int32("seq_lens", seq_lens),
        **_options(pool, scale, window, soft_cap),
    )
    return dataclasses.replace(pool, version=version), out


def read_pages(
    pool: DevicePool, layer: int | jax.Array, pages: jax.Array
) -> tuple[DevicePool, jax.Array, jax.Array]:
    """Bring whole pages of one layer to the host.

    Args:
        pool: any version of which these pages are whole.
        layer: which layer; may be traced.
        pages: int32[M]; a page outside 0 .. N - 1 gives zeros.

    Returns:
        `(pool, k, v)`, k and v of shape [M, page_size, K, D].

    Raises:
        ValueError: a shape is wrong.
        JaxRuntimeError: when the program runs: there is no such layer, or one of the
            pages was written after this version.

    Example:
        >>> import jax.numpy as jnp
        >>> from ascend_bridge import ascend
        >>> pool = ascend.open_pool(
        ...     num_layers=1, num_pages=4, page_size=16, num_kv_heads=1, head_dim=16,
        ...     num_heads=2, max_slots=2, pages_per_slot=2
        ... )
        >>> pool, k, v = ascend.read_pages(pool, 0, jnp.array([2, 4]))
        >>> k.shape
        (2, 16, 1, 16)
        >>> ascend.close_pool(pool)
    """
    shape = pool.shape
    if pages.ndim != 1:
        raise ValueError(f"pages must be a vector, got shape {pages.shape}")
    held = jax.ShapeDtypeStruct(
        (pages.shape[0], shape.page_size, shape.num_kv_heads, shape.head_dim),
        jnp.dtype(shape.dtype),
    )
    version, k, v = _call(
        pool,
        "pool_read_pages",
        [held, held],
        _layer(layer),
        int32("pages", pages),
    )
    return dataclasses.replace(pool, version=version), k, v


# --- checks and the call -------------------------------------------------------------


def _check_tokens(
    pool: DevicePool, k: jax.Array, v: jax.Array, pages: jax.Array, offsets: jax.Array
) -> None:
    """Raise unless new keys and values fit the pool."""
    shape = pool.shape
    want = (*pages.shape, shape.num_kv_heads, shape.head_dim)
    for name, array in (("k", k), ("v", v)):
        if array.shape != want:
            raise ValueError(f"{name} must have shape {want}, got {array.shape}")
        _check_dtype(pool, name, array)
    if pages.ndim != 1 or offsets.shape != pages.shape:
        raise ValueError(
            f"pages {pages.shape} and offsets {offsets.shape} must be vectors of one "
            "length"
        )
    if pages.shape[0] > shape.max_tokens:
        raise ValueError(
            f"{pages.shape[0]} tokens are more than max_tokens={shape.max_tokens}"
        )


def _check_queries(
    pool: DevicePool, q: jax.Array, page_indices: jax.Array, seq_lens: jax.Array
) -> None:
    """Raise unless queries and a table fit the pool."""
    shape = pool.shape
    slots = q.shape[0]
    if q.shape != (slots, shape.num_heads, shape.head_dim):
        raise ValueError(
            f"q must have shape [slots, {shape.num_heads}, {shape.head_dim}], "
            f"got {q.shape}"
        )
    _check_dtype(pool, "q", q)
    if page_indices.ndim != 2 or page_indices.shape[0] != slots:
        raise ValueError(
            f"page_indices must be [{slots}, pages_per_slot], got {page_indices.shape}"
        )
    if seq_lens.shape != (slots,):
        raise ValueError(f"seq_lens must have shape ({slots},), got {seq_lens.shape}")
    if not 1 <= slots <= shape.max_slots:
        raise ValueError(f"{slots} slots are not in 1 .. max_slots={shape.max_slots}")
    if not 1 <= page_indices.shape[1] <= shape.pages_per_slot:
        raise ValueError(
            f"{page_indices.shape[1]} columns of page_indices are not in 1 .. "
            f"pages_per_slot={shape.pages_per_slot}"
        )


def _check_dtype(pool: DevicePool, name: str, array: jax.Array) -> None:
    if array.dtype.name != pool.shape.dtype:
        raise TypeError(
            f"{name} must have the pool's dtype {pool.shape.dtype}, got {array.dtype}"
        )


def _options(
    pool: DevicePool, scale: float | None, window: int | None, soft_cap: float | None
) -> dict[str, Any]:
    """Return the attributes of an attention call."""
    return dict(
        scale=np.float32(checked_scale(scale, pool.shape.head_dim)),
        window=np.int64(checked_window(window)),
        soft_cap=np.float32(checked_soft_cap(soft_cap)),
    )


def _layer(layer: int | jax.Array) -> jax.Array:
    """Return the number of a layer as an operand."""
    number = int32("layer", layer)
    if number.ndim:
        raise ValueError(f"layer must be one number, got shape {number.shape}")
    return number


def _attention_results(q: jax.Array) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct(q.shape[:2], jnp.float32),
    ]


def _call(
    pool: DevicePool,
    name: str,
    results: list[jax.ShapeDtypeStruct],
    *arrays: jax.Array,
    **attributes: Any,
) -> list[jax.Array]:
    """Run a custom call on a pool; the first result is the version after it."""
    _device_library.require()
    handle, version = on_one_device(pool.handle, pool.version, arrays)
    run = jax.ffi.ffi_call(
        _library.PREFIX + name,
        [jax.ShapeDtypeStruct((), jnp.int32), *results],
        # Neither dropped nor merged: the pages are no operand that XLA could compare.
        has_side_effect=True,
    )
    return list(run(handle, version, *arrays, **attributes))
