"""Beam search on pages against one in plain Python that keeps no cache at all."""

import functools
import itertools
import re
import runpy
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_model import dense_logits, make_params, paged, poisoned
from beam_search import search
from compile_counter import count_compiled

import pagedjax as pj
from pagedjax import Status

generate_module = sys.modules["pagedjax.generate"]  # the name is also a function's
MODEL = paged()
PARAMS = make_params()
PARAMS["head"] = 0.4 * PARAMS["head"]  # several tokens are likely at each step
PROMPTS = [[7, 3, 9, 1, 30, 2], [11], [], [5, 6, 7, 8, 9, 10, 11, 12]]
LENGTH, NEW = 8, 10
RULES = [
    dict(eos_ids=eos_ids, length_penalty=penalty, early_stopping=early)
    for eos_ids in ((0, 21), (4, 17), (2, 33))
    for penalty, early in ((1.0, False), (1.0, True), (0.0, False), (2.0, True))
]
SIZES = list(itertools.product((1, 2, 4, 8), (1, 5, 16)))  # beams, page size
MARKS = dict.fromkeys(SIZES, pytest.mark.slow)
MARKS |= {(1, 5): (), (2, 16): (), (4, 1): pytest.mark.core, (8, 5): ()}


@functools.cache
def logits_of(tokens):
    return dense_logits(PARAMS, list(tokens))[-1]


