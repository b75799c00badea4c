"""Self-consistency: sample many answers to each question and take the vote.

Run it: python examples/best_of_n.py

Sampling a model several times and taking its most frequent answer beats taking one
sample (arXiv:2203.11171). The model here is a noisy one: it adds two numbers and errs
in each digit with some probability, so that the gain can be seen in a second. What
matters is the call: all samples of all questions are one `rollout`, the question's
pages are shared by its samples, and a sample's row goes to the next one when it ends.

For a real model replace `NOISY` and `encode`: `model, params =
pagedjax.models.load_model(...).model.paged()`.
"""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np

import pagedjax as pj

DIGITS, PLUS, EQUALS, END = 10, 10, 11, 12  # tokens 0..9 are digits
VOCAB, WIDTH, SAMPLES = 13, 3, 32
ERROR = 0.35  # probability of a wrong digit


def noisy_adder(params, pool, tokens, batch, rows):
    """Reads `a + b =` and its answer so far back from the pages; adds with errors."""
    pool = pj.write_kv(
        pool,
        0,
        *(tokens.astype(jnp.float32)[:, None, None],) * 2,
        batch.pages,
        batch.offsets,
    )
    slots = jnp.arange(tokens.shape[0])
    if batch.cu_q_lens is not None:
        slots = jnp.searchsorted(batch.cu_q_lens[1:], slots, side="right")
    places = jnp.arange(2 * WIDTH + 2)  # three digits, plus, three digits, equals
    pages = batch.page_indices.at[slots[:, None], (places // pool.page_size)[None]].get(
        mode="clip"
    )
    held = pool.k_pages.at[pages, (places % pool.page_size)[None], 0, 0].get(
        mode="fill", fill_value=0
    )
    powers = 10 ** jnp.arange(WIDTH - 1, -1, -1)
    digits = held.astype(jnp.int32)
    total = digits[:, :WIDTH] @ powers + digits[:, WIDTH + 1 : -1] @ powers
    nth = batch.positions - (2 * WIDTH + 1)  # which digit of the answer comes next
    digit = total // 10 ** jnp.clip(WIDTH - nth, 0, WIDTH) % 10
    right = jnp.where(nth > WIDTH, END, digit)
    share = jnp.where(nth > WIDTH, 0.0, params["error"])[:, None]
    others = (jnp.arange(VOCAB) < DIGITS)[None, :] * share / DIGITS
    probs = jax.nn.one_hot(right, VOCAB) * (1 - share) + others
    logits = jnp.log(jnp.maximum(probs, 1e-30))
    return pool, logits if rows is None else logits[rows]


NOISY = pj.PagedModel(
    noisy_adder, num_layers=1, num_kv_heads=1, head_dim=1, vocab_size=VOCAB
)


def encode(a, b):
    """Writes `a + b =` as tokens, the numbers with `WIDTH` digits."""
    return [*map(int, f"{a:0{WIDTH}}"), PLUS, *map(int, f"{b:0{WIDTH}}"), EQUALS]


def decode(tokens):
    """Reads an answer, or gives None for what is not a number."""
    digits = [token for token in tokens if token < DIGITS]
    return int("".join(map(str, digits))) if digits else None


def answer(questions, num_samples=SAMPLES):
    """Samples answers to every question; gives them and the statistics."""
    out = pj.rollout(
        NOISY,
        {"error": jnp.float32(ERROR)},
        np.array([encode(a, b) for a, b in questions], np.int32),
        key=jax.random.key(0),
        max_new_tokens=WIDTH + 2,
        num_samples=num_samples,
        num_slots=64,
        temperature=1.0,
        eos_ids=[END],
        page_size=4,
    )
    answers = [[decode(tokens) for tokens in group] for group in out.tokens.tolist()]
    return answers, out.stats


def vote(answers):
    """Gives the most frequent answer and its share."""
    ((winner, count),) = Counter(answers).most_common(1)
    return winner, count / len(answers)


def main(num_questions=20):
    rng = np.random.default_rng(0)
    questions = rng.integers(0, 1000, (num_questions, 2)).tolist()
    answers, stats = answer(questions)
    first = voted = 0
    for (a, b), group in zip(questions, answers, strict=True):
        winner, share = vote(group)
        first += group[0] == a + b
        voted += winner == a + b
        print(f"{a:3} + {b:3} = {winner:4}  ({share:4.0%} of {len(group)} samples)")
    print(f"one sample right: {first} of {num_questions}")
    print(f"the vote right:   {voted} of {num_questions}")
    print(
        f"prompt tokens run through the model: {int(stats.tokens_fed)}, shared:"
        f" {int(stats.tokens_forked + stats.tokens_found)}"
    )
    return first, voted


if __name__ == "__main__":
    main()
