"""A small model on the paged cache, and the same in NumPy without one."""

import jax
import jax.numpy as jnp
import numpy as np

import pagedjax as pj

LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2, 4, 2, 4, 40
WIDTH = HEADS * HEAD_DIM


def make_params(seed=0):
    """Draws weights; the scores are large enough that attention is not uniform."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    return {
        "embed": draw(VOCAB, WIDTH),
        "place": 0.3 * draw(64, WIDTH),
        "head": draw(WIDTH, VOCAB),
        "layers": [
            {
                "q": 0.6 * draw(WIDTH, HEADS, HEAD_DIM),
                "k": 0.6 * draw(WIDTH, KV_HEADS, HEAD_DIM),
                "v": draw(WIDTH, KV_HEADS, HEAD_DIM),
            }
            for _ in range(LAYERS)
        ],
    }


def apply(params, pool, tokens, batch, rows=None):
    """Runs the model on a packed batch."""
    x = params["embed"][tokens] + params["place"][batch.positions]
    for i, layer in enumerate(params["layers"]):
        q, k, v = (jnp.einsum("te,ehd->thd", x, layer[name]) for name in "qkv")
        pool, out = pj.attend(pool, i, q, k, v, batch)
        x = jnp.tanh(x + out.reshape(out.shape[0], WIDTH))
    x = x if rows is None else x[rows]
    return pool, x @ params["head"]


def poisoned(params, pool, tokens, batch, rows=None):
    """Runs the model after writing NaN wherever the batch owns nothing."""
    num_pages, page_size = pool.num_pages, pool.k_pages.shape[1]
    places = np.arange(batch.page_indices.shape[1] * page_size)
    owned = jnp.zeros((num_pages, page_size), bool)
    owned = owned.at[
        batch.page_indices[:, places // page_size], places[None, :] % page_size
    ].max(places[None, :] < batch.seq_lens[:, None], mode="drop")
    owned = jnp.tile(owned, (LAYERS, 1))[:, :, None, None]
    pool = jax.tree.map(lambda pages: jnp.where(owned, pages, jnp.nan), pool)
    return apply(params, pool, tokens, batch, rows)


def paged(apply=apply, max_seq_len=None):
    """Gives the model as `generate` takes it."""
    return pj.PagedModel(
        apply, LAYERS, KV_HEADS, HEAD_DIM, VOCAB, max_seq_len=max_seq_len
    )


def dense_logits(params, tokens):
    """Computes float64[T, V] for one sequence, all tokens at once."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    x = params["embed"][tokens] + params["place"][: len(tokens)]
    causal = np.tril(np.ones((len(tokens), len(tokens)), bool))
    for layer in params["layers"]:
        q, k, v = (np.einsum("te,ehd->htd", x, layer[name]) for name in "qkv")
        k, v = (np.repeat(heads, HEADS // KV_HEADS, axis=0) for heads in (k, v))
        scores = np.where(causal, q @ k.swapaxes(1, 2) / np.sqrt(HEAD_DIM), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out = weights / weights.sum(-1, keepdims=True) @ v
        x = np.tanh(x + out.swapaxes(0, 1).reshape(len(tokens), WIDTH))
    return x @ params["head"]


def dense_logprobs(params, prompt, tokens):
    """Gives the log-probability of each token after the prompt and those before."""
    tokens = list(tokens)
    logits = dense_logits(params, [*prompt, *tokens])[len(prompt) - 1 : -1]
    total = np.log(np.sum(np.exp(logits), axis=1))
    return logits[np.arange(len(tokens)), tokens] - total


def dense_greedy(params, prompt, num_tokens):
    """Gives the likeliest continuation."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(dense_logits(params, tokens)[-1].argmax()))
    return tokens[len(prompt) :]
