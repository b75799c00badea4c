"""The audit of a page table and its picture: on the host, for people and tests.

Neither function trusts the table: ids out of range, negative lengths and a wrong
`num_free` are what they are for, and are reported like any other fault. Both read
every page, so they belong in tests and at a debugging prompt, not in a step.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pagedjax._page_ops import num_pages_of
from pagedjax._page_table import PageTable

_MAX_MESSAGES = 8  # of each kind
_MAX_ROWS = 16  # slots drawn
_MAX_CELLS = 8  # pages drawn of each slot
_MARKS_PER_LINE = 64
_MAX_MARKS = 8 * _MARKS_PER_LINE


def check_integrity(table: PageTable, pins: Any = None) -> list[str]:
    """Audits a table against the numbered invariants of `PageTable`.

    Invariant 6 is about a step, not a state: any one table satisfies it.

    Args:
      table: the table, concrete; it may be corrupt in any way.
      pins: int[N]; the owners of each page that are not cells, i.e. what `inc_ref`
        added and `dec_ref` has not taken yet. Default: none anywhere.

    Returns:
      One line per fault, which starts with the number of the invariant and names
      the page and the slot; `[]` if there is none. Of each kind of fault the first
      few are listed and the rest counted.

    Raises:
      ValueError: the table is a batch of tables, or `pins` is not int[N].

    Example:
      >>> import dataclasses
      >>> import jax.numpy as jnp, pagedjax as pj
      >>> table = pj.init_page_table(
      ...     num_pages=4, page_size=4, max_slots=2, pages_per_slot=2
      ... )
      >>> table, _, _ = pj.append(table, jnp.array([5, 0]))
      >>> pj.check_integrity(table)
      []
      >>> refcounts = table.refcounts.at[1].set(2)
      >>> pj.check_integrity(dataclasses.replace(table, refcounts=refcounts))
      ['(1) page 1: refcount 2, but 1 cell (slot 0) and 0 pins name it']
    """
    host = _Host.of(table)
    if pins is None:
        counts = np.zeros_like(host.refcounts)
    else:
        counts = np.asarray(pins)
        if counts.shape != host.refcounts.shape or counts.dtype.kind not in "iu":
            raise ValueError(
                f"pins must be int[{host.null}], got {counts.dtype}{counts.shape}"
            )
    return list(_faults(host, counts.astype(np.int64)))


def describe(table: PageTable, pins: Any = None) -> str:
    """Draws a table: which page belongs to whom, what is shared, what is free.

    The picture stays small however large the table is: it shows the first live
    slots, the ends of long rows, and one mark for many pages where there are many.

    Args:
      table: the table, concrete; it may be corrupt in any way.
      pins: int[N]; as for `check_integrity`. Default: what the cells leave
        unexplained of each refcount is taken for pins, and drawn as such.

    Returns:
      The picture, ending with the faults that `check_integrity` finds.

    Raises:
      ValueError: as `check_integrity`.

    Example:
      >>> import jax.numpy as jnp, pagedjax as pj
      >>> table = pj.init_page_table(
      ...     num_pages=8, page_size=4, max_slots=4, pages_per_slot=4
      ... )
      >>> table, _, _ = pj.append(table, jnp.array([9, 0, 0, 0]))
      >>> table = pj.fork(table, jnp.array([0]), jnp.array([1]))
      >>> table, _, _ = pj.append(table, jnp.array([0, 1, 0, 0]))
      >>> table = pj.inc_ref(table, jnp.array([0]))
      >>> print(pj.describe(table))
      8 pages of 4 tokens: 4 used, 4 free, 2 shared
      slot 0: 9 tokens   [0 x3][1 x2][2 1/4]
      slot 1: 10 tokens  [0 x3][1 x2][3 2/4]
      2 of 4 slots are empty
      pinned: 0
      owners of each page, "." = free:
      0  3211....
      next free: 4 5 6 7
      no faults
    """
    host = _Host.of(table)
    spare = np.maximum(host.refcounts - host.named, 0)
    faults = check_integrity(table, spare if pins is None else pins)
    shared = np.count_nonzero(host.refcounts > 1)
    lines = [
        f"{host.null} pages of {host.size} tokens: {host.null - host.num_free} used,"
        f" {host.num_free} free, {shared} shared",
        *_draw_rows(host),
    ]
    pinned = np.flatnonzero(spare if pins is None else np.asarray(pins))
    if pinned.size:
        lines.append(f"pinned: {_some(pinned)}")
    lines += _draw_owners(host.refcounts)
    if host.stack.size:
        lines.append(f"next free: {_some(host.stack[::-1])}")
    return "\n".join([*lines, *(faults or ["no faults"])])


@dataclasses.dataclass(frozen=True)
class _Host:
    """A table as int64 numpy arrays, and what both functions derive from it."""

    cells: np.ndarray  # [S, P]
    seq_lens: np.ndarray  # [S]
    refcounts: np.ndarray  # [N]
    num_free: int
    stack: np.ndarray  # the free ids; as many as there can be of `num_free`
    size: int
    named: np.ndarray  # [N]; how many cells name each page

    @classmethod
    def of(cls, table: PageTable) -> "_Host":
        cells = np.asarray(table.page_indices).astype(np.int64)
        if cells.ndim != 2:
            raise ValueError(
                f"table must be one table, got a batch of shape {cells.shape[:-2]}"
            )
        refcounts = np.asarray(table.refcounts).astype(np.int64)
        num_free, null = int(table.num_free), refcounts.size
        depth = min(max(num_free, 0), null)
        in_range = cells[(cells >= 0) & (cells < null)]
        return cls(
            cells=cells,
            seq_lens=np.asarray(table.seq_lens).astype(np.int64),
            refcounts=refcounts,
            num_free=num_free,
            stack=np.asarray(table.free_pages).astype(np.int64)[:depth],
            size=table.page_size,
            named=np.bincount(in_range, minlength=null),
        )

    @property
    def null(self) -> int:
        return self.refcounts.size

    @property
    def num_mapped(self) -> np.ndarray:
        """Cells that each row's length asks for."""
        wanted = num_pages_of(np.maximum(self.seq_lens, 0), self.size)
        return np.minimum(wanted, self.cells.shape[1])

    def slots_of(self, page: int) -> str:
        slots = np.flatnonzero((self.cells == page).any(axis=1))
        return f"slot{'s' * (slots.size > 1)} {_some(slots, ', ')}"


