"""Paged attention on the processor, at the speed of its memory.

The functions take and return arrays, with the signatures of `pagedjax`:

    paged_attention, ragged_paged_attention     read pages
    write_kv, copy_pages                        change pages in place when donated

Each is one XLA custom call that runs on XLA's own threads. Under `vmap` the batch is
folded into the slots, so that a batched call is again one custom call; under
`shard_map` every device calls for its own shard. Derivatives are the caller's: a
custom call has none.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ascend_bridge import _calls, _library
from ascend_bridge._memory import use_large_pages
from ascend_bridge._options import (
    checked_scale,
    checked_soft_cap,
    checked_window,
    int32,
)

__all__ = [
    "attend",
    "copy_pages",
    "paged_attention",
    "ragged_paged_attention",
    "supports",
    "usable",
    "use_large_pages",
    "write_kv",
]

_FLOATS = ("float32", "bfloat16", "float16")
_QUANTISED = ("int8", "float8_e4m3fn")


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
    return_lse: bool = False,
    share_prefixes: bool = True,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attend with one query per slot: the decode step.

    Args:
        q: queries, float[S, H, D].
        k_pages: keys, [pages, page_size, K, D]; H must be a multiple of K.
        v_pages: values, as `k_pages`.
        page_indices: int32[S, P], the physical page of each logical page. Entries past
            the last live token may hold anything.
        seq_lens: int32[S], tokens held by each slot, clipped to 0 .. P * page_size.
        scale: factor of the scores; None means 1/sqrt(D).
        window: how many keys a token sees, itself included; None means all.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`; None means no cap.
        k_scales: float32[pages, page_size, K], with int8 and float8_e4m3fn pages only.
        v_scales: as `k_scales`.
        return_lse: also return the logarithm of the softmax denominator.
        share_prefixes: read leading pages that several slots name once for all of
            them; the result is the same up to rounding.

    Returns:
        The output [S, H, D] in the dtype of `q`; with `return_lse` a pair of it and
        float32[S, H]. A slot without keys is exactly 0, with -inf; so is a slot of
        which a key it sees lies in a page outside 0 .. pages - 1.

    Raises:
        ValueError: a shape or an option is wrong.
        TypeError: a dtype is wrong.
        NotImplementedError: the library is not usable; the message says why.

    Example:
        >>> import jax.numpy as jnp
        >>> from ascend_bridge import host
        >>> pages = jnp.ones((4, 2, 1, 8))  # 4 pages of 2 tokens, one kv head
        >>> table = jnp.array([[3, 1], [0, 4]])  # 4 means: no page
        >>> out = host.paged_attention(
        ...     jnp.ones((2, 2, 8)), pages, pages * 5, table, jnp.array([3, 0])
        ... )
        >>> out[:, 0, 0].tolist()
        [5.0, 0.0]
    """
    out, lse = _attention(
        (q, k_pages, v_pages, page_indices, seq_lens),
        _scales(k_pages, k_scales, v_scales),
        ragged=False,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        share_prefixes=share_prefixes,
    )
    return (out, lse) if return_lse else out


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
    return_lse: bool = False,
    share_prefixes: bool = True,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attend with any number of queries per slot: prefill and decode mixed.

    Row i of the m rows of a slot sits at position `seq_lens[s] - m + i` and sees the
    keys up to and including that position.

    Args:
        q: queries in slot order, float[T, H, D].
        k_pages: keys, [pages, page_size, K, D].
        v_pages: values, as `k_pages`.
        page_indices: int32[S, P], as in `paged_attention`.
        seq_lens: int32[S], tokens held by each slot, these rows included.
        cu_q_lens: int32[S + 1], ascending; the rows of slot s are `cu_q_lens[s]` to
            `cu_q_lens[s + 1]`. Rows of no slot give 0.
        scale: as in `paged_attention`; so are the arguments below.
        window: see there.
        soft_cap: see there.
        k_scales: see there.
        v_scales: see there.
        return_lse: see there.
        share_prefixes: see there; concerns the slots with one row.

    Returns:
        The output [T, H, D] in the dtype of `q`; with `return_lse` a pair of it and
        float32[T, H].

    Raises:
        ValueError: a shape or an option is wrong; or, when the program runs, the
            numbers in `cu_q_lens` do not ascend within 0 .. T.
        TypeError: a dtype is wrong.
        NotImplementedError: the library is not usable; the message says why.

    Example:
        >>> import jax.numpy as jnp
        >>> from ascend_bridge import host
        >>> v_pages = jnp.arange(8.0).reshape(4, 2, 1, 1)  # page p holds 2p, 2p + 1
        >>> out = host.ragged_paged_attention(
        ...     jnp.zeros((4, 1, 1)),  # equal scores: each row averages its values
        ...     v_pages,
        ...     v_pages,
        ...     jnp.array([[1, 0], [3, 4]]),
        ...     jnp.array([2, 1]),
        ...     jnp.array([0, 2, 3]),  # two rows, one row, and one of padding
        ... )
        >>> out[:, 0, 0].tolist()  # 2, (2+3)/2, 6, padding
        [2.0, 2.5, 6.0, 0.0]
    """
    out, lse = _attention(
        (q, k_pages, v_pages, page_indices, seq_lens, cu_q_lens),
        _scales(k_pages, k_scales, v_scales),
        ragged=True,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        share_prefixes=share_prefixes,
    )
    return (out, lse) if return_lse else out


def write_kv(
    k_pages: jax.Array,
    v_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: jax.Array,
    offsets: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Store the keys and values of some tokens, in place when the pages are donated.

    Args:
        k_pages: [pages, page_size, ...]; keys, or their scales.
        v_pages: as `k_pages`.
        k: [T, ...], in the dtype of `k_pages`.
        v: as `k`.
        pages: int32[T], the page of each token; one outside 0 .. pages - 1, as NULL is,
            stores nothing.
        offsets: int32[T], the place inside the page; no two tokens may have the same.

    Returns:
        The new `(k_pages, v_pages)`.

    Raises:
        ValueError: a shape is wrong.
        TypeError: a dtype is wrong.
        NotImplementedError: the library is not usable; the message says why.

    Example:
        >>> import jax.numpy as jnp
        >>> from ascend_bridge import host
        >>> pages, kv = jnp.zeros((2, 2, 1, 4)), jnp.ones((2, 1, 4))
        >>> keys, _ = host.write_kv(
        ...     pages, pages, kv, kv, jnp.array([1, 2]), jnp.array([0, 0])
        ... )
        >>> keys.sum(axis=(1, 2, 3)).tolist()  # the second token had no page
        [0.0, 4.0]
    """
    _require_usable()
    for name, new, held in (("k", k, k_pages), ("v", v, v_pages)):
        if held.ndim < 2 or new.shape[1:] != held.shape[2:]:
            raise ValueError(
                f"{name}_pages {held.shape} and {name} {new.shape} do not go together"
            )
        if new.dtype != held.dtype:
            raise TypeError(
                f"{name} must have the dtype of its pages, {held.dtype}, "
                f"got {new.dtype}"
            )
        if pages.shape != new.shape[:1] or offsets.shape != new.shape[:1]:
            raise ValueError(
                f"pages {pages.shape} and offsets {offsets.shape} must have one entry "
                f"for each of the {new.shape[0]} tokens of {name}"
            )
    out = _calls.write(
        k_pages, v_pages, k, v, int32("pages", pages), int32("offsets", offsets)
    )
    return out[0], out[1]


