"""Attention that reads a shared prefix once for a group of rows.

Samples of one prompt, or beams, name the same pages first. A device that attends row
by row reads those pages once per row; here they are read once per group::

    row 0   7 2 | 5         prefix 7 2   one call, a row whose "heads" are those of
    row 1   7 2 | 9 4                    both rows
    group of 2:             suffix 5     an ordinary call on what is left
                                   9 4   and the two are merged by their lse

The decomposition is that of https://arxiv.org/abs/2402.05099.
"""

from typing import Any, cast

import jax
import jax.numpy as jnp

from pagedjax import _page_ops as ops
from pagedjax._attention import merge_attention, paged_attention
from pagedjax._attention_call import as_arrays, describe_call


def shared_prefix_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_indices: jax.Array,
    seq_lens: jax.Array,
    *,
    group_size: int,
    scale: float | None = None,
    soft_cap: float | None = None,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Decode like `paged_attention`, the pages a group shares being read once.

    The groups are runs of `group_size` slots: slots 0 to `group_size - 1`, and so on,
    which is how `generate` lays out the samples of a prompt. What a group shares is
    found in the table, so the result is that of `paged_attention` up to rounding,
    whatever is shared. The "host" implementation finds shared pages by itself, in any
    slots.

    Args:
      q: queries, float[S, H, D].
      k_pages: keys, float[pages, page_size, K, D].
      v_pages: values, as `k_pages`.
      page_indices: int32[S, P], as in `paged_attention`.
      seq_lens: int32[S], tokens held by each slot; slots of length 0 take no part.
      group_size: slots in a group; a divisor of S.
      scale: as in `paged_attention`; so are the arguments below. There is no window:
        it would hide the prefix.
      soft_cap: see there.
      k_scales: see there.
      v_scales: see there.
      return_lse: see there.
      implementation: see there.

    Returns:
      As `paged_attention`.

    Raises:
      ValueError: `group_size` does not divide the slots, or as `paged_attention`.
      TypeError: as `paged_attention`.
      NotImplementedError: as `paged_attention`; a group counts as one row with
        `group_size * H` heads.

    Example:
      >>> import jax.numpy as jnp, pagedjax as pj
      >>> pages = jnp.arange(8.0).reshape(4, 2, 1, 1)  # page p holds 2p, 2p + 1
      >>> table = jnp.array([[3, 0], [3, 1]])  # both rows begin with page 3
      >>> out = pj.shared_prefix_attention(
      ...     jnp.zeros((2, 1, 1)), pages, pages, table, jnp.array([3, 3]), group_size=2
      ... )
      >>> [round(x, 4) for x in out.ravel().tolist()]  # means of 6 7 0 and 6 7 2
      [4.3333, 5.0]
    """
    group_size = ops.as_size("group_size", group_size)
    q, k_pages, v_pages, page_indices, seq_lens, _, k_scales, v_scales = as_arrays(
        (q, k_pages, v_pages, page_indices, seq_lens, None, k_scales, v_scales)
    )
    call = describe_call(
        *(q, k_pages, v_pages, page_indices, seq_lens, None),
        scale=scale,
        window=None,
        soft_cap=soft_cap,
        k_scales=k_scales,
        v_scales=v_scales,
    )
    if call.num_slots % group_size:
        raise ValueError(
            f"group_size {group_size} does not divide the {call.num_slots} slots of q"
        )
    num_slots, num_heads, head_dim = q.shape
    page_size, num_kv_heads = call.page_size, call.num_kv_heads
    options: dict[str, Any] = dict(
        scale=scale,
        soft_cap=soft_cap,
        k_scales=k_scales,
        v_scales=v_scales,
        return_lse=True,
        implementation=implementation,
    )
    tables, shared = _shared_pages(page_indices, seq_lens, group_size, page_size)
    # [groups, rows, K, G, D] -> one row per group, with rows * G heads per kv head.
    heads = (num_kv_heads, call.group_size)
    grouped = q.reshape(-1, group_size, *heads, head_dim).swapaxes(1, 2)
    pair = paged_attention(
        grouped.reshape(tables.shape[0], -1, head_dim),
        *(k_pages, v_pages, tables, shared * page_size),
        **options,
    )

    out, lse = cast(tuple[jax.Array, jax.Array], pair)

    def by_row(values: jax.Array, *width: int) -> jax.Array:
        values = values.reshape(-1, num_kv_heads, group_size, heads[1], *width)
        return values.swapaxes(1, 2).reshape(num_slots, num_heads, *width)

    live = (seq_lens > 0)[:, None]
    prefix = (
        jnp.where(live[..., None], by_row(out, head_dim), 0),
        jnp.where(live, by_row(lse), -jnp.inf),
    )
    skip = jnp.repeat(shared, group_size, total_repeat_length=num_slots)
    columns = jnp.arange(page_indices.shape[1], dtype=jnp.int32)[None] + skip[:, None]
    own = jnp.take_along_axis(page_indices, columns, axis=1, mode="clip")
    own_lens = jnp.maximum(seq_lens - skip * page_size, 0)
    suffix = paged_attention(q, k_pages, v_pages, own, own_lens, **options)
    out, lse = merge_attention(prefix, cast(tuple[jax.Array, jax.Array], suffix))
    return (out, lse) if return_lse else out


def _shared_pages(
    page_indices: jax.Array, seq_lens: jax.Array, group_size: int, page_size: int
) -> tuple[jax.Array, jax.Array]:
    """Finds the leading full pages that all live slots of each group name.

    Returns:
      `(tables, counts)`: int32[groups, P], the row of a live slot of each group, and
      int32[groups], how many of its pages are shared; 0 for a slot on its own.
    """
    rows = page_indices.reshape(-1, group_size, page_indices.shape[1])
    lens = seq_lens.reshape(-1, group_size)
    first = jnp.argmax(lens > 0, axis=1)[:, None, None]
    table = jnp.take_along_axis(rows, first, axis=1)
    full = lens // page_size
    column = jnp.arange(rows.shape[2], dtype=jnp.int32)[None, None]
    same = (rows == table) & (column < full[..., None])
    leading = jnp.sum(jnp.cumprod(same.astype(jnp.int32), axis=2), axis=2)
    leading = jnp.where(lens > 0, leading, rows.shape[2])
    several = jnp.sum((lens > 0).astype(jnp.int32), axis=1) > 1
    return table[:, 0], jnp.where(several, jnp.min(leading, axis=1), 0)
