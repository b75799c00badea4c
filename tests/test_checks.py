"""Tracing without the checks of a caller's bugs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import pagedjax as pj

pytestmark = pytest.mark.core

SLOTS, SIZE = 2, 4


def forward(
    params: Any, pool: pj.KVPool, tokens: jax.Array, batch: pj.RaggedBatch, rows: Any
) -> tuple[pj.KVPool, jax.Array]:
    """A model that says the number after the last, and uses its pool."""
    del params
    x = jnp.ones((tokens.shape[0], 1, 8))
    pool, out = pj.attend(pool, 0, x, x, x, batch)
    scores = jax.nn.one_hot(tokens + 1, 16) + 0.0 * jnp.sum(out, (1, 2))[:, None]
    return pool, scores if rows is None else scores[rows]


MODEL = pj.PagedModel(forward, num_layers=1, num_kv_heads=1, head_dim=8, vocab_size=16)


def step(table: pj.PageTable, pool: pj.KVPool, counts: jax.Array) -> Any:
    table, plan, ok = pj.append(table, counts, max_tokens=1)
    pool = pj.copy_pages(pool, plan)
    batch = pj.pack_decode(table, ok & (counts > 0))
    return table, *forward(None, pool, table.seq_lens, batch, None)


def write(prompts: jax.Array) -> jax.Array:
    return pj.generate(MODEL, None, prompts, max_new_tokens=3, page_size=SIZE).tokens


def step_arguments() -> tuple[pj.PageTable, pj.KVPool, jax.Array]:
    table = pj.init_page_table(
        num_pages=8, page_size=SIZE, max_slots=SLOTS, pages_per_slot=2
    )
    pool = pj.init_kv_pool(
        num_layers=1, num_pages=8, page_size=SIZE, num_kv_heads=1, head_dim=8
    )
    return table, pool, jnp.array([1, 1], jnp.int32)


PROGRAMS = {
    "a decode step": (step, step_arguments),
    "generate": (write, lambda: (jnp.array([[3, 4]], jnp.int32),)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_without_checks_have_no_effects_and_the_same_results(
    name: str,
) -> None:
    """An effect is what keeps `jax.export` from serialising a program."""
    program, arguments = PROGRAMS[name]
    compiled = jax.jit(program)
    want = compiled(*arguments())
    assert jax.make_jaxpr(program)(*arguments()).effects
    with pj.without_checks():
        assert not jax.make_jaxpr(program)(*arguments()).effects
        got = compiled(*arguments())
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_checks_are_on_again_afterwards() -> None:
    table, _, _ = step_arguments()
    append = jax.jit(checkify.checkify(pj.append, errors=checkify.user_checks))
    bad = jnp.array([-4, 0], jnp.int32)
    with pj.without_checks():
        append(table, bad)[0].throw()
    with pytest.raises(checkify.JaxRuntimeError, match="num_tokens of slot 0 is -4"):
        append(table, bad)[0].throw()
