"""The page table as plain lists: what the jitted one has to agree with.

Pages here have names of their own, in the order they are taken; which physical page
that is in the real table is not the model's business. Written from the docstrings,
token by token and page by page, with nothing in common with the product's code.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class TableModel:
    """Rows of pages, the tokens each slot has written, and what each page holds."""

    num_pages: int
    page_size: int
    max_slots: int
    pages_per_slot: int
    pins: Counter[int] = field(default_factory=Counter)
    written: int = 0  # tokens so far: the next token's value

    def __post_init__(self) -> None:
        self.rows: list[list[int]] = [[] for _ in range(self.max_slots)]
        self.tokens: list[list[int]] = [[] for _ in range(self.max_slots)]
        self.contents: dict[int, dict[int, int]] = {}  # page -> offset -> token
        self.names = itertools.count()

    def owners(self) -> Counter[int]:
        """Counts the owners of every page in use."""
        return Counter(itertools.chain(*self.rows)) + self.pins

    def num_free(self) -> int:
        return self.num_pages - len(self.owners())

    def append(
        self,
        num_tokens: Sequence[int],
        max_tokens: int | None = None,
        priority: Sequence[int] | None = None,
    ) -> tuple[list[bool], dict[int, tuple[int, int]]]:
        """Adds tokens; gives who was served, and slot -> (copied from, copied to)."""
        slots, size = range(self.max_slots), self.page_size
        room = self.pages_per_slot * size
        bound = room if max_tokens is None else max_tokens
        held = [len(tokens) for tokens in self.tokens]
        fits = [0 <= n <= bound and held[s] + n <= room for s, n in zip_(num_tokens)]
        owners, free = self.owners(), self.num_free()
        order = sorted(
            slots, key=lambda s: (priority or num_tokens)[s] * bool(priority)
        )
        # The slots about to write to a page that has other owners, and that page.
        shared = {
            s: self.rows[s][-1]
            for s in slots
            if fits[s] and num_tokens[s] and held[s] % size
            if owners[self.rows[s][-1]] > 1
        }
        writers = Counter(shared.values())
        groups = [page for page in writers if writers[page] == owners[page]]

        def serve(kept: tuple[int, ...]) -> tuple[list[bool], set[int]]:
            keepers = {min(s for s in shared if shared[s] == page) for page in kept}
            reach, ok = 0, [False] * self.max_slots
            for s in order:
                if fits[s]:
                    need = -(-(held[s] + num_tokens[s]) // size) - len(self.rows[s])
                    need += s in shared and s not in keepers
                    reach += need
                    ok[s] = need == 0 or reach <= free
            return ok, keepers

        # A page has a keeper iff its owners are all served: the most such pages.
        for count in range(len(groups), -1, -1):
            for kept in itertools.combinations(groups, count):
                ok, keepers = serve(kept)
                served = {
                    p for p in groups if all(ok[s] for s in writers_of(shared, p))
                }
                if served == set(kept):
                    return ok, self._write(num_tokens, ok, set(shared) - keepers)
        raise AssertionError("no keeper at all is always consistent")

    def _write(
        self, num_tokens: Sequence[int], ok: list[bool], copiers: set[int]
    ) -> dict[int, tuple[int, int]]:
        plan = {}
        for s in range(self.max_slots):
            if ok[s] and s in copiers:
                old, new = self.rows[s][-1], next(self.names)
                plan[s], self.rows[s][-1] = (old, new), new
                self.contents[new] = dict(self.contents[old])
        for s, n in zip_(num_tokens):
            for _ in range(n if ok[s] else 0):
                cell, offset = divmod(len(self.tokens[s]), self.page_size)
                if cell == len(self.rows[s]):
                    self.rows[s].append(next(self.names))
                    self.contents[self.rows[s][cell]] = {}
                self.contents[self.rows[s][cell]][offset] = self.written
                self.tokens[s].append(self.written)
                self.written += 1
        return plan

    def fork(self, entries: Sequence[tuple[int, int, int]]) -> None:
        """Entries of (src, dst, tokens); one that is not possible does nothing."""
        was = [
            (list(row), list(kept))
            for row, kept in zip(self.rows, self.tokens, strict=True)
        ]
        named: set[int] = set()
        for src, dst, n in entries:
            real = 0 <= src < self.max_slots and 0 <= dst < self.max_slots
            if real and dst not in named and not was[dst][1]:
                self._set(dst, *was[src], max(n, 0))
            named.add(dst)

    def reorder(self, parents: Sequence[int]) -> None:
        was = [
            (list(row), list(kept))
            for row, kept in zip(self.rows, self.tokens, strict=True)
        ]
        for s, parent in zip_(parents):
            if 0 <= parent < self.max_slots:
                self._set(s, *was[parent], len(was[parent][1]))

    def truncate(self, new_lens: Sequence[int]) -> None:
        for s, n in zip_(new_lens):
            self._set(s, self.rows[s], self.tokens[s], max(n, 0))

    def attach(self, slot: int, pages: Sequence[int]) -> None:
        held = [self.contents[p][o] for p in pages for o in range(self.page_size)]
        self._set(slot, list(pages), held, len(held))

    def _set(self, slot: int, row: list[int], tokens: list[int], n: int) -> None:
        self.tokens[slot] = tokens[:n]
        self.rows[slot] = row[: -(-len(self.tokens[slot]) // self.page_size)]


def zip_(values: Sequence[int]) -> Sequence[tuple[int, int]]:
    return list(enumerate(values))


def writers_of(shared: dict[int, int], page: int) -> list[int]:
    return [s for s in shared if shared[s] == page]
