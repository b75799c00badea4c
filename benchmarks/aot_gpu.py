"""Compiles every GPU kernel to machine code, without a GPU.

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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parent.parent / "build" / "aot"
INCOMPLETE = 77
_POOL_BYTES = 256 * 2**20  # about, of keys; of values as much
_HEADS = [(32, 8, 128), (9, 3, 64), (8, 1, 80), (4, 4, 256)]
_HEADS_MOSAIC = [(32, 8, 128), (9, 3, 64), (4, 4, 256)]
_HEADS_QUANTISED = [(32, 8, 128), (16, 4, 64), (4, 4, 256)]  # K a multiple of 4
_DTYPES = ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"]
_PREFIX = {"triton": "", "mosaic_gpu": "mosaic "}


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
    os.environ.update(
        JAX_PLATFORMS="cpu",
        XLA_FLAGS=f"--xla_dump_to={dump}",
        MOSAIC_GPU_DUMP_PTXAS="1",
    )
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
            cases = list(_cases(GPUS[name]))
            path = RECORDS / f"gpu-{name}.json"
            rows = known_rows(path) if chosen.select else {}
            for case in cases:
                if re.search(chosen.select, case.name):
                    rows[case.name] = _run(name, case, Path(dump))
                    failed += not rows[case.name]["ok"]
                record = {
                    "gpu": f"{GPUS[name].kind} ({name})",
                    "compiler": f"jax-cuda12-plugin {version}",
                    "cases": len(cases),
                    "rows": [rows[case.name] for case in cases if case.name in rows],
                }
                path.write_text(json.dumps(record, indent=1))
    finally:
        shutil.rmtree(dump)
    print(f"AOT: {failed} cases failed" if failed else "AOT: all cases hold on GPU")
    return 1 if failed else 0


def known_rows(path: Path) -> dict[str, dict[str, Any]]:
    """Gives the rows of an earlier record by name; a selection replaces its own."""
    if not path.exists():
        return {}
    return {row["name"]: row for row in json.loads(path.read_text())["rows"]}


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
            *untried(record["cases"] - len(rows)),
            f"Compiled by {record['compiler']}; through Triton where nothing else is "
            "said. *spilled*: bytes of",
            "registers that went to memory; empty where no `ptxas` was there to tell. "
            "*copies*:",
            "instructions that copy a whole pool.",
            "",
            "| case | holds | s | registers | spilled | temporary KiB | in place MiB | "
            "copies |",
            "|---|---|---|---|---|---|---|---|",
            *(_line(row) for row in rows),
            "",
        ]
    return lines


def untried(count: int) -> list[str]:
    """Gives the lines that say how many cases of a record are missing."""
    return [f"The run was cut: {count} more cases were not tried.", ""] if count else []


def _line(row: dict[str, Any]) -> str:
    if "seconds" not in row:
        return f"| {row['name']} | **no**: {row['why']} | | | | | | |"
    cells = [
        row["name"],
        "yes" if row["ok"] else f"**no**: {row['why']}",
        f"{row['seconds']:.1f}",
        *("" if row[x] is None else str(row[x]) for x in ("registers", "spilled")),
        f"{row['temporary'] / 1024:.0f}",
        f"{row['aliased'] / 2**20:.0f}",
        str(row["copies"]),
    ]
    return f"| {' | '.join(cells)} |"


# --- one case -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Case:
    """One thing to compile.

    Attributes:
        name: of the case.
        back_end: whose kernel must be in the program: "triton" or "mosaic_gpu".
        compile: does it.
        in_place: bytes that must be changed in place.
        no_spills: whether registers must not go to memory.
    """

    name: str
    back_end: str
    compile: Callable[[], Any]
    in_place: int = 0
    no_spills: bool = False


def _run(gpu: str, case: _Case, dump: Path) -> dict[str, Any]:
    """Compiles one case and judges what it showed."""
    row: dict[str, Any] = {"name": case.name}
    for file in dump.glob("*.*"):
        if file.is_file():
            file.unlink()
    try:
        shown, told = _listen(case.compile)
    except Exception as error:  # whatever a compiler raises is a result here
        text = " ".join(str(error).split())
        row |= {"ok": False, "why": f"{type(error).__name__}: {text[:300]}"}
    else:
        registers, spilled = _read_ptxas(told + _assemble(gpu, dump))
        row |= {
            "seconds": shown.seconds,
            "aliased": shown.aliased,
            "temporary": shown.temporary,
            "copies": shown.pool_copies,
            "registers": registers,
            "spilled": spilled,
        }
        wrong = []
        if shown.aliased < case.in_place:
            wrong.append(f"aliases {shown.aliased} bytes of {case.in_place}")
        if shown.temporary > (case.in_place or 2 * _POOL_BYTES) / 16:
            wrong.append(f"temporaries of {shown.temporary} bytes")
        if shown.pool_copies:
            wrong.append(f"copies a pool {shown.pool_copies} times")
        if case.back_end not in shown.kernels:
            wrong.append(f"no kernel of {case.back_end} in the program")
        if case.no_spills and spilled:
            wrong.append(f"spills {spilled} bytes")
        row |= {"ok": not wrong, "why": "; ".join(wrong)}
    print(f"{gpu} {case.name}: {'ok' if row['ok'] else row['why']}", flush=True)
    return row


def _listen(compile_case: Callable[[], Any]) -> tuple[Any, str]:
    """Compiles, and gives what compilers in C++ wrote to the terminal meanwhile."""
    sys.stdout.flush()
    sys.stderr.flush()
    held = [os.dup(1), os.dup(2)]
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            shown = compile_case()
        finally:
            for number, copy in enumerate(held, 1):
                os.dup2(copy, number)
                os.close(copy)
        file.seek(0)
        return shown, file.read().decode(errors="replace")


def _make_mesh(gpu: Gpu, devices: int = 1) -> Any:
    """Gives a mesh of GPUs that need not be there."""
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh

    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        target_config=_describe(gpu),
        topology=f"1x1x{devices}",
    )
    return Mesh(np.array(topology.devices[:devices]), ("tensor",))


def _compile(
    gpu: Gpu, function: Any, arguments: list[Any], pools: Sequence[int], donated: bool
) -> Any:
    from benchmarks.aot_compile import compile_for

    return compile_for(
        _make_mesh(gpu),
        function,
        arguments,
        pools=pools,
        donated=donated,
        platform="cuda",
    )


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


def _assemble(gpu: str, dump: Path) -> str:
    """Assembles the Triton kernels that XLA wrote down; gives what `ptxas` told."""
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        return ""
    told = ""
    for file in dump.glob("*.ptx"):
        if "paged" in file.read_text():
            command = [ptxas, "-v", f"--gpu-name={gpu}", file, "-o", os.devnull]
            told += subprocess.run(command, capture_output=True, text=True).stderr
    return told


def _read_ptxas(told: str) -> tuple[int | None, int | None]:
    """Gives the most registers and spilled bytes of any kernel, if any was told."""
    registers, spilled = (
        [int(x) for x in re.findall(pattern, told)]
        for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores")
    )
    return max(registers, default=None), max(spilled, default=None)


# --- the cases ------------------------------------------------------------------------


def _cases(gpu: Gpu) -> Iterator[_Case]:
    """Yields all cases of a GPU."""
    if gpu.capability == (9, 0):
        yield from _steps(gpu)
    for ragged in (False, True):
        for heads in _HEADS:
            for dtype in _DTYPES:
                # A float8 that Ampere does not have is refused, not compiled.
                if dtype != "float8_e4m3fn" or gpu.capability >= (8, 9):
                    yield _attention(gpu, ragged, heads=heads, dtype=dtype)
        for page_size in (1, 5, 128):
            yield _attention(gpu, ragged, page_size=page_size)
        yield _attention(gpu, ragged, window=1000, soft_cap=30.0)
        yield _attention(gpu, ragged, q_dtype="float32")
        yield _attention(gpu, ragged, pages=400_000)  # needs offsets of 64 bits
    for heads in _HEADS:
        for dtype in _DTYPES:
            yield from _pages(gpu, "triton", heads, dtype)
    if gpu.capability != (9, 0):
        return
    mosaic = partial(_attention, gpu, back_end="mosaic_gpu")
    for ragged in (False, True):
        for heads in (*_HEADS_MOSAIC, (8, 2, 192)):
            for dtype in ("bfloat16", "float16"):
                yield mosaic(ragged, heads=heads, dtype=dtype)
        for dtype in ("int8", "float8_e4m3fn"):
            for heads in _HEADS_QUANTISED:
                yield mosaic(ragged, heads=heads, dtype=dtype)
            yield mosaic(ragged, dtype=dtype, q_dtype="float16")
        for page_size in (8, 24, 64, 128):
            yield mosaic(ragged, page_size=page_size)
        yield mosaic(ragged, window=1000, soft_cap=30.0)
        yield mosaic(ragged, pages=400_000)
    for heads in _HEADS_MOSAIC:
        for dtype in _DTYPES:
            yield from _pages(gpu, "mosaic_gpu", heads, dtype)
    yield from _pages(gpu, "mosaic_gpu", (32, 8, 128), "int8", scales=True)


def _steps(gpu: Gpu) -> Iterator[_Case]:
    """Yields whole decode steps, with the kernel of either back end inside."""
    from benchmarks import aot_models

    for back_end in ("triton", "mosaic_gpu"):
        steps = aot_models.steps(
            partial(_make_mesh, gpu),
            platform="cuda",
            implementation=f"pallas_{back_end}",
        )
        for step in steps:
            yield _Case(
                f"{_PREFIX[back_end]}{step.name}",
                back_end,
                step.compile,
                in_place=step.pool_bytes,
            )


def _attention(
    gpu: Gpu,
    ragged: bool,
    *,
    back_end: str = "triton",
    heads: tuple[int, int, int] = (32, 8, 128),
    dtype: str = "bfloat16",
    q_dtype: str | None = None,
    page_size: int = 16,
    pages: int | None = None,
    **options: Any,
) -> _Case:
    import jax
    import jax.numpy as jnp

    from pallas_kernels import gpu_mosaic_attention, gpu_triton_attention

    kernels = gpu_triton_attention if back_end == "triton" else gpu_mosaic_attention
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

    kind = "ragged" if ragged else "decode"
    name = f"{_PREFIX[back_end]}{kind} H{heads[0]} K{heads[1]} D{heads[2]}"
    name += f" {dtype}" + (f", q {q_dtype}" if q_dtype != dtype else "")
    name += f", page {page_size}" if page_size != 16 else ""
    name += f", {pages} pages" if pages else ""
    name += "".join(f", {key} {value}" for key, value in options.items())
    arguments = [q, pool, pool, *ids, *scales]
    return _Case(
        name,
        back_end,
        partial(_compile, gpu, run, arguments, (1, 2), False),
        no_spills=not ragged and heads[2] <= 128,
    )


def _pages(
    gpu: Gpu,
    back_end: str,
    heads: tuple[int, int, int],
    dtype: str,
    *,
    scales: bool = False,
) -> Iterator[_Case]:
    import jax
    import jax.numpy as jnp

    from pallas_kernels import gpu_mosaic_pages, gpu_triton_pages

    kernels = gpu_triton_pages if back_end == "triton" else gpu_mosaic_pages
    pool = _pool(heads, dtype, 16, None)
    if scales:
        pool = jax.ShapeDtypeStruct(pool.shape[:3], jnp.float32)
    size = 2 * pool.size * pool.dtype.itemsize
    row = jax.ShapeDtypeStruct((128, *pool.shape[2:]), pool.dtype)
    ids = jax.ShapeDtypeStruct((128,), jnp.int32)
    for verb, kernel, arguments in (
        ("write", kernels.write_kv, [pool, pool, row, row, ids, ids]),
        ("copy", kernels.copy_pages, [pool, pool, ids, ids]),
    ):
        yield _Case(
            f"{_PREFIX[back_end]}{verb} K{heads[1]} D{heads[2]} {dtype}"
            + (", scales" if scales else ""),
            back_end,
            partial(_compile, gpu, kernel, arguments, (0, 1), True),
            in_place=size,
        )


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
