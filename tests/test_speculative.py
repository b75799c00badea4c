"""Speculative decoding: the tokens of plain generation, in fewer steps."""

import dataclasses
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
    VOCAB,
    make_params,
    paged,
    poisoned,
)
from compile_counter import count_compiled

import pagedjax as pj
from pagedjax import Status
from pagedjax._speculative import look_up

generate_module = sys.modules["pagedjax.generate"]  # the name is also a function's
MODEL = paged()
PROMPTS = [[7, 3, 9, 1, 30, 2], [11], [], [5, 6, 7, 8, 9, 10, 11, 12]]
LENGTH, NEW, PAGE_SIZE = 8, 24, 4
ENDS = [(VOCAB, VOCAB), (4, 17), (38, 12)]  # the first never come
SAMPLED = {"temperature": 1.0, "num_samples": 2}
LOOKUP, SMALL = pj.PromptLookup(max_ngram=2, num_tokens=3), pj.DraftModel(MODEL, 3)


def params_of(seed=0):
    """Weights with little attention: greedy tokens soon go round in circles."""
    params = make_params(seed)
    for layer in params["layers"]:
        layer["v"] = 0.2 * layer["v"]
    return params


PARAMS = params_of()
# Close to the model: it often drafts the right token, and often not.
NEAR = jax.tree.map(lambda a, b: a + 0.1 * b, PARAMS, params_of(1))


