"""Compiling for a device that is not there: the call, and what is read off it.

The compilers are those of the `libtpu` and `jax-cuda12-plugin` wheels. They need no
device: a topology is described by its name, arguments by their shapes. How it is done
is described in https://docs.jax.dev/en/latest/aot.html and the tests of
`jax.experimental.topologies`.
"""

import dataclasses
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.tpu_pages import page_format

TOPOLOGIES = {
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "7x": "tpu7x:2x2x1",
}
_BACK_ENDS = {
    "tpu": '"tpu_custom_call"',
    "triton": '"__gpu$xla.gpu.triton"',
    "mosaic_gpu": '"mosaic_gpu_v2"',
}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What a compile showed.

    Attributes:
        seconds: it took, lowering included.
        vmem: bytes of vector memory that the Pallas kernels were given, the largest.
        aliased: bytes of results that are arguments changed in place.
        results: bytes of all results.
        temporary: bytes of device memory used in between.
        pool_copies: instructions that copy an array of a pool's shape.
        kernels: the back ends of Pallas whose kernels are in the program.
    """

    seconds: float
    vmem: int
    aliased: int
    results: int
    temporary: int
    pool_copies: int
    kernels: tuple[str, ...]


def make_mesh(chip: str, devices: int = 1, axis: str = "tensor") -> Mesh:
    """Return a mesh of devices of a chip that need not be there."""
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=TOPOLOGIES[chip]
    )
    return Mesh(np.array(topology.devices[:devices]), (axis,))


def compile_for(
    mesh: Mesh,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    pools: Sequence[int],
    donated: bool,
    specs: Sequence[Any] | None = None,
    results: Any = None,
    platform: str = "tpu",
) -> Compiled:
    """Compile a function of arrays, the pools among them row-major.

    Args:
        mesh: the devices.
        function: of arrays or trees of them.
        arguments: their `jax.ShapeDtypeStruct`s.
        pools: which arguments are pools.
        donated: whether the pools are donated.
        specs: a tree of `PartitionSpec`s for each argument; None for none split.
        results: which results are pools: a tree of `PartitionSpec` for a pool, or None.
        platform: "tpu", or "cuda", where arrays are row-major anyway.

    Returns:
        What it showed.
    """
    placed = []
    for i, argument in enumerate(arguments):
        spec = PartitionSpec() if specs is None else specs[i]
        pinned = platform == "tpu" and i in pools
        placed.append(_place(mesh, argument, spec, pinned=pinned))

    def place_result(spec: PartitionSpec) -> Any:
        sharding = NamedSharding(mesh, spec)
        return page_format(sharding) if platform == "tpu" else sharding

    out = jax.tree.map(
        place_result, results, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    jitted = jax.jit(
        function,
        donate_argnums=tuple(pools) if donated else (),
        **({} if results is None else {"out_shardings": out}),
    )
    began = time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jitted.trace(*placed).lower(lowering_platforms=(platform,))
    compiled = lowered.compile()
    seconds = time.perf_counter() - began
    text, memory = compiled.as_text(), compiled.memory_analysis()
    of_pools = {
        _shape_of(x, mesh, PartitionSpec() if specs is None else specs[i])
        for i in pools
        for x in jax.tree.leaves(arguments[i])
        if x.ndim == 4
    }
    return Compiled(
        seconds=seconds,
        vmem=_vmem_of(text),
        aliased=memory.alias_size_in_bytes,
        results=memory.output_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        pool_copies=sum(_is_copy_of(line, of_pools) for line in text.splitlines()),
        kernels=tuple(name for name, call in _BACK_ENDS.items() if call in text),
    )


def _place(mesh: Mesh, tree: Any, spec: Any, *, pinned: bool) -> Any:
    """Give every array of a tree its place on the mesh."""
    if isinstance(spec, PartitionSpec):
        spec = jax.tree.map(lambda _: spec, tree)

    def place(x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec)
        where = page_format(sharding, x.ndim) if pinned else sharding
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    return jax.tree.map(place, tree, spec)


def _shape_of(x: Any, mesh: Mesh, spec: Any) -> str:
    """Return how the program of one device spells the shape of its share."""
    if not isinstance(spec, PartitionSpec):
        spec = jax.tree.leaves(spec, is_leaf=lambda s: isinstance(s, PartitionSpec))[0]
    shape = NamedSharding(mesh, spec).shard_shape(x.shape)
    return f"[{','.join(map(str, shape))}]"


def _is_copy_of(line: str, shapes: set[str]) -> bool:
    """Tell whether an instruction copies a whole array of one of these shapes."""
    found = re.search(r"= \(?\w+(\[[\d,]+\])\S* (copy|copy-start|transpose)\(", line)
    return found is not None and found.group(1) in shapes


def _vmem_of(text: str) -> int:
    """Return the vector memory of the Pallas kernels of a program, the largest."""
    most = 0
    for line in text.splitlines():
        if 'custom_call_target="tpu_custom_call"' in line:
            used = re.search(r'"used_scoped_memory_configs":\[([^\]]*)\]', line)
            for size in re.findall(
                r'"memory_space":"1"[^}]*"size":"(\d+)"', used.group(1) if used else ""
            ):
                most = max(most, int(size))
    return most
