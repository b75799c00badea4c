"""Compiles every Triton kernel to machine code, without a GPU.

    python -m benchmarks.aot_gpu              all GPUs; records for benchmarks/AOT.md
    python -m benchmarks.aot_gpu --gpu sm_90a
    python -m benchmarks.aot_gpu --select 'decode'   cases whose name matches

Needs the packages `jax-cuda12-plugin` and `jax-cuda12-pjrt` of jax's own version
(`make aot` makes an environment for them). Exit status: 0 when all that is claimed
compiles, fits and changes pools in place; 1 when something does not; 77 when nothing
could be tried.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parent.parent / "build" / "aot"
INCOMPLETE = 77
_POOL_BYTES = 256 * 2**20  # about, of keys; of values as much
_HEADS = [(32, 8, 128), (9, 3, 64), (8, 1, 80), (4, 4, 256)]
_DTYPES = ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"]


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What the compiler has to know of a GPU; figures of NVIDIA's data sheets.

    Attributes:
        kind: its name as jax spells it.
        capability: compute capability.
        cores: streaming multiprocessors.
        core_shared: bytes of shared memory of each.
        block_shared: bytes of it that one block may use.
    """

    kind: str
    capability: tuple[int, int]
    cores: int
    core_shared: int
    block_shared: int


GPUS = {
    "sm_80": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 167936, 166912),
    "sm_86": Gpu("NVIDIA A10", (8, 6), 72, 102400, 101376),
    "sm_90a": Gpu("NVIDIA H200", (9, 0), 132, 233472, 232448),
}


