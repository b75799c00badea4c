"""Rollouts: equal to `generate` whatever the sizes; what is shared and refused."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rollout_model
from attention_model import make_params, paged
from compile_counter import count_compiled
from jax.sharding import Mesh, PartitionSpec

import pagedjax as pj
from pagedjax import Status

PROMPTS = [[7, 3, 9, 1, 30, 2], [11], [], [5, 6, 7, 8, 9, 10, 11, 12]]
LENGTH, NEW = 8, 6
SAMPLED = {"temperature": 1.0, "num_samples": 3, "max_new_tokens": NEW}
TOY = np.array([3, 5], np.int32)  # parameters of the toy model


def pad(prompts, length=LENGTH):
    tokens = np.zeros((len(prompts), length), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens, np.array([len(prompt) for prompt in prompts], np.int32)


def names(out):
    return [[Status(int(s)).name for s in row] for row in out.status]


# --- against generate ---------------------------------------------------------------


@pytest.fixture(scope="module")
def generated():
    return pj.generate(paged(), make_params(), *pad(PROMPTS), page_size=4, **SAMPLED)


@pytest.mark.parametrize(
    "sizes",
    [
        dict(num_slots=4, page_size=4, chunk_size=8),
        dict(num_slots=5, page_size=3, chunk_size=5, num_pages=9),
        dict(num_slots=12, page_size=16, chunk_size=64, prefix_entries=0),
    ],
    ids=["few-rows", "few-pages", "all-at-once"],
)
def test_tokens_are_those_of_generate(generated, sizes):
    """D5: also those of samples that were preempted and computed again."""
    out = pj.rollout(paged(), make_params(), *pad(PROMPTS), **SAMPLED, **sizes)
    assert out.tokens.tolist() == generated.tokens.tolist()
    assert out.lengths.tolist() == generated.lengths.tolist()
    assert names(out) == names(generated)
    np.testing.assert_allclose(out.logprobs, generated.logprobs, atol=1e-4)
    assert (int(out.stats.num_preemptions) > 0) == ("num_pages" in sizes)
    assert int(out.stats.pages_used) <= sizes.get("num_pages", 10**6)


def test_each_shard_is_a_rollout_of_its_own(generated):
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    model, params = paged(), make_params()

    def run(prompts, lens, seeds):
        out = pj.rollout(
            model, params, prompts, lens, seeds=seeds, **SAMPLED, num_slots=2,
            page_size=4, chunk_size=8,
        )  # fmt: skip
        return out.tokens, out.logprobs, out.status, out.stats.num_steps[None]

    shard = PartitionSpec("data")
    sharded = jax.shard_map(run, mesh=mesh, in_specs=shard, out_specs=shard)
    tokens, logprobs, status, steps = jax.jit(sharded)(
        *map(jnp.asarray, (*pad(PROMPTS), np.arange(4, dtype=np.int32)))
    )
    assert tokens.tolist() == generated.tokens.tolist()
    assert status.tolist() == generated.status.tolist()
    np.testing.assert_allclose(logprobs, generated.logprobs, atol=1e-4)
    assert steps[2] == 0 and all(steps[i] > 0 for i in (0, 1, 3))


def test_heads_may_be_split_over_another_axis():
    """The pool varies with the parameters, what comes out does not. Traced only."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))

    def one_layer(params, pool, tokens, batch, rows=None):
        kv = tokens.astype(jnp.float32)[:, None, None] * params[None, :, None]
        pool, out = pj.attend(pool, 0, kv, kv, kv, batch)
        y = jax.lax.psum(jnp.sum(out, axis=(1, 2)), "tensor")
        y = y if rows is None else y[rows]
        return pool, y[:, None] * jnp.arange(11.0)[None, :]

    model = pj.PagedModel(
        one_layer, num_layers=1, num_kv_heads=2, head_dim=1, vocab_size=11
    )

    def run(params, prompts, lens):
        out = pj.rollout(
            model, params, prompts, lens, seeds=lens, max_new_tokens=NEW, num_slots=2
        )
        return out.tokens, out.status, out.stats.num_steps[None]

    shard = PartitionSpec("data")
    specs = (PartitionSpec("tensor"), shard, shard)
    sharded = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=shard)
    arguments = (jnp.ones((4,)), *map(jnp.asarray, pad(PROMPTS)))
    tokens, _, steps = jax.eval_shape(sharded, *arguments)
    assert tokens.shape == (4, 1, NEW) and steps.shape == (2,)


