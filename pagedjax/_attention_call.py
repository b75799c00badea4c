"""One attention call, described without its numbers.

Every implementation answers `supports(call)` from this description alone, so the
choice of an implementation is made at trace time, from shapes, dtypes and options.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ascend_bridge import _options

_FLOATS = ("float32", "bfloat16", "float16")
_QUANTISED = ("int8", "float8_e4m3fn")


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """Shapes, dtypes and options of one attention call; static and hashable.

    Attributes:
        num_tokens: query rows, T (decode: equal to `num_slots`).
        num_slots: rows of the page table, S.
        pages_per_slot: columns of the page table, P.
        num_pages: pages of the pool that is read (all layers of a flat pool).
        page_size: tokens in a page.
        num_heads: query heads, H.
        num_kv_heads: key and value heads, K; a divisor of H.
        head_dim: D.
        q_dtype: dtype name of the queries and of the result.
        kv_dtype: dtype name of the pages.
        ragged: whether `cu_q_lens` gives the rows of each slot (else one each).
        scale: factor of the scores.
        window: keys a token sees, itself included; None for all.
        soft_cap: cap of the scores, `cap * tanh(score / cap)`; None for none.
        has_scales: whether quantisation scales come with the pages.
    """

    num_tokens: int
    num_slots: int
    pages_per_slot: int
    num_pages: int
    page_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_dtype: str
    kv_dtype: str
    ragged: bool
    scale: float
    window: int | None
    soft_cap: float | None
    has_scales: bool

    @property
    def group_size(self) -> int:
        """Query heads per kv head, G."""
        return self.num_heads // self.num_kv_heads


# q, k_pages, v_pages, page_indices, seq_lens, cu_q_lens, k_scales, v_scales
Arrays = tuple[
    jax.Array,
    jax.Array,
    jax.Array,
    jax.Array,
    jax.Array,
    jax.Array | None,
    jax.Array | None,
    jax.Array | None,
]


def as_arrays(arrays: Arrays) -> Arrays:
    """Return the arguments as JAX arrays, ids and lengths int32; NumPy is welcome.

    An id that does not fit int32 becomes one that names no page.

    Raises:
        TypeError: ids or lengths are no integers.
    """
    q, k_pages, v_pages, page_indices, seq_lens, cu_q_lens, *scales = arrays
    q, k_pages, v_pages, k_scales, v_scales = jax.tree.map(
        _strong, (q, k_pages, v_pages, *scales)
    )
    return (
        q,
        k_pages,
        v_pages,
        _options.int32("page_indices", page_indices),
        _options.int32("seq_lens", seq_lens),
        None if cu_q_lens is None else _options.int32("cu_q_lens", cu_q_lens),
        k_scales,
        v_scales,
    )


def describe_call(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_indices: jax.Array,
    seq_lens: jax.Array,
    cu_q_lens: jax.Array | None,
    *,
    scale: float | None,
    window: int | None,
    soft_cap: float | None,
    k_scales: jax.Array | None,
    v_scales: jax.Array | None,
) -> AttentionCall:
    """Check the arguments of an attention function and describe the call.

    Args:
        q: as in the attention function; so are the others, as `as_arrays` returns
            them.
        k_pages: see there.
        v_pages: see there.
        page_indices: see there.
        seq_lens: see there.
        cu_q_lens: None for decode.
        scale: see there.
        window: see there.
        soft_cap: see there.
        k_scales: see there.
        v_scales: see there.

    Returns:
        The description.

    Raises:
        ValueError: a shape or an option is wrong; the message names the argument
            and the numbers.
        TypeError: a dtype is wrong.
    """
    _check_rank("q", q, "[tokens, heads, head_dim]", 3)
    _check_rank("k_pages", k_pages, "[pages, page_size, kv_heads, head_dim]", 4)
    _check_rank("page_indices", page_indices, "[slots, pages_per_slot]", 2)
    _check_rank("seq_lens", seq_lens, "[slots]", 1)
    if k_pages.shape != v_pages.shape:
        raise ValueError(
            f"v_pages must have the shape of k_pages, {k_pages.shape}, "
            f"got {v_pages.shape}"
        )
    if k_pages.dtype != v_pages.dtype:
        raise TypeError(
            f"v_pages must have the dtype of k_pages, {k_pages.dtype}, "
            f"got {v_pages.dtype}"
        )
    num_tokens, num_heads, head_dim = q.shape
    num_pages, page_size, num_kv_heads, kv_head_dim = k_pages.shape
    num_slots, pages_per_slot = page_indices.shape
    for name, size in (
        ("rows of q", num_tokens),
        ("heads of q", num_heads),
        ("head_dim of q", head_dim),
        ("pages of k_pages", num_pages),
        ("page_size of k_pages", page_size),
        ("kv heads of k_pages", num_kv_heads),
        ("pages per slot of page_indices", pages_per_slot),
        ("slots of page_indices", num_slots),
    ):
        if size < 1:
            raise ValueError(f"the number of {name} must be at least 1, got {size}")
    if kv_head_dim != head_dim:
        raise ValueError(
            f"k_pages has head_dim {kv_head_dim} but q has head_dim {head_dim}"
        )
    if num_heads % num_kv_heads:
        raise ValueError(
            f"the {num_heads} heads of q must be a multiple of the "
            f"{num_kv_heads} kv heads of k_pages"
        )
    if seq_lens.shape[0] != num_slots:
        raise ValueError(
            f"seq_lens has {seq_lens.shape[0]} slots but page_indices has {num_slots}"
        )
    if cu_q_lens is None:
        if num_tokens != num_slots:
            raise ValueError(
                f"decode takes one query per slot: q has {num_tokens} rows but "
                f"page_indices has {num_slots} slots"
            )
    else:
        if cu_q_lens.shape != (num_slots + 1,):
            raise ValueError(
                f"cu_q_lens must have shape ({num_slots + 1},), one more than the "
                f"{num_slots} slots of page_indices, got {cu_q_lens.shape}"
            )
    scales_shape = (num_pages, page_size, num_kv_heads)
    _check_dtypes(q, k_pages, scales_shape, k_scales, v_scales)
    return AttentionCall(
        num_tokens=num_tokens,
        num_slots=num_slots,
        pages_per_slot=pages_per_slot,
        num_pages=num_pages,
        page_size=page_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        q_dtype=jnp.dtype(q.dtype).name,
        kv_dtype=jnp.dtype(k_pages.dtype).name,
        ragged=cu_q_lens is not None,
        scale=_options.checked_scale(scale, head_dim),
        window=_checked_window(window, pages_per_slot * page_size),
        soft_cap=_options.checked_soft_cap(soft_cap) or None,
        has_scales=k_scales is not None,
    )


def _strong(values: Any) -> jax.Array:
    """Return an array whose dtype is its own: a weak one would compile anew."""
    array = jnp.asarray(values)
    return lax.convert_element_type(array, array.dtype)


def _check_rank(name: str, array: Any, meaning: str, rank: int) -> None:
    """Raise unless `array` has `rank` axes."""
    if array.ndim != rank:
        raise ValueError(f"{name} must be {meaning}, got shape {array.shape}")


def _check_dtypes(
    q: jax.Array,
    k_pages: jax.Array,
    scales_shape: tuple[int, int, int],
    k_scales: jax.Array | None,
    v_scales: jax.Array | None,
) -> None:
    """Raise unless queries, pages and scales go together."""
    q_dtype, kv_dtype = jnp.dtype(q.dtype).name, jnp.dtype(k_pages.dtype).name
    if q_dtype not in _FLOATS:
        raise TypeError(f"q must be one of {', '.join(_FLOATS)}, got {q_dtype}")
    if kv_dtype not in _FLOATS + _QUANTISED:
        raise TypeError(
            f"k_pages must be one of {', '.join(_FLOATS + _QUANTISED)}, got {kv_dtype}"
        )
    if (k_scales is None) != (v_scales is None):
        raise ValueError("k_scales and v_scales must be given together")
    if (kv_dtype in _QUANTISED) != (k_scales is not None):
        raise ValueError(
            f"k_scales and v_scales go with {' and '.join(_QUANTISED)} pages and "
            f"with no others: k_pages is {kv_dtype} and the scales are "
            f"{'missing' if k_scales is None else 'given'}"
        )
    for name, scales in (("k_scales", k_scales), ("v_scales", v_scales)):
        if scales is None:
            continue
        if scales.shape != scales_shape:
            raise ValueError(
                f"{name} must have shape {scales_shape}, one scale per token and kv "
                f"head, got {scales.shape}"
            )
        if scales.dtype != jnp.float32:
            raise TypeError(f"{name} must be float32, got {scales.dtype}")


def _checked_window(window: int | None, capacity: int) -> int | None:
    """Return the window as a Python int of at least 1; None if it hides nothing."""
    keys = _options.checked_window(window)
    return keys if 0 < keys < capacity else None
