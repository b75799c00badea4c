"""500 random rollouts against a plain Python simulation of the same policy."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout_model import MODEL, VOCAB, Simulation

import pagedjax as pj
from pagedjax import Status, _rollout

BATCH, LENGTH, NEW = 6, 10, 14
# (num_samples, num_slots, page_size, num_pages, prefix_entries, chunk_size, runs)
SIZES = {
    "queue": (1, 5, 3, 20, 6, 5, 150),
    "samples": (3, 4, 2, 40, 9, 7, 150),
    "no-index": (2, 5, 4, 16, 0, 16, 100),
    "tiny-pages": (2, 6, 1, 60, 64, 4, 100),
}


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(size, num_places, params, prompts, lens, budgets, eos, flags, num_free):
    """Runs a rollout in a pool of which only `num_free` pages are to be had."""
    num_samples, num_slots, page_size, num_pages, entries, chunk_size, _ = size

    def part_of_a_table(**sizes):
        table = pj.init_page_table(**sizes)
        taken = jnp.arange(num_pages, dtype=jnp.int32) < num_pages - num_free
        return dataclasses.replace(
            table, num_free=num_free, refcounts=taken.astype(jnp.int32)
        )

    with mock.patch.object(_rollout, "init_page_table", part_of_a_table):
        return _rollout.run_rollout(
            params,
            pj.init_sampling(),
            prompts,
            lens,
            jax.random.key(0),
            jnp.arange(BATCH, dtype=jnp.int32),
            eos,
            budgets,
            *flags,
            model=MODEL,
            max_new_tokens=NEW,
            num_samples=num_samples,
            num_slots=num_slots,
            page_size=page_size,
            num_pages=num_pages,
            pages_per_slot=-(-(LENGTH + NEW) // page_size),
            chunk_size=chunk_size,
            prefix_entries=entries,
        )


@jax.jit
def forget_prefixes(index, table):
    return pj.evict_prefixes(index, table, index.num_entries)


def draw_scenario(rng, size):
    """Draws prompts, some of which start alike, budgets, end token and pool size."""
    num_pages, page_size = size[3], size[2]
    starts = [rng.integers(0, VOCAB, LENGTH).tolist() for _ in range(2)]
    prompts = []
    for _ in range(BATCH):
        length = int(rng.integers(0 if rng.random() < 0.1 else 1, LENGTH + 1))
        common = int(rng.integers(0, LENGTH + 1)) if rng.random() < 0.6 else 0
        tail = rng.integers(0, VOCAB, LENGTH).tolist()
        prompts.append((starts[int(rng.integers(2))][:common] + tail)[:length])
    least = int(rng.choice([0, 1, 8]))
    budgets = rng.integers(least, NEW + 1, BATCH).tolist()
    params = rng.integers(1, 50, 2).tolist()
    # From so few pages that some requests do not fit to enough for several.
    one = -(-(LENGTH + NEW) // page_size)
    num_free = int(rng.integers(one // 2, min(3 * one, num_pages) + 1))
    eos = int(rng.integers(0, VOCAB)) if rng.random() < 0.3 else -1
    flags = tuple(bool(rng.integers(2)) for _ in range(2))
    return prompts, budgets, params, eos, flags, num_free


@pytest.mark.parametrize("name", SIZES)
def test_rollouts_follow_the_simulation(name):
    size = SIZES[name]
    num_samples, num_slots, page_size, num_pages, entries, chunk_size, runs = size
    places = max(chunk_size, num_slots)
    rng = np.random.default_rng(list(name.encode()))
    seen = dict(preempted=0, unservable=0, stopped=0, found=0, forked=0, copied=0)
    for i in range(runs):
        prompts, budgets, params, eos, flags, num_free = draw_scenario(rng, size)
        tokens = np.zeros((BATCH, LENGTH), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        lens = np.array([len(prompt) for prompt in prompts], np.int32)
        state = run(
            size,
            places,
            np.array(params, np.int32),
            tokens,
            lens,
            np.array(budgets, np.int32),
            np.array([eos], np.int32),
            flags,
            np.int32(num_free),
        )
        want = Simulation(
            prompts,
            budgets,
            params,
            eos,
            *flags,
            num_samples=num_samples,
            num_slots=num_slots,
            num_pages=num_free,
            page_size=page_size,
            prefix_entries=entries,
            num_places=places,
        ).run()
        got = jax.tree.map(np.asarray, state)
        assert [Status(int(s)).name for s in got.status] == want.status, i
        lengths = got.lengths.tolist()
        produced = [t[:n].tolist() for t, n in zip(got.tokens, lengths, strict=True)]
        assert produced == want.out, i
        stats = got.stats
        for kind in ("admitted_at", "ended_at", "preemptions"):
            assert getattr(stats, kind).tolist() == getattr(want, kind), (i, kind)
        counts = (
            *(stats.num_steps, stats.num_mixed_steps, stats.num_preemptions),
            *(stats.tokens_fed, stats.tokens_forked, stats.tokens_found),
            *(stats.pages_copied, stats.pages_used - (num_pages - num_free)),
        )
        assert list(map(int, counts)) == [
            *(want.steps, want.mixed, sum(want.preemptions)),
            *(want.fed, want.forked, want.found),
            *(want.copied, want.peak if want.steps else num_free - num_pages),
        ], i
        if flags[0]:  # reserve
            assert not want.preemptions or not any(want.preemptions), i
        audit(state, num_free)
        seen["preempted"] += sum(want.preemptions)
        seen["unservable"] += want.status.count("UNSERVABLE")
        seen["stopped"] += want.status.count("STOP")
        seen["found"] += want.found
        seen["forked"] += want.forked
        seen["copied"] += want.copied
    # The scenarios reach what they are for.
    assert seen["preempted"] > 0 and seen["unservable"] > 0 and seen["stopped"] > 0
    assert (seen["found"] > 0) == (entries > 0)
    assert (seen["forked"] > 0) == (num_samples > 1)
    assert (seen["copied"] > 0) == (num_samples > 1 and page_size > 1)


def audit(state, num_free):
    """Checks the table at the end, and that all is free once prefixes are dropped."""
    table, index = state.table, state.index
    pins = np.zeros((table.num_pages,), np.int32)
    pins[: table.num_pages - num_free] = 1
    if index is not None:
        own = np.asarray(pj.prefix_pins(index, table))
        assert pj.check_integrity(table, pins + own) == []
        index, table = forget_prefixes(index, table)
        assert not np.any(index.serials)
    assert pj.check_integrity(table, pins) == []
    assert int(table.num_free) == num_free
    assert not np.any(state.waiting) and not np.any(state.live)