def _faults(host: _Host, pins: np.ndarray) -> Iterator[str]:
    """Finds what is wrong, kind by kind, in the order of the invariants."""
    null, width = host.null, host.cells.shape[1]

    def miscounted(page: int) -> str:
        named = host.named[page]
        cells = _count(named, "cell") + (f" ({host.slots_of(page)})" if named else "")
        return (
            f"(1) page {page}: refcount {host.refcounts[page]}, but {cells}"
            f" and {_count(pins[page], 'pin')} name it"
        )

    wrong = np.flatnonzero(host.refcounts != host.named + pins)
    yield from _listed(wrong, miscounted, "(1)")

    if not 0 <= host.num_free <= null:
        yield f"(2) num_free is {host.num_free}, outside [0, {null}]"
    in_range = host.stack[(host.stack >= 0) & (host.stack < null)]
    times = np.bincount(in_range, minlength=null)
    yield from _listed(
        np.flatnonzero(times > 1),
        lambda page: f"(2) page {page}: free {times[page]} times over",
        "(2)",
    )
    yield from _listed(
        np.flatnonzero((times > 0) & (host.refcounts != 0)),
        lambda page: f"(2) page {page}: free, but refcount {host.refcounts[page]}",
        "(2)",
    )
    yield from _listed(
        np.flatnonzero((times == 0) & (host.refcounts == 0)),
        lambda page: f"(2) page {page}: refcount 0, but not among the free pages",
        "(2)",
    )

    yield from _listed(
        np.flatnonzero((host.seq_lens < 0) | (host.seq_lens > width * host.size)),
        lambda slot: (
            f"(3) slot {slot}: {host.seq_lens[slot]} tokens, outside"
            f" [0, {width * host.size}]"
        ),
        "(3)",
    )
    should_map = np.arange(width)[None, :] < host.num_mapped[:, None]
    misplaced = should_map != (host.cells != null)

    def unmapped(slot: int) -> str:
        cell = int(np.argmax(misplaced[slot]))
        page = host.cells[slot, cell]
        is_null = "is NULL" if page == null else f"names page {page}"
        return (
            f"(3) slot {slot}: {_count(host.seq_lens[slot], 'token')} need"
            f" {_count(host.num_mapped[slot], 'cell')}, but cell {cell} {is_null}"
        )

    yield from _listed(np.flatnonzero(misplaced.any(axis=1)), unmapped, "(3)")
    yield from _listed(
        np.flatnonzero((times > 0) & (host.named > 0)),
        lambda page: f"(4) page {page}: free, but {host.slots_of(page)} names it",
        "(4)",
    )

    stray = (host.cells < 0) | (host.cells > null)
    yield from _listed(
        np.flatnonzero(stray),
        lambda flat: (
            f"(5) slot {flat // width}: cell {flat % width} names page"
            f" {host.cells.flat[flat]}, outside [0, {null}]"
        ),
        "(5)",
    )
    yield from _listed(
        np.flatnonzero((host.stack < 0) | (host.stack >= null)),
        lambda place: (
            f"(5) free_pages[{place}]: page {host.stack[place]}, outside [0, {null})"
        ),
        "(5)",
    )


