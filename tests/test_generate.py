"""Generation in one program, against a dense model and against itself."""

import dataclasses
import inspect
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_model import (
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    dense_greedy,
    dense_logprobs,
    make_params,
    paged,
    poisoned,
)
from compile_counter import count_compiled

import pagedjax as pj
from pagedjax import Status

generate_module = sys.modules["pagedjax.generate"]  # the name is also a function's
MODEL = paged()
PARAMS = make_params()
PROMPTS = [[7, 3, 9, 1, 30, 2], [11], [], [5, 6, 7, 8, 9, 10, 11, 12]]
LENGTH, NEW = 8, 10
PAGE_SIZE = 4
SAMPLED = {"temperature": 1.0, "num_samples": 3}


def pad(prompts, length=LENGTH):
    """Gives the prompts as arrays: tokens, lengths."""
    tokens = np.zeros((len(prompts), length), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return jnp.asarray(tokens), jnp.array([len(prompt) for prompt in prompts])


def run(prompts=PROMPTS, *, call=pj.generate, model=MODEL, length=LENGTH, **options):
    options = {"max_new_tokens": NEW, "page_size": PAGE_SIZE, **options}
    return call(model, PARAMS, *pad(prompts, length), **options)


def names(out):
    return [[Status(int(s)).name for s in row] for row in out.status]


def same(a, b):
    """Compares tokens, lengths and how each ended; log-probabilities to rounding."""
    assert a.tokens.tolist() == b.tokens.tolist()
    assert a.lengths.tolist() == b.lengths.tolist()
    assert names(a) == names(b)
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


@pytest.fixture(scope="module")
def greedy():
    return run()


@pytest.fixture(scope="module")
def sampled():
    return run(**SAMPLED)


# --- against the dense model --------------------------------------------------------


def test_greedy_is_that_of_the_dense_model(greedy):
    assert greedy.tokens.shape == (4, 1, NEW)
    for prompt, tokens, logprobs in zip(
        PROMPTS, greedy.tokens[:, 0], greedy.logprobs[:, 0], strict=True
    ):
        if prompt:
            assert tokens.tolist() == dense_greedy(PARAMS, prompt, NEW)
            want = dense_logprobs(PARAMS, prompt, tokens.tolist())
            np.testing.assert_allclose(logprobs, want, atol=1e-4)
    assert len({tuple(row) for row in greedy.tokens[:, 0].tolist()}) == 4


def test_forked_samples_diverge_as_separate_runs(sampled):
    """Each sample's log-probabilities are those of its own history, run densely."""
    for prompt, tokens, logprobs in zip(
        PROMPTS, sampled.tokens, sampled.logprobs, strict=True
    ):
        if prompt:
            assert len({tuple(row) for row in tokens.tolist()}) == 3
            for row, got in zip(tokens.tolist(), logprobs, strict=True):
                want = dense_logprobs(PARAMS, prompt, row)
                np.testing.assert_allclose(got, want, atol=1e-4)


def test_greedy_samples_are_identical(greedy):
    out = run(num_samples=3)
    for j in range(3):
        assert out.tokens[:, j].tolist() == greedy.tokens[:, 0].tolist()


def test_going_on_from_generated_tokens(greedy):
    """D5: what was generated is prompt now; over a page's edge and on it."""
    prompt, tokens = PROMPTS[0], greedy.tokens[0, 0].tolist()
    grown = [prompt + tokens[:k] for k in (1, 2, 3, 5, 6)]
    out = run(grown, length=16)
    for k, row in zip((1, 2, 3, 5, 6), out.tokens[:, 0].tolist(), strict=True):
        assert row[: NEW - k] == tokens[k:]


# --- what must not matter -----------------------------------------------------------


@pytest.mark.parametrize(("page_size", "chunk_size"), [(1, 5), (3, 1), (16, 5)])
def test_page_and_chunk_size(sampled, page_size, chunk_size):
    same(run(**SAMPLED, page_size=page_size, chunk_size=chunk_size), sampled)


def test_values_that_nobody_owns(sampled):
    """NaN in every free page and behind every last token, before each step."""
    same(run(**SAMPLED, model=paged(poisoned)), sampled)


def test_the_batch_and_the_place_in_it(sampled):
    """With its seed, a prompt gives the same samples alone and elsewhere."""
    for i in (0, 3):
        alone = run([PROMPTS[i]], **SAMPLED, seeds=jnp.array([i]))
        assert alone.tokens[0].tolist() == sampled.tokens[i].tolist()
    turned = run(PROMPTS[::-1], **SAMPLED, seeds=jnp.arange(4)[::-1])
    assert turned.tokens[::-1].tolist() == sampled.tokens.tolist()


def test_pieces_of_any_size(sampled):
    for num_steps in (1, 4):
        state = run(call=pj.start_generation, **SAMPLED)
        assert pj.check_integrity(state.table) == []
        while np.any(np.asarray(state.status) == Status.RUNNING):
            state = pj.continue_generation(MODEL, PARAMS, state, num_steps=num_steps)
            assert pj.check_integrity(state.table) == []
        out = pj.finish_generation(state)
        same(out, sampled)
        assert jax.tree.map(float, out.stats) == jax.tree.map(float, sampled.stats)
        assert pj.num_free_pages(state.table) == state.table.num_pages


def test_page_order(sampled):
    """F16: a pool whose free pages are in another order."""
    state = run(call=pj.start_generation, **SAMPLED)
    held = int(state.table.num_free)
    pages = state.table.free_pages
    turned = pages.at[:held].set(pages[:held][::-1])
    table = dataclasses.replace(state.table, free_pages=turned)
    state = dataclasses.replace(state, table=table)
    state = pj.continue_generation(MODEL, PARAMS, state, num_steps=NEW)
    same(pj.finish_generation(state), sampled)


# --- keys and seeds -----------------------------------------------------------------


def test_keys_and_seeds(sampled):
    """H1, H2."""
    again = run(**SAMPLED, key=jax.random.key(0))
    assert again.tokens.tolist() == sampled.tokens.tolist()
    other = run(**SAMPLED, key=jax.random.key(1))
    assert other.tokens[0].tolist() != sampled.tokens[0].tolist()
    # Equal prompts with equal seeds agree, with different ones do not.
    twins = run([PROMPTS[0]] * 4, **SAMPLED, seeds=jnp.array([5, 5, 6, 7]))
    assert twins.tokens[0].tolist() == twins.tokens[1].tolist()
    assert twins.tokens[0].tolist() != twins.tokens[2].tolist()


def test_the_key_advances_from_token_to_token():
    """H2: a model that knows nothing draws many different tokens."""

    def uniform(params, pool, tokens, batch, rows=None):
        rows = tokens if rows is None else rows
        return pool, jnp.zeros((rows.shape[0], 50))

    model = pj.PagedModel(uniform, 1, 1, 4, 50)
    out = pj.generate(model, None, jnp.array([[1]]), max_new_tokens=64, temperature=1.0)
    assert len(set(out.tokens[0, 0].tolist())) > 20


# --- how it ends --------------------------------------------------------------------


def test_statuses(greedy):
    assert names(greedy) == [["LENGTH"], ["LENGTH"], ["EMPTY"], ["LENGTH"]]
    assert greedy.lengths.tolist() == [[NEW], [NEW], [0], [NEW]]
    assert not greedy.tokens[2].any() and not greedy.logprobs[2].any()


def test_end_tokens(greedy):
    first, last = greedy.tokens[0, 0].tolist(), greedy.tokens[3, 0].tolist()
    ends = [first[4], last[0]]
    out = run(eos_ids=ends)
    for i, tokens in enumerate(greedy.tokens[:, 0].tolist()):
        if PROMPTS[i]:
            places = [place for place, token in enumerate(tokens) if token in ends]
            length = min(places, default=NEW - 1) + 1
            assert out.lengths[i].tolist() == [length]
            assert out.tokens[i, 0].tolist() == tokens[:length] + [0] * (NEW - length)
            assert names(out)[i] == ["STOP" if places else "LENGTH"]
    assert out.lengths[3].tolist() == [1]


def test_the_context_is_the_end(greedy):
    """D10: no token where there is no room, one where there is room for one."""
    model = paged(max_seq_len=9)
    lengths = {0: 3, 1: 8, 3: 1}
    out = run(model=model)
    for i, length in lengths.items():
        assert out.lengths[i].tolist() == [length]
        assert (
            out.tokens[i, 0, :length].tolist() == greedy.tokens[i, 0, :length].tolist()
        )
        assert names(out)[i] == ["LENGTH"]
    full = run(model=paged(max_seq_len=8))
    assert full.lengths[3].tolist() == [0] and names(full)[3] == ["LENGTH"]
    assert full.lengths[0].tolist() == [2]


@pytest.mark.parametrize("num_pages", range(3, 14, 2))
def test_out_of_pages_keeps_right_tokens(num_pages, sampled):
    """Whatever the pool: a prefix of the uncontended run, and the table is sound.

    The number of pages is data here, so that one program does for all: the pages
    that are missing are taken out of the free stack.
    """
    state = run(call=pj.start_generation, **SAMPLED)
    whole = run(**SAMPLED)
    spare = int(state.table.num_free) - num_pages
    # The last pages of the stack go to an owner outside.
    kept = state.table.num_free - spare
    pages = state.table.free_pages[kept : state.table.num_free]
    table = dataclasses.replace(
        state.table,
        num_free=kept,
        refcounts=state.table.refcounts.at[pages].set(1),
    )
    pins = np.zeros(table.num_pages, np.int32)
    pins[np.asarray(pages)] = 1
    assert pj.check_integrity(table, pins) == []
    state = dataclasses.replace(state, table=table)
    state = pj.continue_generation(MODEL, PARAMS, state, num_steps=NEW)
    assert pj.check_integrity(state.table, pins) == []
    assert int(state.table.num_free) == table.num_pages - len(pages)
    out = pj.finish_generation(state)
    same(whole, sampled)
    ended = set()
    for i, j in np.ndindex(out.status.shape):
        length = int(out.lengths[i, j])
        ended.add(names(out)[i][j])
        want = sampled.tokens[i, j, :length].tolist()
        assert out.tokens[i, j].tolist() == want + [0] * (NEW - length)
        if PROMPTS[i]:
            assert length >= 1
            assert names(out)[i][j] == ("LENGTH" if length == NEW else "OUT_OF_PAGES")
    assert "OUT_OF_PAGES" in ended
    assert "LENGTH" in ended or num_pages < 9


def test_prompts_that_do_not_fit(greedy):
    """First come, first served: the third of three prompts finds no page."""
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[3], PROMPTS[1]]
    out = run(prompts, num_pages=4)
    assert names(out)[2] == ["OUT_OF_PAGES"] and out.lengths[2].tolist() == [0]
    for i, row in ((0, 0), (1, 1)):
        length = int(out.lengths[i, 0])
        assert length >= 1
        assert (
            out.tokens[i, 0, :length].tolist()
            == greedy.tokens[row, 0, :length].tolist()
        )


