"""The paged Llama against a dense float64 one that shares no code with it."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_llama import dense_logits, llama3_frequency
from flax import nnx

from pagedjax._kv_pool import init_kv_pool
from pagedjax._page_table import append, init_page_table
from pagedjax._ragged import pack_decode, pack_ragged
from pagedjax.models import (
    CONFIGS,
    Llama,
    LlamaConfig,
    llama3_rope_divisors,
    rope_frequencies,
    weight_shapes,
)
from pagedjax.models import llama as llama_module

BASE = LlamaConfig(
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    hidden_size=24,
    ffn_size=40,
    vocab_size=50,
    max_seq_len=64,
)
STRETCHED = llama3_rope_divisors(
    head_dim=8,
    rope_theta=1e4,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_seq_len=64,
)
FAMILIES = {
    "llama2": {"num_kv_heads": 4},
    "llama3": {"rope_divisors": STRETCHED},
    "smollm2": {
        "num_heads": 9,
        "num_kv_heads": 3,
        "hidden_size": 20,
        "tied_embeddings": True,
    },
    "qwen2": {"num_kv_heads": 1, "qkv_bias": True, "rms_eps": 1e-3, "rope_theta": 1e6},
    "mistral": {"window": 5, "rope_divisors": (4.0,) * 4},
}
OTHERS = FAMILIES.keys() - {"smollm2"}
PAGE_SIZE, NUM_PAGES, PAGES_PER_SLOT, LENGTHS = 4, 16, 6, (17, 6)


def random_weights(config, seed=0):
    """Weights with everything away from its neutral value, biases large."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in weight_shapes(config):
        noise = rng.standard_normal(shape, np.float32)
        if name.endswith("norm"):
            weights[name] = 1 + 0.3 * noise
        elif name.endswith("bias"):
            weights[name] = noise
        else:
            weights[name] = 1.5 * noise / np.sqrt(shape[1], dtype=np.float32)
    return weights


def start(config, dtype=jnp.float32):
    table = init_page_table(
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        max_slots=len(LENGTHS),
        pages_per_slot=PAGES_PER_SLOT,
    )
    pool = init_kv_pool(
        num_layers=config.num_layers,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
    )
    # What nobody has written must not matter, in any layer.
    poison = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), pool)
    return table, poison


def make_step(model):
    """Compile one step, page table included: a ragged one, or decode where lens is
    a mask."""
    graph, state = nnx.split(model)

    @jax.jit
    def step(table, pool, tokens, lens, rows=None):
        if lens.dtype == bool:
            table, _, ok = append(table, lens.astype(jnp.int32), max_tokens=1)
            batch = pack_decode(table, lens)
        else:
            table, _, ok = append(table, lens)
            batch = pack_ragged(table, lens, num_tokens=tokens.shape[0])
        pool, logits = nnx.merge(graph, state)(pool, tokens, batch, rows)
        return table, pool, logits, ok

    return step


def paged_logits(model, sequences, chunks, dtype=jnp.float32):
    """Prefill the first tokens in chunks, decode the others; all logits per slot."""
    table, pool = start(model.config, dtype)
    step = make_step(model)
    got = [[] for _ in sequences]
    done = np.zeros(len(sequences), np.int32)
    size = max(map(sum, chunks)) + 1
    for chunk in chunks:
        lens = np.array(chunk, np.int32)
        tokens = [s[d : d + n] for s, d, n in zip(sequences, done, chunk, strict=True)]
        packed = np.concatenate([*tokens, np.full(size - lens.sum(), 49)])
        table, pool, logits, ok = step(table, pool, packed.astype(np.int32), lens)
        assert ok.all()
        for i, end in enumerate(np.cumsum(lens)):
            got[i].extend(np.asarray(logits)[end - lens[i] : end])
        done += lens
    while (done < [len(s) for s in sequences]).any():
        active = np.array([d < len(s) for d, s in zip(done, sequences, strict=True)])
        tokens = [s[min(d, len(s) - 1)] for s, d in zip(sequences, done, strict=True)]
        table, pool, logits, ok = step(table, pool, np.array(tokens, np.int32), active)
        assert ok.all()
        for i in np.flatnonzero(active):
            got[i].append(np.asarray(logits)[i])
        done += active
    return [np.stack(rows) for rows in got]


def random_sequences():
    rng = np.random.default_rng(7)
    return [rng.integers(0, BASE.vocab_size, n) for n in LENGTHS]