def main() -> int:
    """Compiles and records."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", action="append", choices=GPUS)
    parser.add_argument("--select", default="", help="a regular expression")
    chosen = parser.parse_args()
    dump = tempfile.mkdtemp()
    os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS=f"--xla_dump_to={dump}")
    try:
        version = importlib.metadata.version("jax-cuda12-plugin")
    except importlib.metadata.PackageNotFoundError:
        print("AOT: NOT COMPILED FOR GPU: the jax-cuda12-plugin wheel is missing.")
        print("AOT: this run is INCOMPLETE. `make aot` installs it.")
        return INCOMPLETE
    RECORDS.mkdir(parents=True, exist_ok=True)
    failed = 0
    try:
        for name in chosen.gpu or GPUS:
            rows = [
                _run(name, *case, Path(dump))
                for case in _cases(GPUS[name])
                if re.search(chosen.select, case[0])
            ]
            failed += sum(not row["ok"] for row in rows)
            if chosen.select:
                continue
            record = {
                "gpu": f"{GPUS[name].kind} ({name})",
                "compiler": f"jax-cuda12-plugin {version}",
                "rows": rows,
            }
            (RECORDS / f"gpu-{name}.json").write_text(json.dumps(record, indent=1))
    finally:
        shutil.rmtree(dump)
    print(f"AOT: {failed} cases failed" if failed else "AOT: all cases hold on GPU")
    return 1 if failed else 0


def report() -> list[str]:
    """Renders all records as the lines of a Markdown section for each GPU."""
    lines = []
    for path in sorted(RECORDS.glob("gpu-*")):
        record = json.loads(path.read_text())
        rows = record["rows"]
        good = sum(row["ok"] for row in rows)
        lines += [
            f"## {record['gpu']}: {good} of {len(rows)} cases hold",
            "",
            f"Triton, compiled by {record['compiler']}. *spilled*: bytes of registers "
            "that went to",
            "memory; empty where no `ptxas` was there to tell.",
            "",
            "| case | holds | s | registers | spilled | temporary KiB | in place MiB |",
            "|---|---|---|---|---|---|---|",
            *(_line(row) for row in rows),
            "",
        ]
    return lines


def _line(row: dict[str, Any]) -> str:
    if "seconds" not in row:
        return f"| {row['name']} | **no**: {row['why']} | | | | | |"
    cells = [
        row["name"],
        "yes" if row["ok"] else f"**no**: {row['why']}",
        f"{row['seconds']:.1f}",
        *("" if row[x] is None else str(row[x]) for x in ("registers", "spilled")),
        f"{row['temporary'] / 1024:.0f}",
        f"{row['aliased'] / 2**20:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


# --- one case -------------------------------------------------------------------------

_Case = tuple[str, Callable[..., Any], list[Any], int]


def _run(
    gpu: str, name: str, fn: Any, args: list[Any], pool: int, dump: Path
) -> dict[str, Any]:
    """Compiles one case; `pool` is the bytes that must be changed in place."""
    row: dict[str, Any] = {"name": name}
    for file in dump.iterdir():
        file.unlink()
    began = time.perf_counter()
    try:
        compiled = _compile(GPUS[gpu], fn, args, donate=(0, 1) if pool else ())
    except Exception as error:  # whatever a compiler raises is a result here
        text = " ".join(str(error).split())
        row |= {"ok": False, "why": f"{type(error).__name__}: {text[:300]}"}
    else:
        memory = compiled.memory_analysis()
        registers, spilled = _assemble(gpu, dump)
        row |= {
            "seconds": time.perf_counter() - began,
            "aliased": memory.alias_size_in_bytes,
            "temporary": memory.temp_size_in_bytes,
            "registers": registers,
            "spilled": spilled,
        }
        wrong = []
        if memory.alias_size_in_bytes < pool:
            wrong.append(f"aliases {memory.alias_size_in_bytes} bytes of {pool}")
        if memory.temp_size_in_bytes > _POOL_BYTES / 8:
            wrong.append(f"temporaries of {memory.temp_size_in_bytes} bytes")
        if "__gpu$xla.gpu.triton" not in compiled.as_text():
            wrong.append("no Triton kernel in the program")
        row |= {"ok": not wrong, "why": "; ".join(wrong)}
    print(f"{gpu} {name}: {'ok' if row['ok'] else row['why']}", flush=True)
    return row


def _compile(gpu: Gpu, fn: Any, args: list[Any], donate: tuple[int, ...]) -> Any:
    """Compiles for a GPU that need not be there."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        target_config=_describe(gpu),
        topology="1x1x1",
    )
    mesh = Mesh(np.array(topology.devices[:1]), ("x",))
    whole = NamedSharding(mesh, PartitionSpec())
    placed = [
        jax.ShapeDtypeStruct(arg.shape, arg.dtype, sharding=whole) for arg in args
    ]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(fn, donate_argnums=donate).trace(*placed)
        lowered = traced.lower(lowering_platforms=("cuda",))
    return lowered.compile()


def _describe(gpu: Gpu) -> str:
    """Gives the description of a GPU that XLA reads, a GpuTargetConfigProto."""
    fields = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_core": gpu.core_shared,
        "shared_memory_per_block_optin": gpu.block_shared,
        "threads_per_core_limit": 2048,
        "core_count": gpu.cores,
        "fpus_per_core": 128,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": 2 * 10**12,
        "l2_cache_size": 40 * 2**20,
        "clock_rate_ghz": 1.4,
        "device_memory_size": 80 * 2**30,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    text = " ".join(f"{name}: {value}" for name, value in fields.items())
    major, minor = gpu.capability
    return (
        f"gpu_device_info {{ {text} cuda_compute_capability {{ major: {major} minor:"
        f' {minor} }} }} platform_name: "CUDA" device_description_str: "{gpu.kind}"'
    )


def _assemble(gpu: str, dump: Path) -> tuple[int | None, int | None]:
    """Gives the most registers and spilled bytes of any kernel, if ptxas is there."""
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        return None, None
    registers, spilled = 0, 0
    for file in dump.glob("*.ptx"):
        if "tt.func" not in file.read_text() and "paged" not in file.read_text():
            continue
        done = subprocess.run(
            [ptxas, "-v", f"--gpu-name={gpu}", file, "-o", os.devnull],
            capture_output=True,
            text=True,
        )
        for count in re.findall(r"Used (\d+) registers", done.stderr):
            registers = max(registers, int(count))
        for count in re.findall(r"(\d+) bytes spill stores", done.stderr):
            spilled = max(spilled, int(count))
    return (registers, spilled) if registers else (None, None)


