"""`generate` and `rollout` with a Llama on a (data, tensor) mesh against one device.

Each pair of devices has prompts, a page table and pools of its own, and each device of
a pair half of the kv heads.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as Spec

import pagedjax as pj
from pagedjax.models import Llama, LlamaConfig

CONFIG = LlamaConfig(
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    hidden_size=24,
    ffn_size=40,
    vocab_size=50,
    max_seq_len=64,
)
# The third pair of prompts starts alike: the prefix index has something to find.
PROMPTS = [[7, 3, 9, 1, 30, 2], [11], [5, 6, 7, 8, 9, 1], [5, 6, 7, 8, 4]]
OPTIONS: dict[str, Any] = dict(
    max_new_tokens=7, num_samples=2, temperature=1.0, page_size=4, eos_ids=[4, 38]
)


def call(run: str, model: Any, params: Any, *arrays: jax.Array) -> Any:
    """Runs a function of the library; gives what each sample produced."""
    prompts, lens, seeds = arrays
    options = OPTIONS | ({"num_slots": 3} if run == "rollout" else {})
    out = getattr(pj, run)(
        model, params, prompts, lens, jax.random.key(5), seeds=seeds, **options
    )
    return out.tokens, out.lengths, out.status, out.logprobs


def make_arrays() -> tuple[jax.Array, ...]:
    """Gives prompts, their lengths, and their seeds."""
    prompts = np.zeros((4, 6), np.int32)
    for row, prompt in zip(prompts, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    lens = jnp.array([len(prompt) for prompt in PROMPTS], jnp.int32)
    return jnp.asarray(prompts), lens, jnp.arange(4, dtype=jnp.int32)


@pytest.fixture(scope="module")
def want() -> Any:
    """What one device generates; a rollout has the same tokens."""
    model, params = Llama(CONFIG, rngs=nnx.Rngs(0)).paged()
    return call("generate", model, params, *make_arrays())


@pytest.mark.parametrize("run", ["generate", "rollout"])
def test_two_by_two_devices_give_the_tokens_of_one(run: str, want: Any) -> None:
    llama = Llama(CONFIG, rngs=nnx.Rngs(0))
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))
    model, params, specs = llama.sharded(mesh)
    sharded = jax.shard_map(
        lambda *args: call(run, model, *args),
        mesh=mesh,
        in_specs=(specs, *[Spec("data")] * 3),
        out_specs=Spec("data"),
    )
    got = jax.jit(sharded)(params, *make_arrays())
    for mine, theirs in zip(got[:3], want[:3], strict=True):
        assert mine.tolist() == theirs.tolist()
    np.testing.assert_allclose(got[3], want[3], atol=1e-4)
    assert len(set(want[1].ravel().tolist())) > 1  # they do not all end together
