"""Options of `generate` and `rollout`: what is taken, and how mistakes are named."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pagedjax as pj

VOCAB = 11
PROMPTS = np.array([[3, 1, 4, 1], [7, 2, 0, 5]], np.int32)


def apply(params: Any, pool: Any, tokens: Any, batch: Any, rows: Any) -> Any:
    """Logits that depend on the token, and are close enough to draw from."""
    tokens = tokens if rows is None else tokens[rows]
    place = jnp.arange(VOCAB)[None, :] * 7 + tokens[:, None] * 5
    return pool, jnp.sin(place.astype(jnp.float32))


MODEL = pj.PagedModel(apply, num_layers=1, num_kv_heads=1, head_dim=8, vocab_size=VOCAB)


def run(name: str = "generate", **options: Any) -> Any:
    options = dict(max_new_tokens=4, page_size=4) | options
    if name == "rollout":
        options |= {"num_slots": 2}
    prompts = options.pop("prompts", PROMPTS)
    model = options.pop("model", MODEL)
    return getattr(pj, name)(model, None, prompts, **options).tokens


@pytest.mark.parametrize("temperature", [1e-37, 1e-39])
@pytest.mark.parametrize("top_k", [0, 3], ids=["plain", "filtered"])
def test_the_coldest_samples_are_greedy(temperature: float, top_k: int) -> None:
    got = run(temperature=temperature, top_k=top_k)
    assert got.tolist() == run().tolist()
    traced = jax.jit(lambda t: run(temperature=t, top_k=top_k))
    assert traced(jnp.float32(temperature)).tolist() == run().tolist()


@pytest.mark.parametrize("kind", ["rbg", "unsafe_rbg", "threefry2x32"])
def test_keys_of_every_kind_make_a_prompt_independent_of_its_batch(kind: str) -> None:
    options = dict(key=jax.random.key(0, impl=kind), temperature=1.0, num_samples=2)
    both = run(**options)
    alone = run(prompts=PROMPTS[1:], seeds=np.array([1]), **options)
    assert both[1].tolist() == alone[0].tolist()
    if kind == "rbg":
        assert run("rollout", **options).tolist() == both.tolist()
    assert run(**options | {"key": jax.random.key(1, impl=kind)}).tolist() != (
        both.tolist()
    )


def test_raw_keys_are_taken() -> None:
    raw = run("rollout", key=jax.random.PRNGKey(5), temperature=1.0)
    assert raw.tolist() == run(key=jax.random.key(5), temperature=1.0).tolist()


def test_end_tokens_may_be_an_array_and_traced() -> None:
    want = run(eos_ids=[8]).tolist()
    assert run(eos_ids=jnp.array([8])).tolist() == want
    assert jax.jit(lambda e: run(eos_ids=e))(jnp.array([8])).tolist() == want
    assert jax.jit(lambda e: run(eos_ids=[e]))(jnp.int32(8)).tolist() == want
    assert run(eos_ids=np.zeros((0,), np.int32)).tolist() == run().tolist()


MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    (dict(eos_ids=4), TypeError, "eos_ids must be a sequence of token ids, got 4"),
    (
        dict(eos_ids=None),
        TypeError,
        "eos_ids must be a sequence .* got None",
    ),
    (dict(eos_ids="4"), TypeError, "eos_ids must be a sequence of token ids, got '4'"),
    (dict(model=apply), TypeError, "model must be a PagedModel.*got function"),
    (dict(prompts=[[1, 2], [3]]), ValueError, "prompts has rows of several lengths"),
    (dict(temperature="hot"), TypeError, "temperature must be a number, got 'hot'"),
    (dict(top_p=None), TypeError, "top_p must be a number, got None"),
    (dict(temperature=np.ones(2)), ValueError, r"temperature must be one .*\(2,\)"),
    (dict(key=0), TypeError, "key must be one random key.*got 0"),
    (dict(key=jax.random.split(jax.random.key(0))), TypeError, r"key must .*\(2,\)"),
    (dict(key=np.ones(2)), TypeError, r"key must be one random key.*float64\[2\]"),
    (dict(num_samples=True), ValueError, "num_samples must be a whole number"),
]
OF_GENERATE: list[tuple[dict[str, Any], type[Exception], str]] = [
    (dict(num_beams=2, early_stopping="never"), TypeError, "early_stopping.*'never'"),
    (dict(num_beams=2, early_stopping=None), TypeError, "early_stopping must be True"),
    (dict(num_beams=2, length_penalty="x"), TypeError, "length_penalty must be a numb"),
    (dict(num_beams=2, length_penalty=np.ones(2)), ValueError, "length_penalty must"),
    (dict(early_stopping=True), ValueError, "early_stopping need num_beams"),
    (dict(length_penalty=2.0), ValueError, "length_penalty and .* need num_beams"),
    (dict(draft_params=1), ValueError, "draft_params needs draft"),
    (dict(draft=pj.DraftModel(None)), TypeError, "DraftModel must be a PagedModel"),
]


@pytest.mark.parametrize(("options", "error", "message"), MISTAKES + OF_GENERATE)
def test_mistakes_of_generate_are_named(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run(**options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [*MISTAKES, (dict(reserve="no"), TypeError, "reserve must be True or False.*'no'")],
)
def test_mistakes_of_rollout_are_named(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run("rollout", **options)


def test_numbers_are_one_number_also_where_they_are_traced() -> None:
    with pytest.raises(ValueError, match="temperature must be one number"):
        jax.jit(lambda t: run(temperature=t))(jnp.ones(VOCAB))