def test_page_statistics():
    """One prompt of 6 in pages of 4, three samples of 5: 4 stored tokens each.

    ::

        step  1-2   [p p p p]x3  [p p a a] [p p b b] [p p c c]       4 pages
        step  3-4                and a page more for each            7 pages
    """
    state = run(
        [PROMPTS[0]], call=pj.start_generation, **SAMPLED | {"max_new_tokens": 5}
    )
    assert jax.tree.map(float, state.stats) == pj.PageStats(2, 6, 2, 6, 0, 0)
    state = pj.continue_generation(MODEL, PARAMS, state, num_steps=1)
    assert jax.tree.map(float, state.stats) == pj.PageStats(4, 6, 1, 13, 2, 1)
    state = pj.continue_generation(MODEL, PARAMS, state, num_steps=9)
    assert jax.tree.map(float, state.stats) == pj.PageStats(7, 9, 1, 22, 2, 4)


# --- cost ---------------------------------------------------------------------------


def test_second_call_compiles_nothing():
    seeds = np.arange(4, dtype=np.int32) + 9

    def run_all(prompts, **options):
        run(prompts, **SAMPLED | options, seeds=seeds)
        state = run(call=pj.start_generation, **SAMPLED)
        for num_steps in (1, 2, 3):
            state = pj.continue_generation(MODEL, PARAMS, state, num_steps=num_steps)

    run_all([[1], [2, 3], [4] * 8, [5]], temperature=0.3)
    with count_compiled() as compiled:
        run_all(PROMPTS[::-1])
    assert not compiled