# --- with the toy model: one set of sizes, other numbers ----------------------------


def run_toy(prompts, **options):
    """Runs three rows of pages of 4 tokens on at most 5 prompts of 8 tokens."""
    tokens, lens = pad([*prompts, [], [], [], [], []][:5])
    budgets = np.array([*options.pop("budgets", []), *[NEW] * 5][:5], np.int32)
    return pj.rollout(
        rollout_model.MODEL,
        TOY,
        tokens,
        lens,
        budgets=budgets,
        **{
            **dict(max_new_tokens=NEW, num_slots=3, page_size=4, num_pages=8),
            **dict(chunk_size=4, prefix_entries=8, eos_ids=[-1]),
            **options,
        },
    )


def continued(prompt, num_tokens):
    """What the toy model produces after a prompt."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(rollout_model.next_token(tokens, TOY.tolist())))
    return tokens[len(prompt) :]


TOYS = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9], [7], [8, 8, 8, 8, 8, 8, 8, 8], [2, 3]]


def test_what_a_request_gets_at_most():
    out = run_toy(TOYS, budgets=[3, 0, 6, 1, 2])
    want = [continued(p, n) for p, n in zip(TOYS, [3, 0, 6, 1, 2], strict=True)]
    rows = zip(out.tokens[:, 0].tolist(), out.lengths[:, 0].tolist(), strict=True)
    assert [tokens[:n] for tokens, n in rows] == want
    assert names(out) == [["LENGTH"]] * 5
    assert out.stats.admitted_at[1, 0] == out.stats.ended_at[1, 0] == -1
    assert not np.any(np.asarray(out.tokens[1])) and not np.any(out.logprobs[1])


def test_an_end_token_frees_the_row():
    want = [continued(prompt, NEW) for prompt in TOYS]
    end = 8  # the fourth token of two of them
    out = run_toy(TOYS, eos_ids=[end])
    for tokens, row, n, status in zip(
        want, out.tokens[:, 0].tolist(), out.lengths[:, 0], names(out), strict=True
    ):
        stop = tokens.index(end) + 1 if end in tokens else NEW
        assert (n, row[:n]) == (stop, tokens[:stop])
        assert status == ["STOP" if end in tokens else "LENGTH"]
    assert out.lengths[:, 0].tolist() == [6, 4, 6, 4, 6]


def test_what_cannot_fit_is_told_and_the_others_finish():
    """D1: 8 pages of 1 token; a request that needs all 8 is served."""
    sizes = dict(page_size=1, budgets=[3, 4, 5, 1, 6])
    out = run_toy(TOYS, **sizes)  # 6 + 3 - 1 = 8 tokens at most in the cache
    assert names(out) == [["LENGTH"]] * 5
    out = run_toy(TOYS, **{**sizes, "budgets": [4, 4, 5, 1, 6]})
    assert names(out) == [["UNSERVABLE"], *[["LENGTH"]] * 4]
    assert out.lengths[:, 0].tolist() == [0, 4, 5, 1, 6]
    for i in range(1, 5):
        n = int(out.lengths[i, 0])
        assert out.tokens[i, 0, :n].tolist() == continued(TOYS[i], n)


def test_reserving_avoids_preemption():
    prompts = [[7], [2, 3], [4], [5], [6, 6]]
    over = run_toy(prompts, page_size=1)
    reserved = run_toy(prompts, page_size=1, reserve=True)
    # D2: nobody comes back before a row has ended, so the same ones are not preempted
    # over and over.
    assert over.stats.preemptions[:, 0].tolist() == [0, 1, 1, 1, 1]
    assert int(over.stats.num_preemptions) == 4
    assert int(reserved.stats.num_preemptions) == 0
    assert over.tokens.tolist() == reserved.tokens.tolist()
    assert int(over.stats.num_steps) < int(reserved.stats.num_steps)


def test_the_longest_come_first():
    budgets = [1, 2, 6, 4, 6]
    in_order = run_toy(TOYS, budgets=budgets)
    out = run_toy(TOYS, budgets=budgets, longest_first=True)
    assert in_order.stats.admitted_at[:, 0].tolist() == [0, 2, 2, 2, 4]
    assert out.stats.admitted_at[:, 0].tolist() == [8, 6, 0, 0, 0]
    assert int(out.stats.num_steps) < int(in_order.stats.num_steps)
    assert out.tokens.tolist() == in_order.tokens.tolist()


def test_a_common_start_is_prefilled_once():
    prompts = [[1, 2, 3, 4, n] for n in range(5)]
    out = run_toy(prompts)
    assert int(out.stats.tokens_fed) == 5 + 4 * 1
    assert int(out.stats.tokens_found) == 4 * 4
    for n in range(5):
        assert out.tokens[n, 0].tolist() == continued(prompts[n], NEW)
    # The head waits for who feeds what it will share; the others follow at once.
    assert out.stats.admitted_at[:3, 0].tolist() == [0, 2, 2]


def test_the_curves_span_the_run():
    out = run_toy(TOYS)
    stats = out.stats
    steps, stride = int(stats.num_steps), int(stats.stride)
    assert stride == 1 and steps < stats.live_slots.shape[0]
    live = np.asarray(stats.live_slots)
    assert np.all(live[:steps] > 0) and not np.any(live[steps:])
    assert live.max() == 3
    assert np.all(np.asarray(stats.used_pages[:steps]) <= int(stats.pages_used))
    share = np.asarray(stats.kv_share[:steps])
    assert np.all((share > 0) & (share <= 1))


# --- the program --------------------------------------------------------------------


def test_other_numbers_compile_nothing():
    run_toy(TOYS)
    with count_compiled() as compiled:
        run_toy(TOYS[::-1], budgets=[1, 2, 3, 4, 5], eos_ids=[3], reserve=True)
    assert compiled == []


@pytest.fixture(scope="module")
def samples_program():
    """Compiles 8 samples of one prompt of 16 tokens; gives it and the traced sizes."""
    traces = []

    def counted(*args):
        traces.append(args[2].shape[0])
        return rollout_model.apply(*args)

    model = pj.PagedModel(
        counted, num_layers=3, num_kv_heads=1, head_dim=1, vocab_size=11
    )
    run = functools.partial(
        pj.rollout, max_new_tokens=9, num_samples=8, num_slots=8, page_size=4,
        chunk_size=16,
    )  # fmt: skip
    prompt = np.arange(16, dtype=np.int32)[None] % rollout_model.VOCAB
    lowered = jax.jit(run, static_argnums=0).lower(model, TOY, prompt)
    return lowered.compile(), prompt, traces


def test_samples_share_the_prompt(samples_program):
    """n = 8 samples: one prefill, and pages = shared ones + own ones."""
    program, prompt, _ = samples_program
    out = program(TOY, prompt)
    stats = out.stats
    assert int(stats.tokens_fed) == 16 + 7 and int(stats.tokens_forked) == 7 * 15
    # 3 full pages shared; the last page of the prompt and 2 pages of its own each
    # (16 + 9 - 1 tokens in the cache at most).
    assert int(stats.pages_used) == 3 + 8 * 3
    assert int(stats.pages_copied) == 7
    assert out.tokens[0].tolist() == [continued(prompt[0].tolist(), 9)] * 8


def test_the_model_is_traced_twice_and_the_pool_never_copied(samples_program):
    program, _, traces = samples_program
    assert sorted(traces) == [8, 16]
    loops, _, entry = program.as_text().partition("\nENTRY")
    copies = r"f32\[168,4,1,1\]\S* copy(-start)?\("  # 3 layers of 8 rows of 7 pages
    assert "f32[168,4,1,1]" in loops
    assert not re.search(copies, loops)
    # The zeros that the pool starts as, once for keys and once for values.
    assert len(re.findall(copies, entry)) <= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_slots=0), "num_slots must be a whole number >= 1, got 0"),
        (dict(prefix_entries=-1), "prefix_entries must be a whole number >= 0"),
        (dict(budgets=[7]), "budgets must be between 0 and max_new_tokens=6, got 6 to"),
        (dict(chunk_size=0), "chunk_size must be"),
        (dict(temperature=-1), "temperature must be"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        run_toy(TOYS, **options)