def run(*, call=pj.generate, model=MODEL, **options):
    tokens = np.zeros((len(PROMPTS), LENGTH), np.int32)
    for row, prompt in zip(tokens, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    lens = jnp.array([len(prompt) for prompt in PROMPTS])
    options = {
        "max_new_tokens": NEW,
        "page_size": PAGE_SIZE,
        "eos_ids": ENDS[0],
        **options,
    }
    return call(model, PARAMS, jnp.asarray(tokens), lens, **options)


def same(out, plain):
    assert out.tokens.tolist() == plain.tokens.tolist()
    assert out.lengths.tolist() == plain.lengths.tolist()
    assert out.status.tolist() == plain.status.tolist()
    np.testing.assert_allclose(out.logprobs, plain.logprobs, atol=1e-3)
    assert np.all(out.drafts.accepted <= out.drafts.drafted)


@pytest.fixture(scope="module")
def plain():
    """Gives what generation without drafts gives; each only once."""
    known = {}

    def give(**options):
        name = str(options)
        if name not in known:
            known[name] = run(**options)
        return known[name]

    return give


# --- the same tokens ----------------------------------------------------------------


@pytest.mark.parametrize("draft", [LOOKUP, SMALL], ids=["lookup", "model"])
@pytest.mark.parametrize("how", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_the_tokens_are_those_without_drafts(plain, how, draft):
    """Whatever ends them: an end token among accepted drafts, or the length."""
    fewer = 0
    for ends in ENDS:
        want = plain(**how, eos_ids=ends)
        for params in [PARAMS, NEAR] if draft is SMALL else [None]:
            out = run(**how, eos_ids=ends, draft=draft, draft_params=params)
            same(out, want)
            fewer += int(want.stats.num_steps) - int(out.stats.num_steps)
            # A step gives a token of the model's own, besides the drafts.
            own = np.asarray(out.lengths - out.drafts.accepted)
            assert own.max() <= int(out.stats.num_steps) + 1
    statuses = {
        Status(int(s)).name for s in np.ravel(plain(**how, eos_ids=ENDS[1]).status)
    }
    assert {"STOP", "LENGTH", "EMPTY"} <= statuses | {"LENGTH"}
    assert fewer > 0


@pytest.mark.parametrize(
    "how",
    [pytest.param({}, marks=pytest.mark.core), SAMPLED],
    ids=["greedy", "sampled"],
)
def test_a_draft_model_that_is_the_model_is_always_right(how):
    """G5: and never falls behind, for as long as it goes on."""
    out = run(**how, draft=SMALL, draft_params=PARAMS)
    assert out.drafts.accepted.tolist() == out.drafts.drafted.tolist()
    # 1 token, then 4 in each step.
    assert int(out.stats.num_steps) == -(-(NEW - 1) // (SMALL.num_tokens + 1))
    wrong = run(**how, draft=SMALL, draft_params=NEAR)
    assert np.sum(wrong.drafts.accepted) < np.sum(wrong.drafts.drafted)


def test_values_that_were_rolled_back(plain):
    """NaN behind every last token and in every free page, before each pass."""
    drafts = ((LOOKUP, None), (pj.DraftModel(paged(poisoned), 3), PARAMS))
    for draft, params in drafts:
        model = paged(poisoned)
        out = run(**SAMPLED, model=model, draft=draft, draft_params=params)
        same(out, plain(**SAMPLED, eos_ids=ENDS[0]))
        assert np.sum(out.drafts.accepted) > 0


def test_the_context_is_the_end(plain):
    out = run(model=paged(max_seq_len=12), draft=SMALL, draft_params=NEAR)
    for i, length in ((0, 6), (1, 11), (3, 4)):
        assert out.lengths[i].tolist() == [length]
        want = plain(eos_ids=ENDS[0]).tokens[i, 0, :length].tolist()
        assert out.tokens[i, 0, :length].tolist() == want
        assert Status(int(out.status[i, 0])) == Status.LENGTH


# --- step by step -------------------------------------------------------------------


@pytest.fixture(scope="module")
def begin():
    """Gives the start of a run of SMALL, and the compiled program that goes on."""
    options = {"draft": SMALL, "draft_params": NEAR, "num_samples": 2}
    state = run(call=pj.start_generation, num_pages=64, **options)
    lowered = generate_module._continue_jit.lower(
        PARAMS, state, jnp.int32(1), NEAR, model=MODEL
    )
    compiled = lowered.compile()

    def start():
        return run(call=pj.start_generation, num_pages=64, **options)

    return start, compiled


def test_each_row_keeps_what_agrees(begin, plain):
    """G7: however many drafts are accepted, at whatever place in a page."""
    start, proceed = begin
    state, seen, places = start(), set(), set()
    prompt_lens = np.repeat([len(prompt) for prompt in PROMPTS], 2)
    while np.any(np.asarray(state.status) == Status.RUNNING):
        before, held = (
            np.asarray(state.drafts.accepted),
            np.asarray(state.table.seq_lens),
        )
        state = proceed(PARAMS, state, jnp.int32(1), NEAR)
        assert pj.check_integrity(state.table) == []
        running = np.asarray(state.status) == Status.RUNNING
        lens = np.where(running, prompt_lens + np.asarray(state.lengths) - 1, 0)
        assert state.table.seq_lens.tolist() == lens.tolist()
        accepted = np.asarray(state.drafts.accepted) - before
        seen |= set(accepted[running].tolist())
        places |= set((held[running] % PAGE_SIZE).tolist())
    assert seen == {0, 1, 2, 3} and places == {0, 1, 2, 3}
    assert int(state.table.num_free) == 64
    out = pj.finish_generation(state)
    want = plain(eos_ids=ENDS[0]).tokens
    assert out.tokens.tolist() == jnp.repeat(want, 2, axis=1).tolist()


@pytest.mark.parametrize("spare", [2, 6, 11])
def test_out_of_pages_keeps_right_tokens(begin, plain, spare):
    """Drafts give way; a token without a page ends its row, and only that one."""
    start, proceed = begin
    state = start()
    table = state.table
    pages = table.free_pages[spare : int(table.num_free)]
    pins = np.zeros(table.num_pages, np.int32)
    pins[np.asarray(pages)] = 1
    table = dataclasses.replace(
        table,
        refcounts=table.refcounts.at[pages].set(1),
        num_free=jnp.int32(spare),
    )
    assert pj.check_integrity(table, pins) == []
    state = dataclasses.replace(state, table=table)
    state = proceed(PARAMS, state, jnp.int32(NEW), NEAR)
    assert pj.check_integrity(state.table, pins) == []
    assert int(state.table.num_free) == 64 - len(pages)
    out = pj.finish_generation(state)
    want = plain(eos_ids=ENDS[0]).tokens
    ended = set()
    for i, j in np.ndindex(out.status.shape):
        if PROMPTS[i]:
            length = int(out.lengths[i, j])
            ended.add(Status(int(out.status[i, j])))
            assert out.tokens[i, j, :length].tolist() == want[i, 0, :length].tolist()
    assert Status.OUT_OF_PAGES in ended


def test_the_pools_are_never_copied(begin):
    start, proceed = begin
    text = proceed.as_text()
    shape = f"{LAYERS * 64},{PAGE_SIZE},{KV_HEADS},{HEAD_DIM}"
    assert f"f32[{shape}]" in text
    assert re.findall(rf".*= f32\[{shape}\]\S* copy\(.*", text) == []
    state = start()
    pools = (state.pool, state.drafts.pool)
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pools)]
    state = proceed(PARAMS, state, jnp.int32(2), NEAR)
    pools = (state.pool, state.drafts.pool)
    after = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pools)]
    assert before == after and len(before) == 4


# --- drafts and draws ---------------------------------------------------------------