def run(num_beams, *, call=pj.generate, model=MODEL, **options):
    tokens = np.zeros((len(PROMPTS), LENGTH), np.int32)
    for row, prompt in zip(tokens, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    lens = jnp.array([len(prompt) for prompt in PROMPTS])
    options = {
        "num_samples": num_beams,
        "max_new_tokens": NEW,
        "page_size": 5,
        "eos_ids": (4, 17),
        **options,
    }
    return call(
        model, PARAMS, jnp.asarray(tokens), lens, num_beams=num_beams, **options
    )


def found(out, i):
    """Gives the sequences of a prompt as `search` does."""
    ends = [Status(int(s)) == Status.STOP for s in out.status[i]]
    tokens = [
        tuple(row[:length].tolist())
        for row, length in zip(out.tokens[i], out.lengths[i], strict=True)
    ]
    return list(zip(out.scores[i].tolist(), tokens, ends, strict=True))


def check(out, i, want):
    got = found(out, i)
    assert [entry[1:] for entry in got] == [entry[1:] for entry in want]
    scores = [entry[0] for entry in want]
    np.testing.assert_allclose([entry[0] for entry in got], scores, rtol=1e-4)


@pytest.mark.parametrize(
    ("num_beams", "page_size"),
    [pytest.param(*sizes, marks=MARKS[sizes]) for sizes in SIZES],
)
def test_the_search_is_that_without_a_cache(num_beams, page_size):
    ends, lengths = set(), set()
    for rule in RULES:
        out = run(num_beams, page_size=page_size, **rule)
        for i, prompt in enumerate(PROMPTS):
            if not prompt:
                continue
            want = search(
                logits_of, prompt, num_beams=num_beams, max_new_tokens=NEW, **rule
            )
            check(out, i, want)
            ends |= {entry[2] for entry in want}
            lengths |= {len(entry[1]) for entry in want}
            for j, (_, tokens, _) in enumerate(want):
                total = float(jnp.sum(out.logprobs[i, j]))
                per = total / len(tokens) ** rule["length_penalty"]
                np.testing.assert_allclose(out.scores[i, j], per, rtol=1e-4)
        assert not out.lengths[2].any() and not out.tokens[2].any()
        assert np.all(np.asarray(out.status[2]) == Status.EMPTY)
        assert np.all(np.isneginf(out.scores[2]))
    assert ends == {True, False} and len(lengths) >= 2


def test_one_beam_is_greedy():
    for eos_ids in ((0, 21), (4, 17)):
        beam, greedy = (
            run(1, eos_ids=eos_ids),
            run(None, num_samples=1, eos_ids=eos_ids),
        )
        assert beam.tokens.tolist() == greedy.tokens.tolist()
        assert beam.status.tolist() == greedy.status.tolist()
        np.testing.assert_allclose(beam.logprobs, greedy.logprobs, atol=1e-5)
        assert greedy.scores is None


def test_fewer_sequences_than_beams():
    state = run(4, call=pj.start_generation, num_samples=2)
    state = pj.continue_generation(MODEL, PARAMS, state, num_steps=NEW)
    whole, best = run(4), pj.finish_generation(state)
    assert best.tokens.tolist() == whole.tokens[:, :2].tolist()
    assert best.scores.tolist() == whole.scores[:, :2].tolist()
    assert best.status.tolist() == whole.status[:, :2].tolist()


def test_values_that_nobody_owns():
    """NaN in every page and place that no beam owns, before each step."""
    clean, poison = run(4), run(4, model=paged(poisoned))
    assert poison.tokens.tolist() == clean.tokens.tolist()
    np.testing.assert_allclose(poison.scores, clean.scores, rtol=1e-5)


def test_pieces():
    """Step by step: the table is sound, the pool stays, the best so far can be seen."""
    rule = RULES[0]
    state = run(4, call=pj.start_generation, page_size=1, **rule)
    proceed = generate_module._continue_jit.lower(
        PARAMS, state, jnp.int32(1), model=MODEL
    ).compile()
    shape = ",".join(map(str, state.pool.k_pages.shape))
    assert f"f32[{shape}]" in proceed.as_text()
    assert not re.findall(rf".*= f32\[{shape}\]\S* copy\(.*", proceed.as_text())
    pool = state.pool.k_pages.unsafe_buffer_pointer()
    steps = 1
    while np.any(np.asarray(state.status) == Status.RUNNING):
        assert pj.check_integrity(state.table) == []
        out = pj.finish_generation(state)
        for i in (0, 1, 3):
            if out.status[i, 0] == Status.RUNNING:
                want = search(
                    logits_of, PROMPTS[i], num_beams=4, max_new_tokens=steps, **rule
                )
                assert [x[:2] for x in found(out, i)] == [
                    (pytest.approx(x[0], rel=1e-4), x[1]) for x in want
                ]
        state = proceed(PARAMS, state, jnp.int32(1))
        steps += 1
    assert state.pool.k_pages.unsafe_buffer_pointer() == pool
    assert pj.check_integrity(state.table) == []
    assert int(state.table.num_free) == state.table.num_pages
    out, whole = pj.finish_generation(state), run(4, page_size=1, **rule)
    assert jax.tree.map(np.array_equal, out, whole) == jax.tree.map(
        lambda _: True, whole
    )


def test_a_prompt_that_finds_no_page():
    """Its search is cut short, with the best so far; the others are right."""
    rule = RULES[0]
    out = run(4, num_pages=24, page_size=1, **rule)
    statuses = [{Status(int(s)).name for s in row} for row in out.status]
    assert "OUT_OF_PAGES" in set.union(*statuses)
    assert any(status & {"STOP", "LENGTH"} for status in statuses)
    for i in (0, 1, 3):
        steps = NEW
        if "OUT_OF_PAGES" in statuses[i]:
            assert statuses[i] == {"OUT_OF_PAGES"}
            steps = int(max(out.lengths[i]))
            assert 0 < steps < NEW
        want = search(logits_of, PROMPTS[i], num_beams=4, max_new_tokens=steps, **rule)
        assert [x[:2] for x in found(out, i)] == [
            (pytest.approx(x[0], rel=1e-4), x[1]) for x in want
        ]


def bigrams(params, pool, tokens, batch, rows=None):
    """A model without a cache: the logits are a row of a matrix."""
    return pool, params[tokens if rows is None else tokens[rows]]


def test_as_many_beams_as_there_are_sequences():
    """Then it is no search: all sequences in order, and no more than there are."""
    eos, new, beams = 2, 3, 16
    params = jnp.asarray(np.random.default_rng(0).standard_normal((3, 3)), jnp.float32)
    model = pj.PagedModel(bigrams, 1, 1, 8, 3)
    options = dict(
        max_new_tokens=new, num_beams=beams, num_samples=beams, eos_ids=[eos]
    )
    out = pj.generate(model, params, jnp.array([[0, 1]]), **options)
    logprobs = np.asarray(jax.nn.log_softmax(params))
    every = {}
    for tokens in itertools.product(range(3), repeat=new):
        if eos in tokens:
            tokens = tokens[: tokens.index(eos) + 1]
        steps = itertools.pairwise((1, *tokens))
        every[tokens] = sum(logprobs[step] for step in steps) / len(tokens)
    assert len(every) == beams - 1
    want = sorted(every, key=lambda tokens: -every[tokens])
    assert [tokens for _, tokens, _ in found(out, 0)] == [*want, ()]
    np.testing.assert_allclose(out.scores[0, :-1], sorted(every.values())[::-1], 1e-5)
    assert np.isneginf(out.scores[0, -1])
    # A model that has diverged is to be seen.
    out = pj.generate(model, params * jnp.nan, jnp.array([[0, 1]]), **options)
    assert np.isnan(out.logprobs[0, 0, 0]) and np.isnan(out.scores[0, 0])


def test_other_numbers_compile_nothing():
    run(4)
    with count_compiled() as compiled:
        run(4, eos_ids=(1, 2), length_penalty=0.3, early_stopping=True)
    assert compiled == []


def test_the_example_runs(capsys):
    example = Path(__file__).parents[1] / "examples" / "beam.py"
    out = runpy.run_path(str(example))["main"](random=True)
    printed = capsys.readouterr().out
    used, apart = int(out.stats.pages_used), int(out.stats.pages_mapped)
    assert f"held {used} pages" in printed and f"would take {apart}:" in printed
    assert used < 0.7 * apart
    for i, j in np.ndindex(out.scores.shape):
        assert f"{out.scores[i, j]:8.4f}  'tokens [" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 0}, "num_beams must be a whole number >= 1, got 0"),
        ({"num_beams": 2, "num_samples": 3}, "num_samples=3 .* from num_beams=2"),
        ({"num_beams": 2, "temperature": 0.5}, "temperature must be 0, got 0.5"),
        (
            {"num_beams": 2, "length_penalty": float("nan")},
            "length_penalty must be finite, got nan",
        ),
    ],
)
def test_arguments_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        run(**{"num_samples": 1, **options})
