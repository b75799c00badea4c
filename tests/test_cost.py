"""What a step may cost: nothing that grows with the number of pages.

Read from the compiled programs, not from a clock: the bytes of temporaries, the
buffers that alias, the copies in the HLO, the number of traces.
"""

import re
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pagedjax as pj

SLOTS, WIDTH, SIZE = 4, 8, 4
SMALL, LARGE = 4099, 65537  # pages; sizes that nothing else in a program has
LAYERS = 3

Inputs = dict[str, jax.Array]
Verb = Callable[[pj.PageTable, Inputs], Any]

VERBS: dict[str, Verb] = {
    "append": lambda table, x: pj.append(table, x["counts"]),
    "append_by_priority": lambda table, x: pj.append(
        table, x["counts"], max_tokens=1, priority=x["parents"]
    ),
    "fork": lambda table, x: pj.fork(table, x["src"], x["dst"], x["some"]),
    "reorder": lambda table, x: pj.reorder(table, x["parents"]),
    "truncate": lambda table, x: pj.truncate(table, x["counts"]),
    "free": lambda table, x: pj.free(table, x["mask"]),
    "attach": lambda table, x: pj.attach(table, x["slot"], x["pages"], x["num"]),
    "inc_ref": lambda table, x: pj.inc_ref(table, x["pages"]),
    "dec_ref": lambda table, x: pj.dec_ref(table, x["pages"]),
}


def inputs(num_pages: int) -> Inputs:
    """Something harmless for every verb, as arguments: constants would fold."""
    return {
        "counts": jnp.ones((SLOTS,), jnp.int32),
        "parents": jnp.arange(SLOTS, dtype=jnp.int32),
        "mask": jnp.array([True, True, False, False]),
        "src": jnp.array([1, 3], jnp.int32),
        "dst": jnp.array([0, SLOTS], jnp.int32),
        "some": jnp.array([1, 2], jnp.int32),
        "slot": jnp.int32(2),
        "num": jnp.int32(0),
        "pages": jnp.full((WIDTH,), num_pages, jnp.int32),
    }


def new_table(num_pages: int) -> pj.PageTable:
    return pj.init_page_table(
        num_pages=num_pages, page_size=SIZE, max_slots=SLOTS, pages_per_slot=WIDTH
    )


def new_pool(num_pages: int) -> pj.KVPool:
    return pj.init_kv_pool(
        num_layers=LAYERS,
        num_pages=num_pages,
        page_size=SIZE,
        num_kv_heads=1,
        head_dim=8,
    )


def all_verbs(table: pj.PageTable, x: Inputs) -> pj.PageTable:
    """One verb after another, so that each must leave the buffers to the next."""
    for verb in VERBS.values():
        out = verb(table, x)
        table = out if isinstance(out, pj.PageTable) else out[0]
    return table


def in_scan(table: pj.PageTable, x: Inputs) -> pj.PageTable:
    return lax.scan(lambda t, _: (all_verbs(t, x), None), table, length=3)[0]


def in_while(table: pj.PageTable, x: Inputs) -> pj.PageTable:
    return lax.while_loop(
        lambda t: jnp.sum(t.seq_lens) < 9, lambda t: all_verbs(t, x), table
    )


PROGRAMS: dict[str, Verb] = VERBS | {
    "scan": in_scan,
    "while_loop": in_while,
}


def compile_donated(program: Callable[..., Any], *arguments: Any) -> Any:
    return jax.jit(program, donate_argnums=0).lower(*arguments).compile()


def num_bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def copies_of(rows: int, compiled: Any) -> list[str]:
    """Finds HLO copies, synchronous or not, of an array with so many rows."""
    lines = compiled.as_text().splitlines()
    shape = re.compile(rf"= \(?\w+\[{rows}[,\]].*\bcopy(-start)?\(")
    return [line for line in lines if shape.search(line)]