def looked_up(history, max_ngram, num_tokens):
    """Says in plain Python what `look_up` drafts; None if nothing."""
    for n in range(min(max_ngram, len(history) - 1), 0, -1):
        for end in range(len(history) - 1, n - 1, -1):
            if history[end - n : end] == history[-n:]:
                again = history[end:]
                return [again[i % len(again)] for i in range(num_tokens)]
    return None


def test_look_up():
    draw = np.random.default_rng(0)
    lengths = np.arange(1, 33)
    history = draw.integers(0, 4, (32, 40)).astype(np.int32)
    for max_ngram, num_tokens in ((1, 5), (3, 4)):
        drafter = pj.PromptLookup(max_ngram, num_tokens)
        drafts, found = look_up(jnp.asarray(history), jnp.asarray(lengths), drafter)
        kinds = set()
        for i, length in enumerate(lengths):
            want = looked_up(history[i, :length].tolist(), max_ngram, num_tokens)
            assert bool(found[i]) == (want is not None)
            if want is not None:
                assert drafts[i].tolist() == want
            kinds.add(want is not None)
        assert kinds == {True, False}


def bigrams(params, pool, tokens, batch, rows=None):
    """A model without a cache: the logits are a row of a matrix."""
    return pool, params[tokens if rows is None else tokens[rows]]


@pytest.mark.parametrize("kind", ["lookup", "model"])
def test_the_distribution_is_that_of_the_model(kind):
    """Chi-square of the third token, which came as a draft or after one."""
    vocab, samples, temperature = 5, 2048, 0.7
    draw = np.random.default_rng(2)
    params, other = 0.5 * draw.standard_normal((2, vocab, vocab)).astype(np.float32)
    model = pj.PagedModel(bigrams, 1, 1, 4, vocab)
    draft = pj.PromptLookup(2, 2) if kind == "lookup" else pj.DraftModel(model, 2)
    out = pj.generate(
        model,
        jnp.asarray(params),
        jnp.array([[0, 1, 2, 3, 4, 0, 1]]),
        max_new_tokens=3,
        num_samples=samples,
        temperature=temperature,
        draft=draft,
        draft_params=None if kind == "lookup" else jnp.asarray(other),
        page_size=4,
    )
    assert 0 < np.sum(out.drafts.accepted) < np.sum(out.drafts.drafted)
    probs = np.asarray(jax.nn.softmax(params / temperature, axis=-1), np.float64)
    pairs = probs[1][:, None, None] * probs[:, :, None] * probs[None, :, :]
    counts = np.zeros((vocab,) * 3)
    np.add.at(counts, tuple(np.asarray(out.tokens[0]).T), 1)
    # The two last tokens together: 24 degrees of freedom; 1 in 1,000 is over 51.2.
    expected, counts = samples * pairs.sum(0), counts.sum(0)
    assert expected.min() > 5
    chi2 = np.sum((counts - expected) ** 2 / expected)
    assert chi2 < 51.2


# --- cost and arguments -------------------------------------------------------------


def test_other_numbers_compile_nothing():
    run(draft=SMALL, draft_params=NEAR)
    with count_compiled() as compiled:
        run(draft=pj.DraftModel(paged(), 3), draft_params=PARAMS, eos_ids=(1, 2))
    assert compiled == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": LOOKUP, "num_beams": 2}, "draft and num_beams cannot be given"),
        (
            {"draft": pj.DraftModel(pj.PagedModel(bigrams, 1, 1, 4, 7))},
            "vocabulary of 7 tokens, the model one of 40",
        ),
        ({"draft_params": 1}, "draft_params needs draft"),
        ({"draft": LOOKUP, "draft_params": 1}, "draft_params .* is a PromptLookup"),
    ],
)
def test_arguments_that_do_not_go_together(options, message):
    with pytest.raises(ValueError, match=message):
        run(**options)


def test_going_on_names_what_does_not_go_with_the_state():
    for how in ({}, {"draft": LOOKUP}):
        state = run(call=pj.start_generation, **how)
        with pytest.raises(ValueError, match="draft_params .* none drafts here"):
            pj.continue_generation(MODEL, PARAMS, state, num_steps=1, draft_params=1)
        with pytest.raises(TypeError, match="model must be a PagedModel"):
            pj.continue_generation(object(), PARAMS, state, num_steps=1)


def test_drafters_of_the_wrong_kind():
    with pytest.raises(TypeError, match="draft must be .* got str"):
        run(draft="ngram")
    with pytest.raises(ValueError, match="max_ngram must be a whole number >= 1"):
        pj.PromptLookup(max_ngram=0)
    for make in (lambda n: pj.PromptLookup(2, n), lambda n: pj.DraftModel(MODEL, n)):
        with pytest.raises(ValueError, match="num_tokens must be a whole number >= 1"):
            make(0)
