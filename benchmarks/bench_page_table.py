"""What the page table costs, and that the cost does not grow with the pool.

A decode step's `append` for 64 slots and a `free` run inside one donated
`lax.scan`, at pool sizes from 4,096 to 8,388,608 pages; against a loop that takes
one page at a time with an argmin over all of them, the shape of the nearest prior
art (written here, not taken from it).
"""

import functools
import statistics
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp

import pagedjax as pj
from benchmarks._harness import Case, interleave, median_ratio, run_cli

SLOTS = 64
PAGE_SIZE = 16
PAGES_PER_SLOT = 16
STEPS = 400
POOLS = (4_096, 65_536, 1_048_576, 8_388_608)


def main() -> Iterator[Case]:
    """Yields the cases."""
    yield from _flat_in_pool_size()
    yield _against_serial_loop()
    yield from _compile_times()


def _flat_in_pool_size() -> Iterator[Case]:
    runs = {n: _StepLoop(n) for n in POOLS}
    seconds = interleave({str(n): run for n, run in runs.items()}, repeats=9)
    per_step = {n: statistics.median(seconds[str(n)]) / STEPS for n in POOLS}
    for n in POOLS:
        yield Case(
            f"append + free, {n:,} pages",
            per_step[n] * 1e6,
            "us/step",
            "the smallest pool",
            per_step[n] / per_step[POOLS[0]],
            dict(slots=SLOTS, page_size=PAGE_SIZE, steps=STEPS),
        )
    yield Case(
        "append + free, slowest pool / fastest pool",
        max(per_step.values()) / min(per_step.values()),
        "ratio",
        settings=dict(pools=POOLS),
    )


class _StepLoop:
    """A donated scan of decode steps: one token per slot, full slots start anew."""

    def __init__(self, num_pages: int) -> None:
        self.table = pj.init_page_table(
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            max_slots=SLOTS,
            pages_per_slot=PAGES_PER_SLOT,
        )
        # Staggered lengths, so that every step takes and gives back some pages.
        stagger = jnp.arange(SLOTS, dtype=jnp.int32) * 3 % 200
        self.table, _, _ = jax.jit(pj.append)(self.table, stagger)

        @functools.partial(jax.jit, donate_argnums=0)
        def loop(table: pj.PageTable) -> pj.PageTable:
            def step(table: pj.PageTable, _: None) -> tuple[pj.PageTable, None]:
                one = jnp.ones((SLOTS,), jnp.int32)
                table, _, _ = pj.append(table, one, max_tokens=1)
                return pj.free(table, table.seq_lens >= 240), None

            return jax.lax.scan(step, table, None, length=STEPS)[0]

        self.loop = loop

    def __call__(self) -> None:
        self.table = jax.block_until_ready(self.loop(self.table))


def _against_serial_loop(num_pages: int = 65_536, pages_each: int = 16) -> Case:
    table = pj.init_page_table(
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        max_slots=SLOTS,
        pages_per_slot=pages_each,
    )
    tokens = jnp.full((SLOTS,), pages_each * PAGE_SIZE, jnp.int32)
    append = jax.jit(lambda table: pj.append(table, tokens)[0])

    def take_one(i: jax.Array, carry: tuple) -> tuple:
        refcounts, cells = carry
        page = jnp.argmin(refcounts)  # a free page has the lowest count
        slot, cell = i // pages_each, i % pages_each
        return refcounts.at[page].add(1), cells.at[slot, cell].set(page)

    @jax.jit
    def serial(refcounts: jax.Array, cells: jax.Array) -> tuple:
        return jax.lax.fori_loop(0, SLOTS * pages_each, take_one, (refcounts, cells))

    args = (table.refcounts, table.page_indices)
    seconds = interleave(
        {
            "append": lambda: jax.block_until_ready(append(table)),
            "serial": lambda: jax.block_until_ready(serial(*args)),
        }
    )
    return Case(
        f"append {pages_each} pages to each of {SLOTS} slots, {num_pages:,} pages",
        statistics.median(seconds["append"]) * 1e6,
        "us",
        "faster than one argmin per page",
        median_ratio(seconds["serial"], seconds["append"]),
        dict(slots=SLOTS, pages_each=pages_each, num_pages=num_pages),
    )


def _compile_times() -> Iterator[Case]:
    table = pj.init_page_table(
        num_pages=65_536,
        page_size=PAGE_SIZE,
        max_slots=SLOTS,
        pages_per_slot=PAGES_PER_SLOT,
    )
    per_slot = jnp.zeros((SLOTS,), jnp.int32)
    pages = jnp.zeros((PAGES_PER_SLOT,), jnp.int32)
    few, one = per_slot[:8], per_slot[0]
    verbs = {
        "append": (pj.append, (per_slot,)),
        "append one token": (
            functools.partial(pj.append, max_tokens=1),
            (per_slot,),
        ),
        "fork": (pj.fork, (few, few)),
        "reorder": (pj.reorder, (per_slot,)),
        "truncate": (pj.truncate, (per_slot,)),
        "free": (pj.free, (per_slot > 0,)),
        "attach": (pj.attach, (one, pages, one)),
        "inc_ref": (pj.inc_ref, (pages,)),
        "dec_ref": (pj.dec_ref, (pages,)),
        "translate": (pj.translate, (few, few)),
    }
    jax.jit(lambda x: x + 1).lower(one).compile()  # the compiler's own start
    for name, (verb, args) in verbs.items():
        seconds = []
        for _ in range(3):
            jax.clear_caches()
            start = time.perf_counter()
            jax.jit(verb).lower(table, *args).compile()
            seconds.append(time.perf_counter() - start)
        yield Case(f"compile {name}", statistics.median(seconds), "s")


if __name__ == "__main__":
    run_cli(main)