def assert_in_place(compiled: Any, held: Any, rows: int) -> None:
    assert copies_of(rows, compiled) == []
    assert compiled.memory_analysis().alias_size_in_bytes == num_bytes(held)


def assert_no_host_calls(compiled: Any) -> None:
    text = compiled.as_text()
    assert not re.search(r"callback|outfeed|infeed|\bsend\(|\brecv\(", text)
    assert re.findall(r'custom_call_target="(\w+)"', text) == []


def test_the_search_for_copies_finds_one() -> None:
    def copying(table: pj.PageTable) -> Any:
        moved = table.refcounts.at[0].add(1)  # while the old one is still wanted
        return moved, table.refcounts * 2, table.refcounts

    assert copies_of(SMALL, compile_donated(copying, new_table(SMALL)))


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_verb_copies_or_makes_an_array_of_all_pages(name: str) -> None:
    temporaries = []
    for num_pages in (SMALL, LARGE):
        table = new_table(num_pages)
        compiled = compile_donated(PROGRAMS[name], table, inputs(num_pages))
        assert_in_place(compiled, table, num_pages)
        assert_no_host_calls(compiled)
        temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
    assert temporaries[0] == temporaries[1]


@pytest.mark.core
@pytest.mark.parametrize("name", VERBS)
def test_a_verb_is_traced_once_per_shape(name: str) -> None:
    step = jax.jit(chex.assert_max_traces(VERBS[name], n=1))
    table = pj.append(new_table(32), jnp.array([0, 5, 0, 2]))[0]
    for shift in range(2):
        x = inputs(32)
        step(table, x | {"counts": x["counts"] + shift})
        table = pj.truncate(table, jnp.array([0, 4, 0, 2]))


@pytest.mark.core
@pytest.mark.parametrize("name", VERBS)
def test_an_old_table_stays_a_valid_snapshot(name: str) -> None:
    table = pj.append(new_table(32), jnp.array([0, 5, 0, 2]))[0]
    pages = table.page_indices[1]
    x = inputs(32) | {"pages": jnp.where(pages == 32, 0, pages), "num": jnp.int32(4)}
    x["parents"] = jnp.array([1, 1, 3, 3])
    before = jax.device_get(table)
    after = jax.jit(VERBS[name])(table, x)
    chex.assert_trees_all_equal(jax.device_get(table), before)
    after = after if isinstance(after, pj.PageTable) else after[0]
    assert any(
        not np.array_equal(new, old)
        for new, old in zip(
            jax.tree.leaves(after), jax.tree.leaves(before), strict=True
        )
    )


def write(pool: pj.KVPool, x: Inputs) -> pj.KVPool:
    kv = jnp.ones((SLOTS, 1, 8)) * x["counts"][:, None, None]
    return pj.write_kv(pool, x["num"], kv, kv, x["pages"][:SLOTS], x["counts"])


def copy(pool: pj.KVPool, x: Inputs) -> pj.KVPool:
    return pj.copy_pages(pool, pj.CopyPlan(x["parents"], x["pages"][:SLOTS]))


def scrub(pool: pj.KVPool, x: Inputs) -> pj.KVPool:
    return pj.scrub_pages(pool, x["pages"])


def step(state: tuple[pj.PageTable, pj.KVPool], x: Inputs) -> tuple[Any, jax.Array]:
    """A decode step: room, copies, then every layer writes and attends."""
    table, pool = state
    table, plan, ok = pj.append(table, x["counts"], max_tokens=1)
    pool = pj.copy_pages(pool, plan)
    batch = pj.pack_decode(table, ok)

    def layer(pool: pj.KVPool, index: jax.Array) -> tuple[pj.KVPool, jax.Array]:
        q = jnp.ones((SLOTS, 2, 8))
        return pj.attend(pool, index, q, q[:, :1], q[:, 1:], batch)

    pool, out = lax.scan(layer, pool, jnp.arange(LAYERS, dtype=jnp.int32))
    return (table, pool), out.sum()