def pool_copies(text, num_pages):
    """Finds copies of the pool in compiled HLO."""
    shape = f"{LAYERS * num_pages},{PAGE_SIZE},{KV_HEADS},{HEAD_DIM}"
    return re.findall(rf".*= f32\[{shape}\]\S* copy\(.*", text)


def test_the_pool_is_never_copied():
    """In the compiled generate loop, and in a step, where it is given away too."""
    num_pages = 1021
    tokens, lens = pad(PROMPTS)
    arguments = inspect.signature(pj.generate).bind(
        *(MODEL, PARAMS, tokens, lens),
        max_new_tokens=NEW,
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        chunk_size=16,
        **SAMPLED,
    )
    arguments.apply_defaults()
    arguments = generate_module._prepare(**arguments.arguments)
    lowered = generate_module._run_jit.lower(**arguments)
    text = lowered.compile().as_text()
    assert f"f32[{LAYERS * num_pages},{PAGE_SIZE}," in text
    # Keys and values start as one array of zeros, so one of them gets a copy before
    # the loops: outside of ENTRY is every loop's body.
    loops = re.sub(r"^ENTRY .*?^}", "", text, flags=re.DOTALL | re.MULTILINE)
    assert len(loops) < len(text) and "while(" in text
    assert pool_copies(loops, num_pages) == []
    assert len(pool_copies(text, num_pages)) <= 1
    state = run(call=pj.start_generation, **SAMPLED, num_pages=num_pages)
    lowered = generate_module._continue_jit.lower(
        PARAMS, state, jnp.int32(3), model=MODEL
    )
    compiled = lowered.compile()
    assert pool_copies(compiled.as_text(), num_pages) == []
    memory = compiled.memory_analysis()
    pool_bytes = state.pool.k_pages.nbytes + state.pool.v_pages.nbytes
    assert memory.alias_size_in_bytes > pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 2
    # A copy would be found: this one is.
    copied = jax.jit(lambda x: (x.at[0].set(1.0), x.at[1].set(2.0)))
    text = copied.lower(state.pool.k_pages).compile().as_text()
    assert pool_copies(text, num_pages)
    before = [pages.unsafe_buffer_pointer() for pages in jax.tree.leaves(state.pool)]
    old = state
    state = pj.continue_generation(MODEL, PARAMS, state, num_steps=2)
    after = [pages.unsafe_buffer_pointer() for pages in jax.tree.leaves(state.pool)]
    assert before == after
    assert old.pool.k_pages.is_deleted()