def _listed(where: np.ndarray, say: Callable[[int], str], number: str) -> Iterator[str]:
    """Words the first faults of a kind and counts the others."""
    yield from (say(int(place)) for place in where[:_MAX_MESSAGES])
    if where.size > _MAX_MESSAGES:
        yield f"{number} ... and {where.size - _MAX_MESSAGES} more"


def _draw_rows(host: _Host) -> list[str]:
    """Draws a line per live slot; a row with cells but no tokens counts as live."""
    live = (host.seq_lens != 0) | (host.cells != host.null).any(axis=1)
    shown = np.flatnonzero(live)[:_MAX_ROWS]
    heads = [f"slot {s}: {_count(host.seq_lens[s], 'token')}" for s in shown]
    room = max(map(len, heads), default=0)
    lines = [
        f"{head:{room}}  {_draw_row(host, slot)}"
        for head, slot in zip(heads, shown, strict=True)
    ]
    hidden = np.count_nonzero(live) - shown.size
    if hidden:
        lines.append(f"... and {_count(hidden, 'live slot')} more")
    empty = np.count_nonzero(~live)
    if empty:
        verb = "is" if empty == 1 else "are"
        lines.append(f"{empty} of {_count(live.size, 'slot')} {verb} empty")
    return lines


def _draw_row(host: _Host, slot: np.intp) -> str:
    row = host.cells[slot]
    mapped = np.flatnonzero(row != host.null)
    last = int(max(host.num_mapped[slot], mapped[-1] + 1 if mapped.size else 0))
    drawn = list(range(last))
    if last > _MAX_CELLS:
        drawn = drawn[: _MAX_CELLS // 2] + drawn[-_MAX_CELLS // 2 :]
    marks = [_draw_cell(host, slot, cell) for cell in drawn]
    if last > _MAX_CELLS:
        marks.insert(_MAX_CELLS // 2, f" ... {last - _MAX_CELLS} more ... ")
    return "".join(marks)


def _draw_cell(host: _Host, slot: np.intp, cell: int) -> str:
    page = host.cells[slot, cell]
    if page == host.null:
        return "[NULL]"
    if not 0 <= page < host.null:
        return f"[{page}?]"
    owners = host.refcounts[page]
    filled = host.seq_lens[slot] - cell * host.size
    shared = "" if owners == 1 else f" x{owners}"
    partial = f" {filled}/{host.size}" if 0 < filled < host.size else ""
    return f"[{page}{shared}{partial}]"


def _draw_owners(refcounts: np.ndarray) -> list[str]:
    """Draws one mark per page, or per block of pages where there are many."""
    block = num_pages_of(refcounts.size, _MAX_MARKS)
    if block == 1:
        title = 'owners of each page, "." = free:'
        marks = np.array(list(".123456789+!"))[np.clip(refcounts, -1, 10)]
    else:
        title = f'each mark {block} pages, "." = free, "-" = some used, "#" = used:'
        starts = np.arange(0, refcounts.size, block)
        used = refcounts != 0
        some = np.logical_or.reduceat(used, starts)
        all_of = np.logical_and.reduceat(used, starts)
        marks = np.array([".", "-", "#"])[some.astype(int) + all_of]
    room = len(str(refcounts.size))
    return [title] + [
        f"{first * block:<{room}}  {''.join(marks[first : first + _MARKS_PER_LINE])}"
        for first in range(0, marks.size, _MARKS_PER_LINE)
    ]


def _some(ids: np.ndarray, between: str = " ") -> str:
    """Lists the first few ids and counts the others."""
    text = between.join(str(i) for i in ids[:_MAX_CELLS])
    rest = ids.size - _MAX_CELLS
    return text if rest <= 0 else f"{text} ... and {rest} more"


def _count(number: Any, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
