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
        options = {"num_slots": 2} | options
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


@pytest.mark.parametrize("name", ["generate", "rollout"])
def test_equal_numbers_and_arrays_of_other_types_trace_nothing_anew(name: str) -> None:
    traces = []

    def counted(*args: Any) -> Any:
        traces.append(name)
        return apply(*args)

    model = pj.PagedModel(counted, 1, 1, 8, vocab_size=VOCAB)
    sizes = dict(max_new_tokens=4, num_samples=2, page_size=4, num_pages=9)
    sizes |= {"chunk_size": 8}
    if name == "rollout":
        sizes |= {"num_slots": 2, "prefix_entries": 1}
    shapes: dict[str, Any] = dict(prompts=(2, 4), prompt_lens=(2,), seeds=(2,))
    shapes |= {"eos_ids": (1,)}
    if name == "rollout":
        shapes |= {"budgets": (2,)}

    def run_with(size: Any, full: Any) -> Any:
        return run(
            name,
            model=model,
            **{key: size(value) for key, value in sizes.items()},
            **{key: full(shape, 3) for key, shape in shapes.items()},
            temperature=full((), 1.0),
        ).tolist()

    want = run_with(int, np.full)
    assert traces
    traces.clear()
    assert jnp.full((2,), 3).weak_type and jnp.full((), 1.0).weak_type
    assert run_with(int, jnp.full) == want
    for size in (np.int64, np.array, jnp.int32):
        assert run_with(size, np.full) == want
    assert traces == []


def test_sizes_of_other_types_make_equal_statics() -> None:
    for size in (np.int64, np.array, jnp.int32):
        lookup = pj.PromptLookup(size(2), size(3))
        assert lookup == pj.PromptLookup(2, 3) and type(lookup.num_tokens) is int
        model = pj.PagedModel(apply, *map(size, (1, 1, 8, VOCAB, 64)))
        assert hash(model) == hash(pj.PagedModel(apply, 1, 1, 8, VOCAB, 64))
        assert pj.DraftModel(model, size(3)) == pj.DraftModel(model, 3)
        pool = pj.init_kv_pool(
            num_layers=size(2), num_pages=4, page_size=4, num_kv_heads=1, head_dim=8
        )
        assert type(pool.num_layers) is int
        table = pj.init_page_table(
            num_pages=8, page_size=size(4), max_slots=2, pages_per_slot=2
        )
        assert type(table.page_size) is int
    for field in ("num_layers", "num_kv_heads", "head_dim", "vocab_size"):
        sizes = dict(num_layers=1, num_kv_heads=1, head_dim=8, vocab_size=VOCAB)
        with pytest.raises(ValueError, match=f"{field} must be a whole number >= 1"):
            pj.PagedModel(apply, **sizes | {field: 0})
    with pytest.raises(ValueError, match=r"max_seq_len must be .* got 1\.5"):
        pj.PagedModel(apply, 1, 1, 8, VOCAB, max_seq_len=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "option"),
    [
        *(("generate", key) for key in ("max_new_tokens", "num_samples", "num_beams")),
        *(("generate", key) for key in ("page_size", "num_pages", "chunk_size")),
        ("rollout", "num_slots"),
        ("rollout", "prefix_entries"),
    ],
)
def test_a_traced_size_is_named(name: str, option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} must be known when tracing, got"):
        jax.jit(lambda n: run(name, **{option: n}))(2)


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