# --- arguments ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number >= 1, got 0"),
        ({"num_samples": 0}, "num_samples must be a whole number >= 1, got 0"),
        ({"page_size": 0}, "page_size must be a whole number"),
        ({"num_pages": 0}, "num_pages must be a whole number"),
        ({"chunk_size": 0}, "chunk_size must be a whole number"),
        ({"temperature": -1.0}, "temperature must be finite and >= 0"),
        ({"top_p": 0.0}, "top_p must be in"),
        ({"seeds": jnp.arange(3)}, "seeds"),
        ({"model": paged(max_seq_len=7)}, "prompt of 8 tokens is longer than .* of 7"),
    ],
)
def test_arguments_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        run(**options)


def test_prompts_of_the_wrong_kind():
    tokens, _ = pad(PROMPTS)
    for lens in (jnp.array([9, 1, 1, 1]), jnp.array([-1, 1, 1, 1])):
        with pytest.raises(ValueError, match="prompt_lens must be between 0 and 8"):
            pj.generate(MODEL, PARAMS, tokens, lens, max_new_tokens=1)
    with pytest.raises(ValueError, match="prompts"):
        pj.generate(MODEL, PARAMS, tokens[0], max_new_tokens=1)
    with pytest.raises(TypeError, match="prompts"):
        pj.generate(MODEL, PARAMS, tokens.astype(jnp.float32), max_new_tokens=1)
    with pytest.raises(ValueError, match=r"shape\[1\] must be"):
        pj.generate(MODEL, PARAMS, tokens[:, :0], max_new_tokens=1)
    state = run(call=pj.start_generation, **SAMPLED)
    with pytest.raises(ValueError, match="num_steps must be a whole number >= 1"):
        pj.continue_generation(MODEL, PARAMS, state, num_steps=0)
