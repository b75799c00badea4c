"""How full a table is, and how to make it larger or smaller."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax import _page_ops as ops
from pagedjax._page_table import PageTable


def num_free_pages(table: PageTable) -> jax.Array:
    """Counts the free pages, int32[]. The number outlives the table if that is donated.

    Example:
      >>> import pagedjax as pj
      >>> int(pj.num_free_pages(pj.init_page_table(
      ...     num_pages=8, page_size=4, max_slots=2, pages_per_slot=4)))
      8
    """
    return jnp.copy(table.num_free)


def num_used_pages(table: PageTable) -> jax.Array:
    """Counts the pages that have an owner, int32[].

    Example:
      >>> import pagedjax as pj
      >>> int(pj.num_used_pages(pj.init_page_table(
      ...     num_pages=8, page_size=4, max_slots=2, pages_per_slot=4)))
      0
    """
    return table.num_pages - table.num_free


def utilization(table: PageTable) -> jax.Array:
    """Computes tokens held / token places in used pages, float32[] in [0, 1].

    A token that several slots share is one token. A page that is only pinned
    counts as full (`attach` adopts full pages only). 1 for a table without used
    pages: nothing is wasted. Reads every page, unlike the verbs.

    Example:
      >>> import jax.numpy as jnp, pagedjax as pj
      >>> table = pj.init_page_table(
      ...     num_pages=8, page_size=4, max_slots=1, pages_per_slot=4
      ... )
      >>> table, _, _ = pj.append(table, jnp.array([6]))
      >>> float(pj.utilization(table))
      0.75
    """
    size = table.page_size
    starts = jnp.arange(table.pages_per_slot, dtype=jnp.int32)[None, :] * size
    held = jnp.clip(table.seq_lens[:, None] - starts, 0, size)
    tokens = jnp.full_like(table.refcounts, -1)
    tokens = tokens.at[table.page_indices].max(held, mode="drop")
    tokens = jnp.where(tokens < 0, jnp.where(table.refcounts > 0, size, 0), tokens)
    places = num_used_pages(table).astype(jnp.float32) * size
    total = jnp.sum(tokens.astype(jnp.float32))
    return jnp.where(places > 0, total / jnp.maximum(places, 1), 1.0)


def grow(table: PageTable, num_pages: int) -> PageTable:
    """Adds free pages. Page ids do not change. Not for use inside jit.

    Args:
      table: the table.
      num_pages: the new total, at least the present one.

    Returns:
      The larger table; the old free pages are still handed out first.

    Raises:
      ValueError: `num_pages` is no whole number, is smaller than the table, or does
        not fit int32.

    Example:
      >>> import pagedjax as pj
      >>> table = pj.init_page_table(
      ...     num_pages=2, page_size=4, max_slots=1, pages_per_slot=4
      ... )
      >>> int(pj.num_free_pages(pj.grow(table, 5)))
      5
    """
    old = table.num_pages
    num_pages = ops.as_size("num_pages", num_pages)
    if num_pages < old:
        raise ValueError(f"grow: num_pages={num_pages} is below the present {old}")
    if num_pages * table.page_size >= ops.INT32_MAX:
        raise ValueError(f"grow: num_pages={num_pages} does not fit int32")
    fresh = jnp.arange(num_pages - 1, old - 1, -1, dtype=jnp.int32)
    return dataclasses.replace(
        table,
        page_indices=jnp.where(
            table.page_indices == old, num_pages, table.page_indices
        ),
        seq_lens=jnp.copy(table.seq_lens),  # or both tables would share it
        refcounts=jnp.concatenate([table.refcounts, jnp.zeros_like(fresh)]),
        free_pages=jnp.concatenate([fresh, table.free_pages]),
        num_free=table.num_free + (num_pages - old),
    )


def shrink(table: PageTable, num_pages: int) -> PageTable:
    """Drops the pages from `num_pages` on. Page ids do not change. Host only.

    Args:
      table: the table, concrete.
      num_pages: the new total, at least 1 and at most the present one.

    Returns:
      The smaller table.

    Raises:
      ValueError: `num_pages` is no whole number or out of range, or a page to go
        has an owner.

    Example:
      >>> import pagedjax as pj
      >>> table = pj.init_page_table(
      ...     num_pages=5, page_size=4, max_slots=1, pages_per_slot=4
      ... )
      >>> int(pj.num_free_pages(pj.shrink(table, 2)))
      2
    """
    old = table.num_pages
    num_pages = ops.as_size("num_pages", num_pages)
    if num_pages > old:
        raise ValueError(f"shrink: num_pages={num_pages} is above the present {old}")
    refcounts = np.asarray(table.refcounts)
    used = np.flatnonzero(refcounts[num_pages:] != 0) + num_pages
    if used.size:
        raise ValueError(
            f"shrink: {used.size} of the pages from {num_pages} on still have an"
            f" owner, the first is page {used[0]}"
        )
    stack = np.asarray(table.free_pages)[: int(table.num_free)]
    stack = stack[stack < num_pages]
    free_pages = np.full((num_pages,), num_pages, np.int32)
    free_pages[: stack.size] = stack
    cells = np.asarray(table.page_indices)
    return dataclasses.replace(
        table,
        page_indices=jnp.asarray(np.where(cells == old, num_pages, cells)),
        seq_lens=jnp.copy(table.seq_lens),
        refcounts=jnp.asarray(refcounts[:num_pages]),
        free_pages=jnp.asarray(free_pages),
        num_free=jnp.asarray(stack.size, jnp.int32),
    )