@pytest.mark.parametrize(
    "family", [pytest.param("smollm2", marks=pytest.mark.core), *sorted(OTHERS)]
)
def test_prefill_in_chunks_then_decode_equals_dense(family):
    config = dataclasses.replace(BASE, **FAMILIES[family])
    weights = random_weights(config)
    sequences = random_sequences()
    model = Llama(config, weights=weights.__getitem__)
    got = paged_logits(model, sequences, chunks=[(5, 0), (4, 3), (3, 1)])
    for tokens, rows in zip(sequences, got, strict=True):
        want = dense_logits(config, weights, tokens)
        assert rows.dtype == np.float32
        np.testing.assert_allclose(rows, want, rtol=0, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize(
    "change",
    [
        {"window": None},
        {"rope_divisors": None},
        {"rope_theta": 1e4},
        {"rms_eps": 1e-5},
        {"qkv_bias": False},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_comparison_would_notice_an_ignored_option(change):
    options = {"window": 5, "rope_divisors": STRETCHED} | FAMILIES["qwen2"]
    config = dataclasses.replace(BASE, **options)
    weights = random_weights(config)
    tokens = random_sequences()[0]
    other = dataclasses.replace(config, **change)
    given = {**random_weights(other), **weights}
    if "qkv_bias" in change:
        given = {k: v for k, v in weights.items() if not k.endswith("bias")}
    full = dense_logits(config, weights, tokens)
    assert (
        np.abs(full - dense_logits(other, given, tokens)).max()
        > 1e-3 * np.abs(full).max()
    )


def test_stacked_parameters_give_the_same_logits():
    weights = random_weights(BASE)
    sequences = random_sequences()
    both = [
        paged_logits(
            Llama(BASE, weights=weights.__getitem__, stacked=stacked),
            sequences,
            chunks=[LENGTHS],
        )
        for stacked in (False, True)
    ]
    for one, two in zip(*both, strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-5)


def test_rows_selects_logits_and_padding_may_hold_any_token_id():
    model = Llama(BASE, weights=random_weights(BASE).__getitem__)
    table, pool = start(BASE)
    step = make_step(model)
    lens = np.array([5, 3], np.int32)
    tokens = np.arange(10, dtype=np.int32)
    _, pool_a, every, _ = step(table, pool, tokens, lens)
    tokens[8:] = (-7, 2**30)
    rows = np.array([7, 4], np.int32)
    _, pool_b, some, _ = step(table, pool, tokens, lens, rows)
    assert some.shape == (2, BASE.vocab_size)
    assert np.isfinite(some).all()
    np.testing.assert_allclose(some, np.asarray(every)[rows], rtol=0, atol=1e-5)
    np.testing.assert_allclose(pool_a.k_pages, pool_b.k_pages, rtol=0, atol=1e-6)


def test_bfloat16_follows_float32():
    weights = random_weights(BASE)
    sequences = random_sequences()
    model = Llama(BASE, weights=weights.__getitem__, dtype=jnp.bfloat16)
    got = paged_logits(model, sequences, chunks=[LENGTHS], dtype=jnp.bfloat16)
    for tokens, rows in zip(sequences, got, strict=True):
        want = dense_logits(BASE, weights, tokens)
        assert rows.dtype == np.float32
        correlation = np.corrcoef(rows.ravel(), want.ravel())[0, 1]
        assert correlation > 0.999


@pytest.mark.parametrize("num_layers", [1, 7])
def test_depth_does_not_add_traces_of_a_layer(num_layers, monkeypatch):
    calls = []

    def counting(*args, **options):
        calls.append(None)
        return attend(*args, **options)

    attend = llama_module.attend
    monkeypatch.setattr(llama_module, "attend", counting)
    config = dataclasses.replace(BASE, num_layers=num_layers)
    model = Llama(config, weights=random_weights(config).__getitem__)
    paged_logits(model, random_sequences(), chunks=[LENGTHS])
    assert len(calls) == 1


@pytest.mark.parametrize("num_tokens", [1, 8])
def test_no_matrix_is_copied_or_transposed_in_a_step(num_tokens):
    """XLA:CPU reads every matrix in place: a copy would double the step's traffic."""
    config = dataclasses.replace(
        BASE, hidden_size=97, ffn_size=163, vocab_size=501, tied_embeddings=True
    )
    model = Llama(config, rngs=nnx.Rngs(0))
    table, pool = start(config)
    graph, state = nnx.split(model)

    def step(state, pool, table, tokens):
        lens = jnp.array([num_tokens, 0])
        batch = pack_ragged(table, lens, num_tokens=num_tokens)
        return nnx.merge(graph, state)(pool, tokens, batch)

    tokens = jnp.zeros(num_tokens, jnp.int32)
    lowered = jax.jit(step, donate_argnums=1).lower(state, pool, table, tokens)
    hlo = lowered.compile().as_text()
    matrices = [501 * 97, 64 * 97, 97 * 32, 326 * 97, 163 * 97]
    seen = set()
    for shape, operation in re.findall(r"= f32\[([\d,]+)\]\S* (\w[\w-]*)\(", hlo):
        size = np.prod([int(n) for n in shape.split(",")])
        if size in matrices:
            assert operation in ("parameter", "get-tuple-element", "bitcast"), shape
            seen.add(size)
    assert seen == set(matrices)
    # Of a few rows the matrix is the left operand, so that it is not repacked.
    products = re.findall(r"= f32\[(\d+),(\d+)\]\S* dot\(", hlo)
    if num_tokens > 1:
        assert {int(rows) for rows, _ in products} == {64, 97, 326, 501}
        assert {int(columns) for _, columns in products} == {num_tokens}


def test_llama3_stretching_follows_the_published_cases():
    for name in ("llama-3.1-8b", "llama-3.2-1b"):
        config = CONFIGS[name]
        factor = {"llama-3.1-8b": 8.0, "llama-3.2-1b": 32.0}[name]
        half = config.head_dim // 2
        want = [
            llama3_frequency(config.rope_theta ** (-i / half), factor, 1.0, 4.0, 8192)
            for i in range(half)
        ]
        np.testing.assert_allclose(rope_frequencies(config), want, rtol=1e-6)


def test_presets_have_the_published_number_of_parameters():
    published = {
        "llama-2-7b": 6_738_415_616,
        "llama-2-13b": 13_015_864_320,
        "llama-2-70b": 68_976_648_192,
        "llama-3-8b": 8_030_261_248,
        "llama-3.1-8b": 8_030_261_248,
        "llama-3.2-1b": 1_235_814_400,
        "llama-3.2-3b": 3_212_749_824,
        "smollm2-135m": 134_515_008,
        "smollm2-360m": 361_821_120,
        "smollm2-1.7b": 1_711_376_384,
        "qwen2.5-0.5b": 494_032_768,
        "qwen2.5-1.5b": 1_543_714_304,
        "qwen2-7b": 7_615_616_512,
        "mistral-7b-v0.1": 7_241_732_096,
        "mistral-7b-v0.3": 7_248_023_552,
    }
    assert published.keys() == CONFIGS.keys()
    for name, count in published.items():
        shapes = weight_shapes(CONFIGS[name])
        assert sum(int(np.prod(shape)) for _, shape in shapes) == count, name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 5}, "num_heads must be a multiple of num_kv_heads, got 5 and 2"),
        ({"head_dim": 7}, "head_dim must be even, got 7"),
        ({"num_layers": 0}, "num_layers must be in"),
        ({"vocab_size": 2**31}, "vocab_size must be in"),
        ({"hidden_size": 24.0}, "hidden_size must be an int, got 24.0"),
        ({"window": 0}, "window must be in"),
        ({"rope_theta": float("nan")}, "rope_theta must be in"),
        ({"rope_theta": 10**400}, "rope_theta must be in"),
        ({"rms_eps": -1e-5}, "rms_eps must be in"),
        ({"rope_divisors": (1.0,)}, "rope_divisors must be 4 positive numbers"),
        ({"rope_divisors": (1.0, 0.0, 1.0, 1.0)}, "rope_divisors must be 4 positive"),
    ],
)
def test_bad_config_names_the_field_and_the_number(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(BASE, **change)


def test_config_is_hashable_and_equal_by_value():
    assert hash(BASE) == hash(dataclasses.replace(BASE))
    assert BASE == dataclasses.replace(BASE)


def test_model_needs_exactly_one_source_of_weights():
    with pytest.raises(ValueError, match="exactly one of rngs and weights"):
        Llama(BASE)
    with pytest.raises(ValueError, match="exactly one of rngs and weights"):
        Llama(BASE, rngs=nnx.Rngs(0), weights=random_weights(BASE).__getitem__)


def test_llama3_rope_divisors_refuses_impossible_factors():
    with pytest.raises(ValueError, match="low_freq_factor < high_freq_factor"):
        llama3_rope_divisors(
            head_dim=8,
            rope_theta=1e4,
            factor=8.0,
            low_freq_factor=4.0,
            high_freq_factor=4.0,
            original_max_seq_len=64,
        )
