"""Whole decode steps, compiled ahead of time: a model, its pool, a Pallas kernel.

The models are those of the library; only the shapes of their parameters exist. A step
is what `generate` does per token: room in the page table, copies on write, the layers
in a scan, the next token.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import pagedjax as pj
from benchmarks.aot_compile import Compiled, compile_for
from pagedjax.models import CONFIGS, Llama, LlamaConfig
from pagedjax.models._tensor_parallel import _CUT_AXES
from pagedjax.nnx import functional

_LLAMA3_8B = LlamaConfig(
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    hidden_size=4096,
    ffn_size=14336,
    vocab_size=128256,
    max_seq_len=8192,
    rope_theta=500_000.0,
)


@dataclasses.dataclass(frozen=True)
class Step:
    """A decode step to compile.

    Attributes:
        name: of the model and the mesh.
        compile: does it.
        pool_bytes: of the keys and values on one device, without padding.
    """

    name: str
    compile: Callable[[], Compiled]
    pool_bytes: int


def steps(
    make_mesh: Callable[[int], Mesh],
    *,
    platform: str = "tpu",
    implementation: str | None = None,
) -> Iterator[Step]:
    """Yields the decode steps: one device, and four, sharded over kv heads.

    Args:
        make_mesh: makes a mesh of so many devices along the axis "tensor".
        platform: "tpu" or "cuda".
        implementation: of attention; None for the default.
    """
    for name, config, devices in (
        ("smollm2-135m", CONFIGS["smollm2-135m"], 1),
        ("llama-3-8b", _LLAMA3_8B, 4),
    ):
        options = (platform, implementation)
        yield _step(make_mesh, name, config, devices, *options)


def _step(
    make_mesh: Callable[[int], Mesh],
    name: str,
    config: LlamaConfig,
    devices: int,
    platform: str,
    implementation: str | None,
    *,
    slots: int = 64,
    num_pages: int = 4096,
    page_size: int = 16,
) -> Step:
    """Returns one step in bfloat16; every device holds its own kv heads."""
    graph, params = _abstract(config, "tensor" if devices > 1 else None)
    table = jax.eval_shape(
        lambda: pj.init_page_table(
            num_pages=num_pages,
            page_size=page_size,
            max_slots=slots,
            pages_per_slot=config.max_seq_len // page_size,
        )
    )
    pool = jax.eval_shape(
        lambda: pj.init_kv_pool(
            num_layers=config.num_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=jnp.bfloat16,
        )
    )
    tokens = jax.ShapeDtypeStruct((slots,), jnp.int32)

    def step(params: Any, pool: Any, table: Any, tokens: Any) -> Any:
        table, plan, ok = pj.append(table, jnp.ones_like(tokens), max_tokens=1)
        pool = pj.copy_pages(pool, plan)
        batch = pj.pack_decode(table, ok)
        model = nnx.merge(graph, params)
        pool, logits = model(pool, tokens, batch, implementation=implementation)
        return pool, table, jnp.argmax(logits, axis=-1).astype(jnp.int32)

    heads = P(None, None, "tensor" if devices > 1 else None)
    cuts = {x: _spec_of(x, held) if devices > 1 else P() for x, held in params.items()}
    specs = (cuts, heads, P(), P())

    def compile_step() -> Compiled:
        mesh = make_mesh(devices)
        run: Callable[..., Any] = step
        if devices > 1:
            run = jax.shard_map(
                step, mesh=mesh, in_specs=specs, out_specs=(heads, P(), P())
            )
        pools = jax.tree.map(lambda _: heads, pool)
        return compile_for(
            mesh,
            run,
            [params, pool, table, tokens],
            pools=(1,),
            donated=True,
            specs=specs,
            results=(pools, None, None),
            platform=platform,
        )

    kind = "chip" if platform == "tpu" else "GPU"
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pool))
    return Step(
        f"decode step of {name}, {devices} {kind}{'s' * (devices > 1)}",
        compile_step,
        held // devices,
    )


def _abstract(config: LlamaConfig, tensor_axis: str | None) -> tuple[Any, Any]:
    """Returns a model's structure and the shapes of its parameters."""
    tiny = dataclasses.replace(
        config, num_layers=1, hidden_size=8, ffn_size=8, vocab_size=8
    )
    llama = Llama(tiny, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, stacked=True)
    llama.config, llama.tensor_axis = config, tensor_axis
    apply, params = functional(llama)
    q_width = config.num_heads * config.head_dim
    width, ffn = config.hidden_size, config.ffn_size
    shapes = {
        "embed": (config.vocab_size, width),
        "head": (config.vocab_size, width),
        "norm": (width,),
        "attn_norm": (config.num_layers, width),
        "ffn_norm": (config.num_layers, width),
        "qkv": (
            config.num_layers,
            q_width + 2 * config.num_kv_heads * config.head_dim,
            width,
        ),
        "out": (config.num_layers, width, q_width),
        "gate_up": (config.num_layers, 2 * ffn, width),
        "down": (config.num_layers, width, ffn),
    }
    return apply.graphdef, {
        name: jax.ShapeDtypeStruct(shapes[name], held.dtype)
        for name, held in params.items()
    }


def _spec_of(name: str, held: Any) -> P:
    """Returns how a parameter is cut, as `Llama.sharded` does it."""
    axes: list[str | None] = [None] * len(held.shape)
    if name in _CUT_AXES:
        axes[_CUT_AXES[name]] = "tensor"
    return P(*axes)
