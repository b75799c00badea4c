"""A policy trained by reinforcement learning, its rollouts from the paged cache.

Run it: python examples/grpo.py

The task is a toy: after a prompt of digits, keep producing its largest digit. The
reward is the share of the tokens that do. Each step

1. samples 8 continuations of each of 32 prompts, `rollout`: one jitted call, prompts
   prefilled once and shared by their samples;
2. scores them, and compares each with the others of its prompt: the advantage is the
   reward less the group's mean (GRPO, arXiv:2402.03300), not divided by the group's
   deviation, which makes much of groups that hardly differ (arXiv:2503.20783);
3. takes one step of Adam on the policy gradient, with the same parameters the rollout
   has used, in the same process: there is no second copy of the weights to update.

A bonus for entropy, which fades with the rate of learning, keeps the policy from
settling on one digit for all prompts: from then on all samples of a group would agree,
and there would be nothing left to learn from.

The trainer runs the same Flax module without a cache. That its log-probabilities are
those the rollout reports, so that the importance ratio is 1, is checked at every step.
The reward is drawn to build/grpo.svg.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import pagedjax as pj
import pagedjax.nnx

VOCAB, FEATURES, HEADS = 10, 48, 4
LENGTH, NEW, PROMPTS, SAMPLES, STEPS = 6, 8, 32, 8, 160
RATE, ENTROPY = 1e-2, 0.05  # at first; both fall to 0 in a straight line
PLOT = Path(__file__).parents[1] / "build" / "grpo.svg"


class Policy(nnx.Module):
    """One block of attention and an MLP; with a pool it runs on pages."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, FEATURES, rngs=rngs)
        self.place = nnx.Embed(LENGTH + NEW, FEATURES, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS, FEATURES, decode=False, rngs=rngs
        )
        self.paged = pagedjax.nnx.PagedAttention.from_dense(self.attention, layer=0)
        self.up = nnx.Linear(FEATURES, 4 * FEATURES, rngs=rngs)
        self.down = nnx.Linear(4 * FEATURES, FEATURES, rngs=rngs)
        self.head = nnx.Linear(FEATURES, VOCAB, rngs=rngs)

    def __call__(self, pool, tokens, batch, rows=None):
        x = self.embed(tokens) + self.place(batch.positions)
        pool, y = self.paged(pool, x, batch)
        x = self.finish(x + y)
        return pool, self.head(x if rows is None else x[rows])

    def dense(self, tokens):
        """Logits of whole sequences [B, T], for the gradient."""
        x = self.embed(tokens) + self.place(jnp.arange(tokens.shape[1]))[None]
        x = self.finish(x + self.attention(x, is_causal=True))
        return self.head(x)

    def finish(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


def make_policy():
    """Gives the policy as `rollout` takes it, its parameters and the trainer's view."""
    apply, params = pagedjax.nnx.functional(Policy(nnx.Rngs(0)))
    model = pj.PagedModel(
        apply,
        num_layers=1,
        num_kv_heads=HEADS,
        head_dim=FEATURES // HEADS,
        vocab_size=VOCAB,
    )
    return model, params, lambda params, x: nnx.merge(apply.graphdef, params).dense(x)


def rewards_of(prompts, tokens):
    """Counts the share of tokens that are their prompt's largest digit."""
    return jnp.mean(tokens == jnp.max(prompts, axis=1)[:, None, None], axis=-1)


def loss_of(params, dense, prompts, tokens, mask, advantages, bonus):
    """Computes the policy-gradient loss, and the log-probabilities of the tokens.

    `mask` tells which tokens were produced: none after an end token. The task here has
    none, so that all were.
    """
    n = tokens.shape[1]
    flat = tokens.reshape(-1, NEW)
    sequences = jnp.concatenate([jnp.repeat(prompts, n, axis=0), flat], axis=1)
    # The logits at a place are those of the next token: from the prompt's last on.
    every = jax.nn.log_softmax(dense(params, sequences)[:, LENGTH - 1 : -1])
    logprobs = jnp.take_along_axis(every, flat[..., None], axis=-1)[..., 0]
    logprobs = logprobs.reshape(tokens.shape)
    entropy = -jnp.sum(jnp.exp(every) * every, axis=-1).reshape(tokens.shape)
    gains = advantages[..., None] * logprobs + bonus * entropy
    return -jnp.sum(gains * mask) / jnp.sum(mask), logprobs


@functools.partial(jax.jit, static_argnums=0)
def train_step(dense, params, moments, step, left, prompts, tokens, mask):
    """Scores the samples within their groups and takes one step of Adam.

    `left` is the share of the training that is still to come.
    """
    rewards = rewards_of(prompts, tokens)
    advantages = rewards - jnp.mean(rewards, axis=1, keepdims=True)
    (_, logprobs), grads = jax.value_and_grad(loss_of, has_aux=True)(
        params, dense, prompts, tokens, mask, advantages, left * ENTROPY
    )
    first, second = moments
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
    second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, second, grads)

    def move(p, m, v):
        m, v = m / (1 - 0.9**step), v / (1 - 0.99**step)
        return p - left * RATE * m / (jnp.sqrt(v) + 1e-8)

    params = jax.tree.map(move, params, first, second)
    return params, (first, second), jnp.mean(rewards), logprobs


def train(num_steps=STEPS, seed=0):
    """Trains the policy; returns the mean reward of each step."""
    model, params, dense = make_policy()
    moments = (jax.tree.map(jnp.zeros_like, params),) * 2
    rng = np.random.default_rng(seed)
    key = jax.random.key(seed)
    curve = []
    for step in range(1, num_steps + 1):
        prompts = rng.integers(0, VOCAB, (PROMPTS, LENGTH), dtype=np.int32)
        out = pj.rollout(
            model,
            params,
            prompts,
            key=jax.random.fold_in(key, step),
            max_new_tokens=NEW,
            num_samples=SAMPLES,
            num_slots=64,
            temperature=1.0,
            page_size=4,
        )
        left = 1 - (step - 1) / num_steps
        mask = np.arange(NEW) < np.asarray(out.lengths)[..., None]
        params, moments, reward, logprobs = train_step(
            dense, params, moments, float(step), left, prompts, out.tokens, mask
        )
        # On-policy to the bit would need equal orders of summation; this is close.
        ratios = np.exp(np.asarray(logprobs) - np.asarray(out.logprobs))
        np.testing.assert_allclose(ratios[mask], 1, atol=1e-3)
        curve.append(float(reward))
        if step % 20 == 0 or step == 1:
            print(f"step {step:3}  mean reward {reward:.2f}  {'#' * int(40 * reward)}")
    return curve


def draw(curve):
    """Draws the reward over the steps as an SVG."""
    xs = np.linspace(20, 620, len(curve))
    points = " ".join(
        f"{x:.1f},{220 - 200 * y:.1f}" for x, y in zip(xs, curve, strict=True)
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="640" height="240"'
        ' font-family="sans-serif" font-size="12">'
        '<rect x="20" y="20" width="600" height="200" fill="none" stroke="#999"/>'
        f'<polyline points="{points}" fill="none" stroke="#1b6ca8" stroke-width="2"/>'
        f'<text x="24" y="34">mean reward, 0 to 1, over {len(curve)} steps</text>'
        "</svg>\n"
    )


def main():
    curve = train()
    PLOT.parent.mkdir(exist_ok=True)
    PLOT.write_text(draw(curve))
    last = np.mean(curve[-STEPS // 4 :])
    print(f"reward {curve[0]:.2f} -> {last:.2f}; drawn to {PLOT}")


if __name__ == "__main__":
    main()
