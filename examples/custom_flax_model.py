"""Your own Flax model on a paged KV cache: what changes, in NNX and in Linen.

Run it: python examples/custom_flax_model.py

A small decoder is written as anybody would, with Flax's own attention. Then the same
parameters run paged. Three prompts of different lengths are prefilled together without
padding and decoded together; the tokens are those that the dense model gives when it
recomputes everything for each of them.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

import pagedjax as pj
import pagedjax.linen
import pagedjax.nnx

VOCAB, FEATURES, HEADS, LAYERS = 64, 32, 4, 2
PROMPTS = [[3, 14, 15, 9, 26], [5, 35], [8, 9, 7, 9, 3, 23, 8, 46, 26]]
NEW_TOKENS = 16


# --- NNX: the model you have -------------------------------------------------


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(FEATURES, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS, FEATURES, decode=False, rngs=rngs
        )
        self.mlp = nnx.Linear(FEATURES, FEATURES, rngs=rngs)


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, FEATURES, rngs=rngs)
        self.blocks = nnx.List(Block(rngs) for _ in range(LAYERS))
        self.head = nnx.Linear(FEATURES, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block.attention(block.norm(x), is_causal=True)
            x = x + nnx.gelu(block.mlp(x))
        return self.head(x)


# --- NNX: what you write to make it paged ------------------------------------


class PagedDecoder(nnx.Module):
    def __init__(self, dense):
        self.dense = dense
        self.attention = nnx.List(
            pagedjax.nnx.PagedAttention.from_dense(block.attention, layer=i)
            for i, block in enumerate(dense.blocks)
        )

    def __call__(self, pool, tokens, batch, rows=None):
        x = self.dense.embed(tokens)
        for block, attention in zip(self.dense.blocks, self.attention, strict=True):
            pool, y = attention(pool, block.norm(x), batch)
            x = x + y
            x = x + nnx.gelu(block.mlp(x))
        return pool, self.dense.head(x if rows is None else x[rows])


# --- Linen: the model you have -----------------------------------------------


class LinenDecoder(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, FEATURES, name="embed")(tokens)
        for i in range(LAYERS):
            attention = nn.MultiHeadDotProductAttention(HEADS, name=f"attention_{i}")
            y = nn.LayerNorm(name=f"norm_{i}")(x)
            x = x + attention(y, mask=nn.make_causal_mask(tokens))
            x = x + nn.gelu(nn.Dense(FEATURES, name=f"mlp_{i}")(x))
        return nn.Dense(VOCAB, name="head")(x)


# --- Linen: what you write to make it paged ----------------------------------


class PagedLinenDecoder(nn.Module):
    @nn.compact
    def __call__(self, pool, tokens, batch, rows=None):
        x = nn.Embed(VOCAB, FEATURES, name="embed")(tokens)
        for i in range(LAYERS):
            attention = pagedjax.linen.PagedAttention(
                HEADS, layer=i, name=f"attention_{i}"
            )
            pool, y = attention(pool, nn.LayerNorm(name=f"norm_{i}")(x), batch)
            x = x + y
            x = x + nn.gelu(nn.Dense(FEATURES, name=f"mlp_{i}")(x))
        x = x if rows is None else x[rows]
        return pool, nn.Dense(VOCAB, name="head")(x)


# --- one loop for both: prefill, then one token per step ---------------------


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(2, 3))
def prefill(apply, params, table, pool, tokens, lens):
    """All prompts at once: `tokens` is one prompt after the other."""
    table, _, ok = pj.append(table, lens)
    batch = pj.pack_ragged(table, lens, num_tokens=tokens.shape[0])
    pool, logits = apply(params, pool, tokens, batch, batch.last_rows)
    return table, pool, jnp.argmax(logits, axis=-1), ok


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(2, 3))
def decode(apply, params, table, pool, tokens):
    """One more token for every slot."""
    every = jnp.ones((table.max_slots,), jnp.int32)
    table, plan, ok = pj.append(table, every, max_tokens=1)
    pool = pj.copy_pages(pool, plan)  # only a forked slot has anything to copy
    batch = pj.pack_decode(table, every > 0)
    pool, logits = apply(params, pool, tokens, batch)
    return table, pool, jnp.argmax(logits, axis=-1), ok


def generate(apply, params):
    """Continues PROMPTS greedily; returns their tokens and how many pages they took."""
    table = pj.init_page_table(
        num_pages=32, page_size=4, max_slots=len(PROMPTS), pages_per_slot=8
    )
    pool = pj.init_kv_pool(
        num_layers=LAYERS,
        num_pages=32,
        page_size=4,
        num_kv_heads=HEADS,
        head_dim=FEATURES // HEADS,
    )
    packed = jnp.array([token for prompt in PROMPTS for token in prompt])
    lens = jnp.array([len(prompt) for prompt in PROMPTS])
    table, pool, tokens, ok = prefill(apply, params, table, pool, packed, lens)
    new = [tokens]
    while len(new) < NEW_TOKENS and ok.all():  # False: the pool is full
        table, pool, tokens, ok = decode(apply, params, table, pool, tokens)
        new.append(tokens)
    rows = jnp.stack(new, axis=1).tolist()
    return [p + r for p, r in zip(PROMPTS, rows, strict=True)], pj.num_used_pages(table)


def generate_dense(dense):
    """The same without a cache: the whole sequence again for every token."""
    results = []
    for prompt in PROMPTS:
        row = list(prompt)
        while len(row) < len(prompt) + NEW_TOKENS:
            padded = row + [0] * (32 - len(row))  # one shape, one compilation
            row.append(int(jnp.argmax(dense(jnp.array([padded]))[0, len(row) - 1])))
        results.append(row)
    return results


def main():
    dense = Decoder(nnx.Rngs(0))
    apply, params = pagedjax.nnx.functional(PagedDecoder(dense))
    report("NNX", generate(apply, params), generate_dense(nnx.jit(dense)))

    linen = LinenDecoder()
    variables = linen.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    apply, params = pagedjax.linen.functional(PagedLinenDecoder(), variables)
    run = jax.jit(functools.partial(linen.apply, variables))
    report("Linen", generate(apply, params), generate_dense(run))


def report(name, paged, dense):
    sequences, pages = paged
    print(f"{name}: {len(sequences)} sequences in {int(pages)} pages of 4 tokens")
    for prompt, row in zip(PROMPTS, sequences, strict=True):
        print(f"  {prompt} -> {row[len(prompt) :]}")
    print(f"  paged == dense: {sequences == dense}")


if __name__ == "__main__":
    main()