def copy_pages(
    k_pages: jax.Array,
    v_pages: jax.Array,
    src_pages: jax.Array,
    dst_pages: jax.Array,
    *,
    num_layers: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Copy whole pages in every layer, in place when the pages are donated.

    Args:
        k_pages: [num_layers * pages, ...]; keys, or their scales.
        v_pages: likewise, of the same number of pages.
        src_pages: int32[M], pages of one layer to copy from.
        dst_pages: int32[M], where to; a pair with a page outside 0 .. pages - 1 copies
            nothing. No page may be both a source and a destination.
        num_layers: layers in the arrays.

    Returns:
        The new `(k_pages, v_pages)`.

    Raises:
        ValueError: a shape is wrong.
        NotImplementedError: the library is not usable; the message says why.

    Example:
        >>> import jax.numpy as jnp
        >>> from ascend_bridge import host
        >>> pages = jnp.arange(4.0).reshape(4, 1)  # 2 layers of 2 pages
        >>> keys, _ = host.copy_pages(
        ...     pages, pages, jnp.array([0]), jnp.array([1]), num_layers=2
        ... )
        >>> keys.ravel().tolist()
        [0.0, 0.0, 2.0, 2.0]
    """
    _require_usable()
    rows = k_pages.shape[0]
    if v_pages.shape[0] != rows:
        raise ValueError(f"k_pages has {rows} pages but v_pages {v_pages.shape[0]}")
    if num_layers < 1 or rows % num_layers:
        raise ValueError(
            f"k_pages has {rows} pages, which is no multiple of num_layers={num_layers}"
        )
    if src_pages.ndim != 1 or src_pages.shape != dst_pages.shape:
        raise ValueError(
            f"src_pages {src_pages.shape} and dst_pages {dst_pages.shape} must be "
            "vectors of one length"
        )
    ids = int32("src_pages", src_pages), int32("dst_pages", dst_pages)
    out = _calls.copier(num_layers)(k_pages, v_pages, *ids)
    return out[0], out[1]


def usable() -> tuple[bool, str]:
    """Return whether the library is here and fits the running jaxlib, and why not.

    The first call loads the library and registers its targets.

    Example:
        >>> from ascend_bridge import host
        >>> host.usable()[0]
        True
    """
    return _library.register()


def supports(call: Any) -> tuple[bool, str]:
    """Return whether a call can be done, and the reason if it cannot.

    Args:
        call: a description with the attributes `q_dtype`, `kv_dtype` and `has_scales`.

    Example:
        >>> from types import SimpleNamespace
        >>> from ascend_bridge import host
        >>> host.supports(
        ...     SimpleNamespace(q_dtype="float64", kv_dtype="float32", has_scales=False)
        ... )
        (False, 'queries of dtype float64 are not supported')
    """
    if call.q_dtype not in _FLOATS:
        return False, f"queries of dtype {call.q_dtype} are not supported"
    if call.kv_dtype not in _FLOATS + _QUANTISED:
        return False, f"pages of dtype {call.kv_dtype} are not supported"
    if call.has_scales != (call.kv_dtype in _QUANTISED):
        return False, f"scales go with {' and '.join(_QUANTISED)} pages, and only those"
    return True, ""


def attend(
    call: Any,
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_indices: jax.Array,
    seq_lens: jax.Array,
    cu_q_lens: jax.Array | None,
    k_scales: jax.Array | None,
    v_scales: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Return (out[T, H, D], lse[T, H]) of a described call.

    Args:
        call: a description with the attributes `scale`, `window` and `soft_cap`.
        q: queries, [T, H, D].
        k_pages: keys.
        v_pages: values.
        page_indices: int32[S, P].
        seq_lens: int32[S].
        cu_q_lens: int32[S + 1], or None for one query per slot.
        k_scales: scales of quantised keys, or None.
        v_scales: likewise.

    Example:
        >>> from types import SimpleNamespace
        >>> import jax.numpy as jnp
        >>> from ascend_bridge import host
        >>> pages = jnp.ones((1, 2, 1, 8))
        >>> table, lens = jnp.array([[0]]), jnp.array([2])
        >>> call = SimpleNamespace(scale=1.0, window=None, soft_cap=None)
        >>> q = jnp.zeros((1, 1, 8))
        >>> _, lse = host.attend(call, q, pages, pages, table, lens, None, None, None)
        >>> lse.round(3).tolist()  # log 2
        [[0.6930000185966492]]
    """
    arrays = [q, k_pages, v_pages, page_indices, seq_lens]
    return _attention(
        arrays if cu_q_lens is None else [*arrays, cu_q_lens],
        _scales(k_pages, k_scales, v_scales),
        ragged=cu_q_lens is not None,
        scale=call.scale,
        window=call.window,
        soft_cap=call.soft_cap,
        share_prefixes=True,
    )


# --- attention -----------------------------------------------------------------------


def _attention(
    arrays: Sequence[jax.Array],
    scales: Sequence[jax.Array],
    *,
    ragged: bool,
    scale: float | None,
    window: int | None,
    soft_cap: float | None,
    share_prefixes: bool,
) -> tuple[jax.Array, jax.Array]:
    """Check what jax can check, then call."""
    _require_usable()
    arrays = list(arrays)
    for i, name in enumerate(("page_indices", "seq_lens", "cu_q_lens")[: 2 + ragged]):
        arrays[3 + i] = int32(name, arrays[3 + i])
    _check_attention(arrays, ragged=ragged)
    call = _calls.attention_caller(
        ragged,
        checked_scale(scale, arrays[0].shape[-1]),
        checked_window(window),
        checked_soft_cap(soft_cap),
        share_prefixes,
    )
    out, lse = call(*arrays, *scales)
    return out, lse


def _check_attention(arrays: Sequence[jax.Array], *, ragged: bool) -> None:
    """Raise where shapes or dtypes cannot be right."""
    q, k_pages, v_pages, page_indices, seq_lens = arrays[:5]
    if q.ndim != 3 or k_pages.ndim != 4 or page_indices.ndim != 2:
        raise ValueError(
            "q must be [tokens, heads, head_dim], k_pages [pages, page_size, kv_heads, "
            f"head_dim], page_indices [slots, pages_per_slot]; got {q.shape}, "
            f"{k_pages.shape}, {page_indices.shape}"
        )
    if k_pages.shape != v_pages.shape or k_pages.dtype != v_pages.dtype:
        raise ValueError(
            f"v_pages must be like k_pages, {k_pages.dtype}{k_pages.shape}, got "
            f"{v_pages.dtype}{v_pages.shape}"
        )
    if q.shape[2] != k_pages.shape[3] or q.shape[1] % k_pages.shape[2]:
        raise ValueError(
            f"q {q.shape} must have the head_dim of k_pages {k_pages.shape} and a "
            "multiple of its kv heads"
        )
    slots = page_indices.shape[0]
    if seq_lens.shape != (slots,):
        raise ValueError(f"seq_lens must have shape ({slots},), got {seq_lens.shape}")
    if ragged and arrays[5].shape != (slots + 1,):
        raise ValueError(
            f"cu_q_lens must have shape ({slots + 1},), got {arrays[5].shape}"
        )
    if not ragged and q.shape[0] != slots:
        raise ValueError(f"q has {q.shape[0]} rows but page_indices {slots} slots")
    if q.dtype.name not in _FLOATS:
        raise TypeError(f"q must be one of {', '.join(_FLOATS)}, got {q.dtype}")
    if k_pages.dtype.name not in _FLOATS + _QUANTISED:
        raise TypeError(
            f"k_pages must be one of {', '.join(_FLOATS + _QUANTISED)}, "
            f"got {k_pages.dtype}"
        )


def _scales(
    k_pages: jax.Array, k_scales: jax.Array | None, v_scales: jax.Array | None
) -> tuple[jax.Array, ...]:
    """Return the scales as further operands: both, or none."""
    quantised = k_pages.dtype.name in _QUANTISED
    if not quantised and k_scales is None and v_scales is None:
        return ()
    if not quantised or k_scales is None or v_scales is None:
        raise ValueError(
            f"k_scales and v_scales go with {' and '.join(_QUANTISED)} pages, both, "
            f"and with no others; k_pages is {k_pages.dtype}"
        )
    for name, scales in (("k_scales", k_scales), ("v_scales", v_scales)):
        if scales.shape != k_pages.shape[:3]:
            raise ValueError(
                f"{name} must have shape {k_pages.shape[:3]}, got {scales.shape}"
            )
        if scales.dtype != jnp.float32:
            raise TypeError(f"{name} must be float32, got {scales.dtype}")
    return k_scales, v_scales


# --- helpers -------------------------------------------------------------------------


def _require_usable() -> None:
    """Raise unless the library is registered."""
    able, reason = usable()
    if not able:
        raise NotImplementedError(reason)