# --- the cases ------------------------------------------------------------------------


def _cases(gpu: Gpu) -> Iterator[_Case]:
    """Yields (name, function, arguments, bytes changed in place)."""
    for ragged in (False, True):
        for heads in _HEADS:
            for dtype in _DTYPES:
                # A float8 that Ampere does not have is refused, not compiled.
                if dtype != "float8_e4m3fn" or gpu.capability >= (8, 9):
                    yield _attention(ragged, heads=heads, dtype=dtype)
        for page_size in (1, 5, 128):
            yield _attention(ragged, page_size=page_size)
        yield _attention(ragged, window=1000, soft_cap=30.0)
        yield _attention(ragged, q_dtype="float32")
        yield _attention(ragged, pages=400_000)  # needs offsets of 64 bits
    for heads in _HEADS:
        for dtype in _DTYPES:
            yield from _pages(heads, dtype)


def _attention(
    ragged: bool,
    *,
    heads: tuple[int, int, int] = (32, 8, 128),
    dtype: str = "bfloat16",
    q_dtype: str | None = None,
    page_size: int = 16,
    pages: int | None = None,
    **options: Any,
) -> _Case:
    import jax
    import jax.numpy as jnp

    from pallas_kernels import gpu_triton_attention as kernels

    quantised = dtype in ("int8", "float8_e4m3fn")
    q_dtype = q_dtype or ("bfloat16" if quantised else dtype)
    slots, rows = 64, 512 if ragged else 64
    pool = _pool(heads, dtype, page_size, pages)
    scales = [jax.ShapeDtypeStruct(pool.shape[:3], jnp.float32)] * (2 * quantised)
    shapes = [(slots, 256), (slots,)] + [(slots + 1,)] * ragged
    ids = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    q = jax.ShapeDtypeStruct((rows, heads[0], heads[2]), jnp.dtype(q_dtype))
    kernel = kernels.ragged_paged_attention if ragged else kernels.paged_attention

    def run(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        ids, scales = rest[: len(shapes)], rest[len(shapes) :]
        named = dict(zip(("k_scales", "v_scales"), scales, strict=False))
        return kernel(q, k, v, *ids, scale=0.1, **named, **options)

    name = f"{'ragged' if ragged else 'decode'} H{heads[0]} K{heads[1]} D{heads[2]}"
    name += f" {dtype}" + (f", q {q_dtype}" if q_dtype != dtype else "")
    name += f", page {page_size}" if page_size != 16 else ""
    name += f", {pages} pages" if pages else ""
    name += "".join(f", {key} {value}" for key, value in options.items())
    return name, run, [q, pool, pool, *ids, *scales], 0


def _pages(heads: tuple[int, int, int], dtype: str) -> Iterator[_Case]:
    import jax
    import jax.numpy as jnp

    from pallas_kernels import gpu_triton_pages as kernels

    pool = _pool(heads, dtype, 16, None)
    size = 2 * pool.size * pool.dtype.itemsize
    row = jax.ShapeDtypeStruct((128, *pool.shape[2:]), pool.dtype)
    ids = jax.ShapeDtypeStruct((128,), jnp.int32)
    of = f"K{heads[1]} D{heads[2]} {dtype}"
    yield f"write {of}", kernels.write_kv, [pool, pool, row, row, ids, ids], size
    yield f"copy {of}", kernels.copy_pages, [pool, pool, ids, ids], size


def _pool(
    heads: tuple[int, int, int], dtype: str, page_size: int, pages: int | None
) -> Any:
    import jax
    import jax.numpy as jnp

    of_page = page_size * heads[1] * heads[2] * jnp.dtype(dtype).itemsize
    shape = (pages or _POOL_BYTES // of_page, page_size, *heads[1:])
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


if __name__ == "__main__":
    sys.exit(main())
