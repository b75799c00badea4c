"""The page table: which physical page holds which tokens, and who owns it.

One frozen pytree and the pure functions ("verbs") that turn one table into the
next. Nothing here knows about keys and values (see `_kv_pool`) or attention. The
file is long because every change to a table is to be read in one place; half of it is
docstrings.

The table is that of an operating system: a sequence is a row of logical pages,
each cell names a physical page, and several rows may name the same one. A page
that is shared is copied only when one of its owners is about to write to it
(copy-on-write), as in PagedAttention (https://arxiv.org/abs/2309.06180)::

    fork(0 -> 1)                      append one token to slot 1

    slot 0  [ 4 ][ 7 ]                slot 0  [ 4 ][ 7 ]
               \\    \\                            \\
    slot 1  [ 4 ][ 7 ]                slot 1  [ 4 ][ 2 ]   plan: copy 7 -> 2

    refcounts  4:2  7:2               refcounts  4:2  7:1  2:1

Every verb costs what its own arguments cost, whatever the number of pages: no
verb reads or makes an array of `num_pages` elements inside a jitted, donated
program. What that takes is explained at `_page_ops.dec_ref`.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pagedjax import _checks as checks
from pagedjax import _page_ops as ops


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PageTable:
    """Who owns which page. Immutable; every verb returns a new one.

    `S` = `max_slots`, `P` = `pages_per_slot`, `N` = `num_pages`. The value `N`
    itself is the NULL page: a cell that names no page. It stays out of range
    under every index computation, so reads fill and writes drop.

    Invariants, by the numbers that `check_integrity` reports:

    1. `refcounts[p]` = the number of cells naming page `p` + the pins on it.
    2. The free ids are unique, have refcount 0, and free + used = `N`.
    3. A row of `n` tokens has exactly `ceil(n / page_size)` mapped cells, first;
       the rest of it is NULL.
    4. No page of a live row is free.
    5. Every id is in `[0, N]`.
    6. A partly filled last page is shared only until one of its owners appends.

    Attributes:
      page_indices: int32[S, P]; logical page -> physical page, NULL = `N`.
      seq_lens: int32[S]; tokens held by each slot.
      refcounts: int32[N]; owners of each page, 0 = free.
      free_pages: int32[N]; a stack: the first `num_free` entries are the free
        ids, the next one to be taken last. What lies above is meaningless.
      num_free: int32[]; free pages.
      page_size: tokens in a page (static).
    """

    page_indices: jax.Array
    seq_lens: jax.Array
    refcounts: jax.Array
    free_pages: jax.Array
    num_free: jax.Array
    page_size: int = dataclasses.field(metadata={"static": True})

    @property
    def num_pages(self) -> int:
        """Pages in the table; also the value of the NULL page."""
        return self.refcounts.shape[-1]

    @property
    def max_slots(self) -> int:
        """Rows of the table."""
        return self.page_indices.shape[-2]

    @property
    def pages_per_slot(self) -> int:
        """Cells of a row: the longest sequence, in pages."""
        return self.page_indices.shape[-1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CopyPlan:
    """Page copies that `append` asks for; run it with `copy_pages` before writing.

    Attributes:
      src_pages: int32[S]; page to copy from, NULL where slot `s` copies nothing.
      dst_pages: int32[S]; fresh page to copy to, NULL likewise.
    """

    src_pages: jax.Array
    dst_pages: jax.Array


def init_page_table(
    *, num_pages: int, page_size: int, max_slots: int, pages_per_slot: int
) -> PageTable:
    """Makes a table with every page free and every slot empty.

    Args:
      num_pages: pages in the pool, `N`.
      page_size: tokens in a page.
      max_slots: rows, `S`.
      pages_per_slot: cells of a row, `P`; a slot holds at most `P * page_size`
        tokens.

    Returns:
      The table. Its first pages are handed out in the order 0, 1, 2, ...

    Raises:
      ValueError: a size is below 1, or ids and token positions would not fit
        int32.

    Example:
      >>> import pagedjax as pj
      >>> table = pj.init_page_table(
      ...     num_pages=8, page_size=4, max_slots=2, pages_per_slot=4
      ... )
      >>> int(pj.num_free_pages(table))
      8
    """
    num_pages = ops.as_size("num_pages", num_pages)
    page_size = ops.as_size("page_size", page_size)
    max_slots = ops.as_size("max_slots", max_slots)
    pages_per_slot = ops.as_size("pages_per_slot", pages_per_slot)
    for name, product in (
        ("num_pages * page_size", num_pages * page_size),
        ("pages_per_slot * page_size", pages_per_slot * page_size),
        ("max_slots * pages_per_slot", max_slots * pages_per_slot),
    ):
        if product >= ops.INT32_MAX:
            raise ValueError(f"{name} = {product} does not fit int32")
    return PageTable(
        page_indices=jnp.full((max_slots, pages_per_slot), num_pages, jnp.int32),
        seq_lens=jnp.zeros((max_slots,), jnp.int32),
        refcounts=jnp.zeros((num_pages,), jnp.int32),
        free_pages=jnp.arange(num_pages - 1, -1, -1, dtype=jnp.int32),
        num_free=jnp.asarray(num_pages, jnp.int32),
        page_size=page_size,
    )


def append(
    table: PageTable,
    num_tokens: jax.Array,
    *,
    max_tokens: int | None = None,
    priority: jax.Array | None = None,
) -> tuple[PageTable, CopyPlan, jax.Array]:
    """Makes room for more tokens in each slot, copying shared pages on write.

    All or nothing per slot: where `ok` is False the slot, and the pages it would
    have taken, are untouched. A slot that needs pages is served iff its need and
    the needs of all before it fit in what is free, so that a large request is
    never starved by small ones behind it. A slot that needs no page is always
    served. A row that would pass `pages_per_slot` is refused and counts for
    nothing.

    A partly filled last page with several owners is not written in place: the
    slot takes a fresh page and the plan says what to copy. If every owner of the
    page is served in this same call, the lowest slot keeps it and only the others
    copy.

    Args:
      table: the table; donate it.
      num_tokens: int32[S]; tokens to add, 0 = leave the slot alone.
      max_tokens: static upper bound of every entry (decoding passes 1): the cost
        is proportional to `S` times the pages that so many tokens can need. A
        larger entry is refused. Default: whatever a row can hold.
      priority: int32[S]; serve in ascending order of this number, ties in slot
        order. Default: slot order.

    Returns:
      `(table, plan, ok)`: the new table, the page copies to run before writing,
      and bool[S], which slots were served.

    Raises:
      ValueError, TypeError: `max_tokens` is not a whole number of at least 1, or
        an array has the wrong shape or dtype (so for every verb).

    Example:
      >>> import jax.numpy as jnp, pagedjax as pj
      >>> table = pj.init_page_table(
      ...     num_pages=3, page_size=4, max_slots=2, pages_per_slot=4
      ... )
      >>> table, plan, ok = pj.append(table, jnp.array([6, 5]))
      >>> ok.tolist(), table.seq_lens.tolist()  # 2 pages, then 1 page left of 2
      ([True, False], [6, 0])
    """
    slots, width = table.max_slots, table.pages_per_slot
    size, null = table.page_size, table.num_pages
    num_tokens = ops.as_int32("num_tokens", num_tokens, (slots,))
    if priority is not None:
        priority = ops.as_int32("priority", priority, (slots,))
    bound = width * size
    ops.check_each(num_tokens >= 0, "append: num_tokens of slot {i} is {v}", num_tokens)
    if max_tokens is not None:
        max_tokens = min(ops.as_size("max_tokens", max_tokens), ops.INT32_MAX)
        bound = min(max_tokens, bound)
        ops.check_each(
            num_tokens <= max_tokens,
            f"append: num_tokens of slot {{i}} is {{v}}, over max_tokens={max_tokens}",
            num_tokens,
        )

    # Room in the row. Subtracting, not adding: a huge entry must not overflow.
    fits = (num_tokens >= 0) & (num_tokens <= bound)
    fits &= num_tokens <= width * size - table.seq_lens
    writes = fits & (num_tokens > 0)
    added = jnp.where(writes, num_tokens, 0)
    mapped = ops.num_pages_of(table.seq_lens, size)
    num_new = ops.num_pages_of(table.seq_lens + added, size) - mapped

    partial = writes & (table.seq_lens % size != 0)
    last_pages = _last_pages(table)
    owners = ops.read(table.refcounts, last_pages)
    shared = partial & (owners > 1)
    copies, ok = ops.serve(
        num_new, shared, last_pages, owners, fits, table.num_free, priority
    )

    # One contiguous run of cells per slot: the copied page first, if any.
    need = jnp.where(ok, num_new + copies, 0)
    max_cells = min(ops.num_pages_of(bound, size) + 1, width)
    nth = jnp.arange(max_cells, dtype=jnp.int32)[None, :]
    takes = nth < need[:, None]
    pages, num_free = ops.take_pages(table.free_pages, table.num_free, need, takes)
    rows = jnp.arange(slots, dtype=jnp.int32)[:, None]
    cells = jnp.where(takes, (mapped - copies)[:, None] + nth, width)
    copying = ok & (copies > 0)
    plan = CopyPlan(
        src_pages=jnp.where(copying, last_pages, null),
        dst_pages=jnp.where(copying, pages[:, 0], null),
    )
    refcounts = ops.inc_ref(table.refcounts, pages.reshape(-1), first=True)
    table = dataclasses.replace(
        table,
        page_indices=table.page_indices.at[rows, cells].set(pages, mode="drop"),
        seq_lens=table.seq_lens + jnp.where(ok, added, 0),
        # A page that is copied keeps an owner: its keeper, or one that did not write.
        refcounts=ops.dec_shared(refcounts, plan.src_pages),
        num_free=num_free,
    )
    return table, plan, ok


def fork(
    table: PageTable,
    src: jax.Array,
    dst: jax.Array,
    num_tokens: jax.Array | None = None,
) -> PageTable:
    """Lets empty slots share the pages of live ones. Takes no page, copies none.

    Args:
      table: the table; donate it.
      src: int32[F]; slots to share from. One slot may be named several times.
      dst: int32[F]; slots to fill, each empty and named once; `max_slots` for an
        entry that does nothing.
      num_tokens: int32[F]; how many leading tokens to share, at most what `src`
        holds. Default: all.

    Returns:
      The new table. An entry whose `dst` is not an empty slot, or whose `src` is
      not a slot, does nothing; `checkify` reports it.

    Example:
      >>> import jax.numpy as jnp, pagedjax as pj
      >>> table = pj.init_page_table(
      ...     num_pages=4, page_size=4, max_slots=2, pages_per_slot=4
      ... )
      >>> table, _, _ = pj.append(table, jnp.array([6, 0]))
      >>> table = pj.fork(table, jnp.array([0]), jnp.array([1]))
      >>> table, plan, _ = pj.append(table, jnp.array([0, 1]))
      >>> table.page_indices.tolist(), plan.src_pages.tolist()
      ([[0, 1, 4, 4], [0, 2, 4, 4]], [4, 1])
    """
    slots, null = table.max_slots, table.num_pages
    src = ops.as_int32("src", src, (None,))
    dst = ops.as_int32("dst", dst, src.shape)
    held = ops.read(table.seq_lens, src)
    if num_tokens is None:
        length = held
    else:
        num_tokens = ops.as_int32("num_tokens", num_tokens, src.shape)
        length = jnp.clip(num_tokens, 0, held)
    is_pad = dst == slots
    src_ok = (src >= 0) & (src < slots)
    dst_ok = (dst >= 0) & (dst < slots) & (ops.read(table.seq_lens, dst) == 0)
    dst_ok &= ops.is_first(dst, slots)
    ops.check_each(is_pad | src_ok, "fork: src slot {v} is not in the table", src)
    ops.check_each(
        is_pad | dst_ok,
        "fork: dst slot {v} is not an empty slot named once",
        dst,
    )
    if num_tokens is not None:
        ops.check_each(
            is_pad | (length == num_tokens),
            "fork: num_tokens of entry {i} is {v}, not within what src holds",
            num_tokens,
        )
    valid = src_ok & dst_ok
    cells = jnp.arange(table.pages_per_slot, dtype=jnp.int32)[None, :]
    num_shared = jnp.where(valid, ops.num_pages_of(length, table.page_size), 0)
    shares = cells < num_shared[:, None]
    rows = table.page_indices.at[src].get(mode="fill", fill_value=null)
    rows = jnp.where(shares, rows, null)
    dst = jnp.where(valid, dst, slots)
    table = dataclasses.replace(
        table,
        page_indices=table.page_indices.at[dst].set(rows, mode="drop"),
        seq_lens=table.seq_lens.at[dst].set(length, mode="drop"),
    )
    return _share(table, rows)


def reorder(table: PageTable, parents: jax.Array) -> PageTable:
    """Makes every row a copy of another row, all at once: one step of beam search.

    Only cells and refcounts move. A row that nobody names is released.

    Args:
      table: the table; donate it.
      parents: int32[S]; row `s` becomes what row `parents[s]` was. An entry out
        of range leaves its row alone; `checkify` reports it.

    Returns:
      The new table.

    Example:
      >>> import jax.numpy as jnp, pagedjax as pj
      >>> table = pj.init_page_table(
      ...     num_pages=4, page_size=4, max_slots=2, pages_per_slot=2
      ... )
      >>> table, _, _ = pj.append(table, jnp.array([5, 3]))
      >>> table = pj.reorder(table, jnp.array([0, 0]))
      >>> table.page_indices.tolist(), int(pj.num_free_pages(table))
      ([[0, 1], [0, 1]], 2)
    """
    slots, null = table.max_slots, table.num_pages
    parents = ops.as_int32("parents", parents, (slots,))
    own = jnp.arange(slots, dtype=jnp.int32)
    valid = (parents >= 0) & (parents < slots)
    ops.check_each(valid, "reorder: parent {v} of slot {i} is not a slot", parents)
    parents = jnp.where(valid, parents, own)
    moves = (parents != own)[:, None]
    old = table.page_indices
    new = old[parents]
    # Take the new owners in before the old ones leave, so that a page which only
    # changes hands is never released in between.
    table = _share(table, jnp.where(moves, new, null))
    table = _release(table, jnp.where(moves, old, null))
    return dataclasses.replace(
        table, page_indices=new, seq_lens=table.seq_lens[parents]
    )


def truncate(table: PageTable, new_lens: jax.Array) -> PageTable:
    """Rolls slots back to shorter lengths; pages wholly past the end are released.

    Args:
      table: the table; donate it.
      new_lens: int32[S]; tokens to keep. A slot that holds no more than that is
        left alone.

    Returns:
      The new table.

    Example:
      >>> import jax.numpy as jnp, pagedjax as pj
      >>> table = pj.init_page_table(
      ...     num_pages=4, page_size=4, max_slots=1, pages_per_slot=4
      ... )
      >>> table, _, _ = pj.append(table, jnp.array([9]))
      >>> table = pj.truncate(table, jnp.array([4]))
      >>> table.page_indices.tolist(), table.seq_lens.tolist()
      ([[0, 4, 4, 4]], [4])
    """
    new_lens = ops.as_int32("new_lens", new_lens, (table.max_slots,))
    ops.check_each(new_lens >= 0, "truncate: new length of slot {i} is {v}", new_lens)
    seq_lens = jnp.clip(new_lens, 0, table.seq_lens)
    cells = jnp.arange(table.pages_per_slot, dtype=jnp.int32)[None, :]
    keeps = cells < ops.num_pages_of(seq_lens, table.page_size)[:, None]
    old, null = table.page_indices, table.num_pages
    table = _release(table, jnp.where(keeps, null, old))
    return dataclasses.replace(
        table, page_indices=jnp.where(keeps, old, null), seq_lens=seq_lens
    )


def free(table: PageTable, mask: jax.Array) -> PageTable:
    """Empties slots. Pages that have another owner stay with it.

    Args:
      table: the table; donate it.
      mask: bool[S]; the slots to empty. An empty slot is a no-op.

    Returns:
      The new table.

    Example:
      >>> import jax.numpy as jnp, pagedjax as pj
      >>> table = pj.init_page_table(
      ...     num_pages=4, page_size=4, max_slots=2, pages_per_slot=2
      ... )
      >>> table, _, _ = pj.append(table, jnp.array([5, 3]))
      >>> table = pj.free(table, jnp.array([True, False]))
      >>> table.seq_lens.tolist(), int(pj.num_free_pages(table))
      ([0, 3], 3)
    """
    mask = jnp.asarray(mask)
    if mask.dtype != bool or mask.shape != (table.max_slots,):
        raise ValueError(
            f"mask must be bool[{table.max_slots}], got {mask.dtype}{mask.shape}"
        )
    return truncate(table, jnp.where(mask, 0, table.seq_lens))


def attach(
    table: PageTable, slot: jax.Array, pages: jax.Array, num_tokens: jax.Array
) -> PageTable:
    """Lets an empty slot adopt existing full pages, e.g. a prefix-cache hit.

    Args:
      table: the table; donate it.
      slot: int32[]; an empty slot.
      pages: int32[P]; page ids in logical order; entries past the last token are
        ignored.
      num_tokens: int32[]; tokens in those pages, a multiple of `page_size`.

    Returns:
      The new table. If the slot is not empty, `num_tokens` is not a multiple of
      `page_size` within the row, or one of the pages has no owner, nothing
      changes; `checkify` reports it.

    Example:
      >>> import jax.numpy as jnp, pagedjax as pj
      >>> table = pj.init_page_table(
      ...     num_pages=4, page_size=4, max_slots=2, pages_per_slot=2
      ... )
      >>> table, _, _ = pj.append(table, jnp.array([8, 0]))
      >>> table = pj.attach(
      ...     table, jnp.int32(1), table.page_indices[0], jnp.int32(4)
      ... )
      >>> table.page_indices.tolist(), table.refcounts.tolist()
      ([[0, 1], [0, 4]], [2, 1, 0, 0])
    """
    width, size, null = table.pages_per_slot, table.page_size, table.num_pages
    slot = ops.as_int32("slot", slot, ())
    num_tokens = ops.as_int32("num_tokens", num_tokens, ())
    pages = ops.as_int32("pages", pages, (width,))
    slot_ok = (slot >= 0) & (slot < table.max_slots)
    slot_ok &= ops.read(table.seq_lens, slot[None])[0] == 0
    tokens_ok = (num_tokens >= 0) & (num_tokens <= width * size)
    tokens_ok &= num_tokens % size == 0
    adopts = jnp.arange(width, dtype=jnp.int32) < num_tokens // size
    owned = ~adopts | (ops.read(table.refcounts, pages) > 0)
    checks.check(slot_ok, "attach: slot {slot} is not an empty slot", slot=slot)
    checks.check(
        tokens_ok,
        f"attach: num_tokens {{n}} is not a multiple of {size} up to {width * size}",
        n=num_tokens,
    )
    ops.check_each(owned, "attach: page {v} of cell {i} has no owner", pages)
    valid = slot_ok & tokens_ok & jnp.all(owned)
    row = jnp.where(valid & adopts, pages, null)
    slot = jnp.where(valid, slot, table.max_slots)
    table = dataclasses.replace(
        table,
        page_indices=table.page_indices.at[slot].set(row, mode="drop"),
        seq_lens=table.seq_lens.at[slot].set(num_tokens, mode="drop"),
    )
    return _share(table, row)


def inc_ref(table: PageTable, pages: jax.Array) -> PageTable:
    """Adds one owner to each page: a pin that outlives the slots.

    Args:
      table: the table; donate it.
      pages: int32[M]; page ids; NULL does nothing, an id named twice gains two
        owners.

    Returns:
      The new table. A page without any owner is free and gains none; `checkify`
      reports it.

    Example:
      >>> import jax.numpy as jnp, pagedjax as pj
      >>> table = pj.init_page_table(
      ...     num_pages=4, page_size=4, max_slots=1, pages_per_slot=2
      ... )
      >>> table, _, _ = pj.append(table, jnp.array([4]))
      >>> table = pj.inc_ref(table, jnp.array([0]))
      >>> table = pj.free(table, jnp.array([True]))
      >>> table.refcounts.tolist()
      [1, 0, 0, 0]
    """
    pages = ops.as_int32("pages", pages, (None,))
    is_null = pages == table.num_pages
    owned = ops.read(table.refcounts, pages) > 0
    ops.check_each(is_null | owned, "inc_ref: page {v} has no owner", pages)
    return _share(table, jnp.where(owned, pages, table.num_pages))


def dec_ref(table: PageTable, pages: jax.Array) -> PageTable:
    """Takes one owner from each page; a page is freed when its last one leaves.

    Args:
      table: the table; donate it.
      pages: int32[M]; page ids; NULL does nothing, an id named twice loses two
        owners and is freed once.

    Returns:
      The new table. Taking an owner away that was never there is a caller's bug,
      which `checkify` and `check_integrity` report: counts are not clamped. If it
      takes the page from a slot that still names it, no check on a count alone can
      tell, and the page may be handed out again.

    Example:
      >>> import jax.numpy as jnp, pagedjax as pj
      >>> table = pj.init_page_table(
      ...     num_pages=4, page_size=4, max_slots=1, pages_per_slot=2
      ... )
      >>> table, _, _ = pj.append(table, jnp.array([4]))
      >>> table = pj.inc_ref(table, jnp.array([0]))
      >>> table = pj.dec_ref(table, jnp.array([0]))
      >>> table.refcounts.tolist()
      [1, 0, 0, 0]
    """
    pages = ops.as_int32("pages", pages, (None,))
    valid = (pages >= 0) & (pages < table.num_pages)
    ops.check_each(
        valid | (pages == table.num_pages), "dec_ref: page {v} is not a page", pages
    )
    table = _release(table, pages)
    left = ops.read(table.refcounts, pages)
    ops.check_each(
        ~valid | (left >= 0), "dec_ref: page {v} has no owner to lose", pages
    )
    # Only checkify runs this: otherwise nothing uses it.
    cells = jnp.zeros_like(table.refcounts).at[table.page_indices].add(1, mode="drop")
    ops.check_each(
        ~valid | (left >= ops.read(cells, pages)),
        "dec_ref: page {v} has fewer owners left than cells that name it",
        pages,
    )
    return table


def translate(
    table: PageTable, slots: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Finds where tokens live.

    Args:
      table: the table.
      slots: int32[T]; the slot of each token.
      positions: int32[T]; its absolute position in the sequence.

    Returns:
      `(pages, offsets)`, int32[T] each: the physical page and the place inside
      it. A token outside its sequence, or of no slot, is on the NULL page.

    Example:
      >>> import jax.numpy as jnp, pagedjax as pj
      >>> table = pj.init_page_table(
      ...     num_pages=4, page_size=4, max_slots=1, pages_per_slot=2
      ... )
      >>> table, _, _ = pj.append(table, jnp.array([6]))
      >>> pages, offsets = pj.translate(
      ...     table, jnp.array([0, 0, 0]), jnp.array([3, 5, 6])
      ... )
      >>> pages.tolist(), offsets.tolist()
      ([0, 1, 4], [3, 1, 2])
    """
    slots = ops.as_int32("slots", slots, (None,))
    positions = ops.as_int32("positions", positions, slots.shape)
    # A negative slot would wrap; the fill of `read` is 0 tokens, so it is absent.
    held = (positions >= 0) & (positions < ops.read(table.seq_lens, slots))
    row = jnp.where(held, slots, table.max_slots)
    cell = jnp.where(held, positions // table.page_size, 0)
    pages = table.page_indices.at[row, cell].get(
        mode="fill", fill_value=table.num_pages
    )
    return pages, positions % table.page_size


def _share(table: PageTable, pages: jax.Array) -> PageTable:
    """Adds an owner to every page named, NULL aside."""
    refcounts = ops.inc_ref(table.refcounts, pages.reshape(-1))
    return dataclasses.replace(table, refcounts=refcounts)


def _release(table: PageTable, pages: jax.Array) -> PageTable:
    """Takes an owner from every page named, NULL aside, and frees the ownerless."""
    refcounts, free_pages, num_free = ops.dec_ref(
        table.refcounts, table.free_pages, table.num_free, pages.reshape(-1)
    )
    return dataclasses.replace(
        table, refcounts=refcounts, free_pages=free_pages, num_free=num_free
    )


def _last_pages(table: PageTable) -> jax.Array:
    """Finds the page of each slot's last token; NULL for an empty slot."""
    slots = jnp.arange(table.max_slots, dtype=jnp.int32)
    pages, _ = translate(table, slots, table.seq_lens - 1)
    return pages