def steps(state: tuple[pj.PageTable, pj.KVPool], x: Inputs) -> tuple[Any, jax.Array]:
    return lax.scan(lambda carry, _: step(carry, x), state, length=3)


@pytest.mark.parametrize("program", [write, copy, scrub])
def test_the_pool_is_changed_in_place(program: Callable[..., pj.KVPool]) -> None:
    temporaries = []
    for num_pages in (SMALL, LARGE):
        pool = new_pool(num_pages)
        compiled = compile_donated(program, pool, inputs(num_pages))
        assert_in_place(compiled, pool, LAYERS * num_pages)
        assert_no_host_calls(compiled)
        temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
        held = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pool)]
        after = compiled(pool, inputs(num_pages))
        assert [p.unsafe_buffer_pointer() for p in jax.tree.leaves(after)] == held
        assert pool.k_pages.is_deleted()
    assert temporaries[0] == temporaries[1]


@pytest.mark.parametrize("program", [step, steps])
def test_a_step_over_all_layers_is_in_place(program: Callable[..., Any]) -> None:
    temporaries = []
    for num_pages in (SMALL, LARGE):
        state = (new_table(num_pages), new_pool(num_pages))
        compiled = compile_donated(program, state, inputs(num_pages))
        assert_in_place(compiled, state, LAYERS * num_pages)
        assert copies_of(num_pages, compiled) == []
        temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
        held = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
        after, _ = compiled(state, inputs(num_pages))
        assert [p.unsafe_buffer_pointer() for p in jax.tree.leaves(after)] == held
    assert temporaries[0] == temporaries[1]


@pytest.mark.core
def count_up(
    params: Any, pool: pj.KVPool, tokens: jax.Array, batch: Any, rows: Any
) -> tuple[pj.KVPool, jax.Array]:
    """A model that says the number after the last, and uses its pool."""
    del params
    q = jnp.ones((tokens.shape[0], 2, 8))
    pool, out = pj.attend(pool, 0, q, q[:, :1], q[:, :1], batch)
    scores = jax.nn.one_hot(tokens + 1, 16) + 0.0 * jnp.sum(out, (1, 2))[:, None]
    return pool, scores if rows is None else scores[rows]


@pytest.mark.parametrize(
    "mode",
    [{}, {"num_samples": 2}, {"num_beams": 2}, {"draft": pj.PromptLookup()}],
    ids=["greedy", "samples", "beams", "drafts"],
)
def test_a_generation_step_copies_no_array_of_all_pages(mode: dict[str, Any]) -> None:
    model = pj.PagedModel(
        count_up, num_layers=1, num_kv_heads=1, head_dim=8, vocab_size=16
    )

    def start() -> pj.GenerationState:
        return pj.start_generation(
            model,
            None,
            jnp.array([[1, 2, 3]]),
            max_new_tokens=8,
            num_pages=LARGE,
            page_size=SIZE,
            **mode,
        )

    def go_on(state: pj.GenerationState) -> pj.GenerationState:
        return pj.continue_generation(model, None, state, num_steps=4)

    compiled = compile_donated(go_on, jax.eval_shape(start))
    assert not copies_of(LARGE, compiled)


def test_an_old_pool_stays_a_valid_snapshot() -> None:
    pool = new_pool(8)
    x = inputs(8) | {"pages": jnp.arange(WIDTH, dtype=jnp.int32)}
    after = jax.jit(write)(pool, x)
    assert not np.asarray(pool.k_pages).any()
    assert np.asarray(after.k_pages).sum() == SLOTS * 8


@pytest.mark.core
@pytest.mark.parametrize("program", [write, copy, scrub])
def test_a_pool_function_is_traced_once(program: Callable[..., pj.KVPool]) -> None:
    run = jax.jit(chex.assert_max_traces(program, n=1))
    for num in range(3):
        run(new_pool(8), inputs(8) | {"num": jnp.int32(num)})
