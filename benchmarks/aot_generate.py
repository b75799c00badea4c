"""`generate` and `rollout` on a (data, tensor) mesh, compiled ahead of time.

A whole call is one program: its pool, its table and every loop are inside, nothing is
donated. So the pool is a temporary of it; what is reported is what there is beside one
pool, and a second copy of it would be more than the harness allows. Each row of devices
has prompts, a table and a pool of its own; the kv heads are split along it. The widths
of heads are those of real models, the number of layers is not: a scan compiles one
layer however many there are.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import pagedjax as pj
from benchmarks.aot_compile import Compiled, compile_for, make_mesh
from benchmarks.aot_models import Step, _abstract, _spec_of
from pagedjax.models import LlamaConfig
from pagedjax.nnx import FunctionalModel

_CONFIG = LlamaConfig(
    num_layers=2,
    num_heads=16,
    num_kv_heads=4,
    head_dim=128,
    hidden_size=1024,
    ffn_size=2816,
    vocab_size=4096,
    max_seq_len=2048,
)
_PROMPTS, _LENGTH, _NEW, _PAGES = 16, 128, 64, 4096
_MESH = (2, 2)  # (data, tensor)


def calls(chip: str) -> Iterator[Step]:
    """Yields the two calls, over four chips."""
    of_page = 16 * _CONFIG.num_kv_heads * _CONFIG.head_dim * jnp.bfloat16.dtype.itemsize
    pool_bytes = 2 * _CONFIG.num_layers * _PAGES * of_page // _MESH[1]
    options = dict(max_new_tokens=_NEW, num_pages=_PAGES, temperature=1.0)
    for name, function in (
        ("generate", pj.generate),
        ("rollout", lambda *args, **named: pj.rollout(*args, num_slots=8, **named)),
    ):
        yield Step(
            f"{name} {chip} 2x2 (data, tensor)",
            functools.partial(_compile, chip, function, options, pool_bytes),
            pool_bytes,
        )


def _compile(
    chip: str, function: Callable[..., Any], options: dict[str, Any], pool_bytes: int
) -> Compiled:
    """Compiles one call under `shard_map`."""
    devices = make_mesh(chip, _MESH[0] * _MESH[1]).devices
    mesh = Mesh(np.reshape(devices, _MESH), ("data", "tensor"))
    graph, params = _abstract(_CONFIG, "tensor")
    model = pj.PagedModel(
        FunctionalModel(graph),
        num_layers=_CONFIG.num_layers,
        num_kv_heads=_CONFIG.num_kv_heads // _MESH[1],
        head_dim=_CONFIG.head_dim,
        vocab_size=_CONFIG.vocab_size,
        max_seq_len=_CONFIG.max_seq_len,
        kv_dtype="bfloat16",
    )

    def local(params: Any, prompts: Any, lens: Any, seeds: Any) -> Any:
        out = function(model, params, prompts, lens, seeds=seeds, **options)
        return out.tokens, out.lengths, out.status, out.logprobs

    cuts = {name: _spec_of(name, held) for name, held in params.items()}
    specs = (cuts, P("data"), P("data"), P("data"))
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("data"))
    ids = jax.ShapeDtypeStruct((_PROMPTS,), jnp.int32)
    prompts = jax.ShapeDtypeStruct((_PROMPTS, _LENGTH), jnp.int32)
    shown = compile_for(
        mesh, run, [params, prompts, ids, ids], pools=(), donated=False, specs=specs
    )
    return dataclasses.replace(shown, temporary=shown.temporary - pool_bytes)
