"""What quantised pages cost in accuracy and save in memory, with SmolLM2-135M.

The model, in float32, continues four prompts greedily on float32 pages. The whole text
is then fed again on pages of each dtype, and the logits of the continuation compared:
the root mean square of their difference over the standard deviation of the logits, and
how often the most likely token is the same. `ratio` is the size of a token's keys and
values, scales included, over that in bfloat16.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pagedjax as pj
from benchmarks import _models
from benchmarks._harness import Case, run_cli

PAGE_SIZE = 16
NEW_TOKENS = 96
DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")
PROMPTS = (
    "A page table maps the addresses that a program uses to places in memory. It",
    "To bake a simple bread you need flour, water, yeast and salt. First,",
    "The three longest rivers of the world are",
    "def fibonacci(n):\n    '''Return the n-th Fibonacci number.'''\n",
)


def main() -> Iterator[Case]:
    """Yields the cases."""
    model, params, loaded = _models.load()
    ids = [loaded.tokenizer.encode(text) for text in PROMPTS]
    lens = np.array([len(i) for i in ids], np.int32)
    prompts = np.zeros((len(ids), lens.max()), np.int32)
    for row, tokens in enumerate(ids):
        prompts[row, : len(tokens)] = tokens
    out = pj.generate(model, params, prompts, lens, max_new_tokens=NEW_TOKENS)
    texts = [
        np.concatenate([tokens, np.asarray(new)])
        for tokens, new in zip(ids, out.tokens[:, 0], strict=True)
    ]
    # The logits that chose a continued token: from the prompt's last on.
    wanted = [np.arange(n - 1, n + NEW_TOKENS - 1) for n in lens]
    starts = np.cumsum([0, *(len(text) for text in texts[:-1])])
    rows = np.concatenate([a + b for a, b in zip(starts, wanted, strict=True)])
    read = functools.partial(_logits, model, params, texts, rows)
    exact = read("float32")
    narrow = _bytes_per_token(model, "bfloat16")
    for dtype in DTYPES:
        logits = read(dtype)
        settings = dict(dtype=dtype, positions=len(rows), page_size=PAGE_SIZE)
        error = np.sqrt(np.mean((logits - exact) ** 2)) / np.std(exact)
        same = np.mean(logits.argmax(axis=-1) == exact.argmax(axis=-1))
        size = _bytes_per_token(model, dtype)
        name = f"{dtype} pages"
        yield Case(f"{name}: logit error", 100 * float(error), "%", settings=settings)
        yield Case(f"{name}: same token", 100 * float(same), "%", settings=settings)
        yield Case(
            f"{name}: keys and values of a token",
            size,
            "bytes",
            "of bfloat16",
            size / narrow,
            settings,
        )


def _logits(
    model: pj.PagedModel, params: Any, texts: list, rows: np.ndarray, dtype: str
) -> np.ndarray:
    """Feeds the texts in one step; gives float64[len(rows), V]."""
    lens = jnp.array([len(text) for text in texts], jnp.int32)
    width = -(-int(lens.max()) // PAGE_SIZE)
    table = pj.init_page_table(
        num_pages=width * len(texts),
        page_size=PAGE_SIZE,
        max_slots=len(texts),
        pages_per_slot=width,
    )
    pool = _init_pool(model, dtype, table.num_pages)
    tokens = jnp.asarray(np.concatenate(texts), jnp.int32)

    @jax.jit
    def run(params: Any, pool: pj.KVPool) -> jax.Array:
        held, _, _ = pj.append(table, lens)
        batch = pj.pack_ragged(held, lens, num_tokens=tokens.shape[0])
        return model.apply(params, pool, tokens, batch, jnp.asarray(rows))[1]

    return np.asarray(run(params, pool), np.float64)


def _init_pool(model: pj.PagedModel, dtype: str, num_pages: int) -> pj.KVPool:
    return pj.init_kv_pool(
        num_layers=model.num_layers,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=dtype,
    )


def _bytes_per_token(model: pj.PagedModel, dtype: str) -> int:
    pool = jax.eval_shape(lambda: _init_pool(model, dtype, 1))
    leaves = jax.tree.leaves(pool)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) // PAGE_SIZE


if __name__ == "__main__":
    run_cli(main)
