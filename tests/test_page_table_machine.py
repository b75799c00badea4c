"""A stateful machine: every verb, jitted, against `table_model.TableModel`.

Each token gets a value of its own, written through the pool and read back after
every step: a slot always reads its own history, whoever it shares pages with. After
every step the table agrees with the model cell by cell and count by count, and
`check_integrity` has nothing to say. PAGEDJAX_MACHINE_RUNS sets the runs per page
size.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from table_model import TableModel

import pagedjax as pj

RUNS = int(os.environ.get("PAGEDJAX_MACHINE_RUNS", "670"))
STEPS = 60
SLOTS, LAYERS = 4, 2
SMALL, LARGE = 9, 12  # pages: scarce, so that refusals are as common as service
IDS = 4  # entries of a fork, a pin, an unpin


class Machine(RuleBasedStateMachine):
    page_size: int
    pages_per_slot: int
    ways: tuple[tuple[int | None, bool], ...]  # of append: max_tokens, in an order?
    resizes: bool

    @initialize()
    def start(self) -> None:
        sizes = (SMALL, self.page_size, SLOTS, self.pages_per_slot)
        self.model = TableModel(*sizes)
        self.ids: dict[int, int] = {}  # the model's name of a page -> its id
        self.table, self.pool = _start(*sizes)
        self.check()

    @rule(
        num_tokens=st.tuples(*[st.sampled_from([0, 1, 1, 2, 3, 5, 8, -1])] * SLOTS),
        way=st.integers(0, 1),
        priority=st.tuples(*[st.integers(-1, 1)] * SLOTS),
    )
    def append(
        self, num_tokens: tuple[int, ...], way: int, priority: tuple[int, ...]
    ) -> None:
        max_tokens, ordered = self.ways[way]
        self.take(num_tokens, max_tokens, priority if ordered else None)

    @rule(num_tokens=st.tuples(*[st.integers(0, 1)] * SLOTS))
    def decode(self, num_tokens: tuple[int, ...]) -> None:
        max_tokens, ordered = self.ways[1]
        self.take(num_tokens, max_tokens, (0,) * SLOTS if ordered else None)

    def take(
        self,
        num_tokens: tuple[int, ...],
        max_tokens: int | None,
        priority: tuple[int, ...] | None,
    ) -> None:
        base = self.model.written
        self.table, self.pool, said = _append(
            self.table,
            self.pool,
            np.array(num_tokens, np.int32),
            None if priority is None else np.array(priority, np.int32),
            np.int32(base),
            max_tokens=max_tokens,
        )
        ok, copied = self.model.append(num_tokens, max_tokens, priority)
        self.check()
        null = self.model.num_pages
        ids = self.gone | self.ids
        plan = [
            [ids[page] for page in copied[s]] if s in copied else [null, null]
            for s in range(SLOTS)
        ]
        src, dst = zip(*plan, strict=True)
        assert np.asarray(said).tolist() == [list(src), list(dst), ok]

    @rule(
        entries=st.lists(
            st.tuples(
                st.integers(0, SLOTS),
                st.integers(0, SLOTS),
                st.sampled_from([99, 99, 1, 2, 4, 5, -1]),
            ),
            min_size=1,
            max_size=IDS,
        )
    )
    def fork(self, entries: list[tuple[int, int, int]]) -> None:
        self.model.fork(entries)
        entries = entries + [(0, SLOTS, 0)] * (IDS - len(entries))
        self.run(pj.fork, *np.array(entries, np.int32).T)

    @rule(parents=st.tuples(*[st.integers(-1, SLOTS)] * SLOTS))
    def reorder(self, parents: tuple[int, ...]) -> None:
        self.model.reorder(parents)
        self.run(pj.reorder, np.array(parents, np.int32))

    @rule(drops=st.tuples(*[st.sampled_from([0, 0, 1, 2, 4, 99])] * SLOTS))
    def truncate(self, drops: tuple[int, ...]) -> None:
        lens = [len(t) - d for t, d in zip(self.model.tokens, drops, strict=True)]
        self.model.truncate(lens)
        self.run(pj.truncate, np.array(lens, np.int32))

    @rule(mask=st.tuples(*[st.booleans()] * SLOTS))
    def free(self, mask: tuple[bool, ...]) -> None:
        kept = zip(self.model.tokens, mask, strict=True)
        self.model.truncate([0 if gone else len(t) for t, gone in kept])
        self.run(pj.free, np.array(mask))

    @precondition(lambda self: self.full_pages() and not all(self.model.tokens))
    @rule(data=st.data())
    def attach(self, data: st.DataObject) -> None:
        empty = [s for s in range(SLOTS) if not self.model.tokens[s]]
        slot = data.draw(st.sampled_from(empty))
        pages = data.draw(
            st.lists(
                st.sampled_from(self.full_pages()),
                min_size=1,
                max_size=self.pages_per_slot,
            )
        )
        self.model.attach(slot, pages)
        row = np.full((self.pages_per_slot,), -7, np.int32)
        row[: len(pages)] = [self.ids[p] for p in pages]
        self.run(pj.attach, np.int32(slot), row, np.int32(len(pages) * self.page_size))

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        live = st.lists(st.sampled_from(sorted(self.ids)), min_size=1, max_size=IDS)
        pages = data.draw(live)
        self.model.pins.update(pages)
        self.run(pj.inc_ref, self.named(pages))

    @precondition(lambda self: self.model.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pins = sorted(self.model.pins.elements())
        first = data.draw(st.integers(0, len(pins) - 1))
        pages = pins[first : first + data.draw(st.integers(1, IDS))]
        named = self.named(pages)
        self.model.pins = self.model.pins - type(self.model.pins)(pages)
        self.run(pj.dec_ref, named)

    @precondition(lambda self: self.resizes and self.model.written % 8 == 3)
    @rule()
    def resize(self) -> None:
        if self.model.num_pages == SMALL:
            self.table = pj.grow(self.table, LARGE)
        elif any(page >= SMALL for page in self.ids.values()):
            with pytest.raises(ValueError, match="shrink: .* still have an owner"):
                pj.shrink(self.table, SMALL)
            return
        else:
            self.table = pj.shrink(self.table, SMALL)
        self.model.num_pages = self.table.num_pages
        self.pool = pj.resize_kv_pool(self.pool, self.table.num_pages)
        self.check()

    def full_pages(self) -> list[int]:
        """Pages in use of which every place has been written."""
        held = self.model.contents
        return [page for page in self.ids if len(held[page]) == self.page_size]

    def named(self, pages: list[int]) -> np.ndarray:
        ids = np.full((IDS,), self.model.num_pages, np.int32)
        ids[: len(pages)] = [self.ids[p] for p in pages]
        return ids

    def run(self, verb: Any, *arguments: Any) -> None:
        self.table = _VERBS[verb](self.table, *arguments)
        self.check()

    def check(self) -> None:
        """Compares the whole table, and all that the pool holds, with the model."""
        model = self.model
        table, kv = _unpack(_see(self.table, self.pool), model)
        owners = model.owners()
        self.gone = {p: i for p, i in self.ids.items() if p not in owners}
        self.ids = {p: i for p, i in self.ids.items() if p in owners}
        for row, cells in zip(model.rows, table.page_indices.tolist(), strict=True):
            for page, cell in zip(row, cells, strict=False):
                self.ids.setdefault(page, cell)
            null = [model.num_pages] * (model.pages_per_slot - len(row))
            assert [self.ids[page] for page in row] + null == cells
        assert len(set(self.ids.values())) == len(self.ids)
        refcounts = [0] * model.num_pages
        pins = [0] * model.num_pages
        for page, count in owners.items():
            refcounts[self.ids[page]] = count
            pins[self.ids[page]] = model.pins[page]
        assert table.refcounts.tolist() == refcounts
        assert int(table.num_free) == model.num_free()
        assert table.seq_lens.tolist() == [len(tokens) for tokens in model.tokens]
        assert pj.check_integrity(table, np.array(pins)) == []
        want = np.zeros(kv.shape[-1:] + (SLOTS,)).T
        for slot, tokens in enumerate(model.tokens):
            want[slot, : len(tokens)] = np.array(tokens) + 1
        signs = np.array([1, -1])[:, None]
        layers = np.arange(1, LAYERS + 1)[:, None, None, None]
        assert np.array_equal(kv, layers * signs * want[:, None, :])


@jax.jit
def _see(table: pj.PageTable, pool: pj.KVPool) -> jax.Array:
    """Packs the table, and what every slot reads back, into one float32 vector."""
    layers = jnp.arange(LAYERS, dtype=jnp.int32)
    slots = jnp.arange(SLOTS, dtype=jnp.int32)

    def read(layer: jax.Array, slot: jax.Array) -> jax.Array:
        return jnp.stack(pj.gather_kv(pool, layer, table, slot))

    kv = jax.vmap(lambda layer: jax.vmap(functools.partial(read, layer))(slots))(layers)
    parts = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(table)]
    return jnp.concatenate([part.ravel() for part in [*parts, kv]])


def _unpack(seen: jax.Array, model: TableModel) -> tuple[pj.PageTable, np.ndarray]:
    """Undoes `_see`: the table with numpy arrays, and [L, S, k and v, tokens]."""
    width, pages = model.pages_per_slot, model.num_pages
    ends = np.cumsum([SLOTS * width, SLOTS, pages, pages, 1])
    *ints, kv = np.split(np.asarray(seen), ends)
    cells, seq_lens, refcounts, free_pages, num_free = (i.astype(int) for i in ints)
    table = pj.PageTable(
        cells.reshape(SLOTS, width),
        seq_lens,
        refcounts,
        free_pages,
        num_free.reshape(()),
        model.page_size,
    )
    return table, kv.reshape(LAYERS, SLOTS, 2, -1)


@functools.partial(jax.jit, static_argnums=range(4))
def _start(
    num_pages: int, page_size: int, max_slots: int, pages_per_slot: int
) -> tuple[pj.PageTable, pj.KVPool]:
    table = pj.init_page_table(
        num_pages=num_pages,
        page_size=page_size,
        max_slots=max_slots,
        pages_per_slot=pages_per_slot,
    )
    pool = pj.init_kv_pool(
        num_layers=LAYERS,
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=1,
        head_dim=1,
    )
    # What nobody has written must not be seen by anybody.
    return table, jax.tree.map(lambda held: jnp.full_like(held, jnp.nan), pool)


def _unchecked(step: Callable[..., Any]) -> Callable[..., Any]:
    """Traces without the debug checks.

    They lower to nothing outside `checkify`, but JAX dispatches a program that has
    had an effect from Python, several times slower. `test_caller_bugs` runs them.
    """

    @functools.wraps(step)
    def traced(*arguments: Any, **options: Any) -> Any:
        with pj.without_checks():
            return step(*arguments, **options)

    return traced


@functools.partial(jax.jit, static_argnames="max_tokens", donate_argnums=(0, 1))
@_unchecked
def _append(
    table: pj.PageTable,
    pool: pj.KVPool,
    num_tokens: jax.Array,
    priority: jax.Array | None,
    base: jax.Array,
    *,
    max_tokens: int | None,
) -> tuple[pj.PageTable, pj.KVPool, jax.Array]:
    """Appends, copies, writes: one whole step. Also gives (src, dst, ok) as [3, S]."""
    table, plan, ok = pj.append(
        table, num_tokens, max_tokens=max_tokens, priority=priority
    )
    pool = pj.copy_pages(pool, plan)
    taken = jnp.where(ok, num_tokens, 0)
    if max_tokens == 1:
        batch = pj.pack_decode(table, taken > 0)
        values = base + jnp.cumsum(taken) - taken
    else:
        places = SLOTS * table.pages_per_slot * table.page_size
        batch = pj.pack_ragged(table, taken, num_tokens=places)
        values = base + jnp.arange(places)
    values = (values + 1).astype(jnp.float32)[:, None, None]
    for layer in range(LAYERS):
        k = values * (layer + 1)
        pool = pj.write_kv(pool, layer, k, -k, batch.pages, batch.offsets)
    return (
        table,
        pool,
        jnp.stack([plan.src_pages, plan.dst_pages, ok.astype(jnp.int32)]),
    )


_VERBS = {
    verb: jax.jit(_unchecked(verb), donate_argnums=0)
    for verb in (
        pj.fork,
        pj.reorder,
        pj.truncate,
        pj.free,
        pj.attach,
        pj.inc_ref,
        pj.dec_ref,
    )
}


@pytest.mark.parametrize(
    ("page_size", "pages_per_slot", "ways", "resizes"),
    [
        (1, 6, ((None, False), (1, True)), False),
        (3, 4, ((None, True), (1, False)), True),
        (4, 3, ((None, False), (2, True)), False),
    ],
    ids=["page1", "page3", "page4"],
)
def test_table_and_contents_agree_with_the_model(
    page_size: int, pages_per_slot: int, ways: Any, resizes: bool
) -> None:
    chosen = dict(
        page_size=page_size, pages_per_slot=pages_per_slot, ways=ways, resizes=resizes
    )
    run_state_machine_as_test(
        type("MachineOfOneSize", (Machine,), chosen),
        settings=settings(max_examples=RUNS, stateful_step_count=STEPS),
    )
