"""What is compiled ahead of time: kernels x shapes x dtypes, and what is refused.

Pools are far larger than the vector memory, as real ones are: the compiler moves small
ones there as a whole, which would hide a copy.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from benchmarks import aot_generate, aot_models
from benchmarks.aot_compile import Compiled, compile_for, make_mesh
from pallas_kernels import tpu_attention, tpu_chips, tpu_pages

_POOL_BYTES = 256 * tpu_chips.MIB  # about, of keys; of values as much
_KERNELS: dict[str, Callable[..., Any]] = {
    "decode": tpu_attention.paged_attention,
    "ragged": tpu_attention.ragged_paged_attention,
}
_HEADS = [(32, 8, 128), (9, 3, 64), (8, 1, 80), (4, 4, 256)]
_DTYPES = ["float32", "bfloat16", "int8", "float8_e4m3fn"]


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing to compile.

    Attributes:
        name: of the case.
        what: MiB of its pools, for the report.
        compile: does it.
        pool_bytes: of keys and values, without padding.
        budget: VMEM that was counted for the kernel; 0 where it is not of interest.
        in_place: whether its results are its pools.
    """

    name: str
    what: str
    compile: Callable[[], Compiled]
    pool_bytes: int
    budget: int
    in_place: bool


def cases_of(chip: str) -> Iterator[Case]:
    """Yields all cases of a chip."""
    if chip == "v6e":
        for model in aot_models.steps(partial(make_mesh, chip)):
            yield Case(
                name=model.name,
                what=f"{model.pool_bytes / tpu_chips.MIB:.0f}",
                compile=model.compile,
                pool_bytes=model.pool_bytes,
                budget=0,
                in_place=True,
            )
        for call in aot_generate.calls(chip):
            yield Case(
                name=call.name,
                what=f"{call.pool_bytes / tpu_chips.MIB:.0f}",
                compile=call.compile,
                pool_bytes=call.pool_bytes,
                budget=0,
                in_place=False,
            )
    for ragged in (False, True):
        attention = partial(_attention, chip, ragged)
        for heads in _HEADS:
            for dtype in _DTYPES:
                yield attention(heads=heads, dtype=dtype)
        # What no chip does differently: compiled for one of them.
        if chip == "v6e":
            for page_size in (1, 5, 8, 128):
                yield attention(page_size=page_size)
            yield attention(page_size=8, dtype="int8")
            yield attention(window=1000, soft_cap=30.0)
            yield attention(q_dtype="float32")
            yield attention(q_dtype="float16")
            # The largest row of a table that is taken, and a table of many rows.
            yield attention(slots=2, pages_per_slot=190_000)
            yield attention(slots=256, pages_per_slot=2048)
            yield attention(slots=1)
    for heads in _HEADS:
        for dtype in _DTYPES:
            yield _write(chip, heads, dtype)
    for dtype in _DTYPES:
        yield _copy(chip, (32, 8, 128), dtype)
    yield _copy(chip, (9, 3, 64), "bfloat16")


def refused() -> list[tuple[str, str]]:
    """Returns (what, reason) of calls that no chip of the table can do."""
    calls: dict[str, dict[str, Any]] = {
        "float16 pages": dict(kv_dtype="float16"),
        "float64 queries": dict(q_dtype="float64"),
        "int8 pages of 12 tokens": dict(kv_dtype="int8", has_scales=True, page_size=12),
        "200,000 pages per slot": dict(pages_per_slot=200_000),
        "pages of 8,192 tokens, 32 kv heads, float32": dict(
            page_size=8192, num_kv_heads=32, kv_dtype="float32"
        ),
    }
    chip = tpu_chips.CHIPS["v6e"]
    return [
        (what, tpu_chips.supports(_call((32, 8, 128), **changes), chip)[1])
        for what, changes in calls.items()
    ]


def _call(heads: tuple[int, int, int], **changes: Any) -> tpu_chips.Call:
    call = tpu_chips.Call(
        num_tokens=64,
        num_slots=64,
        pages_per_slot=256,
        page_size=16,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        q_dtype="bfloat16",
        kv_dtype="bfloat16",
        ragged=False,
        has_scales=False,
    )
    return dataclasses.replace(call, **changes)


def _attention(
    chip: str,
    ragged: bool,
    *,
    heads: tuple[int, int, int] = (32, 8, 128),
    dtype: str = "bfloat16",
    q_dtype: str | None = None,
    page_size: int = 16,
    slots: int = 64,
    pages_per_slot: int = 256,
    **options: Any,
) -> Case:
    """Returns the case of one attention kernel; decode, or 512 rows of 64 slots."""
    quantised = dtype in ("int8", "float8_e4m3fn")
    q_dtype = q_dtype or ("bfloat16" if quantised else dtype)
    rows = max(512, slots) if ragged else slots
    call = _call(
        heads,
        num_tokens=rows,
        num_slots=slots,
        pages_per_slot=pages_per_slot,
        page_size=page_size,
        q_dtype=q_dtype,
        kv_dtype=dtype,
        ragged=ragged,
        has_scales=quantised,
    )
    fit = tpu_chips.fit(call, tpu_chips.CHIPS[chip])
    pool = _pool(heads, dtype, page_size)
    scales = [jax.ShapeDtypeStruct(pool.shape[:3], jnp.float32)] * (2 * quantised)
    ids = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in _id_shapes(call)]
    q = jax.ShapeDtypeStruct((rows, heads[0], heads[2]), jnp.dtype(q_dtype))
    kind = "ragged" if ragged else "decode"

    def run(q: Any, k: Any, v: Any, scales: Any, *ids: Any) -> Any:
        named = dict(zip(("k_scales", "v_scales"), scales, strict=False))
        return _KERNELS[kind](q, k, v, *ids, **named, **options)

    arguments = [q, pool, pool, scales, *ids]
    named = {
        "page": page_size if page_size != 16 else None,
        "q": q_dtype if q_dtype != dtype else None,
        "slots": slots if slots != 64 else None,
        "pages per slot": pages_per_slot if pages_per_slot != 256 else None,
        **options,
    }
    name = f"{kind} H{heads[0]} K{heads[1]} D{heads[2]} {dtype}"
    name += "".join(f", {x} {value}" for x, value in named.items() if value is not None)
    return Case(
        name=name,
        what=_mib(2 * _bytes(pool)),
        compile=lambda: compile_for(
            make_mesh(chip), run, arguments, pools=(1, 2, 3), donated=False
        ),
        pool_bytes=2 * _bytes(pool),
        budget=fit.vmem,
        in_place=False,
    )


def _write(chip: str, heads: tuple[int, int, int], dtype: str) -> Case:
    """Returns the case of storing 128 tokens."""
    pool = _pool(heads, dtype, 16)
    row = jax.ShapeDtypeStruct((128, *pool.shape[2:]), pool.dtype)
    ids = jax.ShapeDtypeStruct((128,), jnp.int32)
    whole = PartitionSpec()
    return Case(
        name=f"write K{heads[1]} D{heads[2]} {dtype}",
        what=_mib(2 * _bytes(pool)),
        compile=lambda: compile_for(
            make_mesh(chip),
            tpu_pages.write_kv,
            [pool, pool, row, row, ids, ids],
            pools=(0, 1),
            donated=True,
            results=(whole, whole),
        ),
        pool_bytes=2 * _bytes(pool),
        budget=0,
        in_place=True,
    )


def _copy(chip: str, heads: tuple[int, int, int], dtype: str) -> Case:
    """Returns the case of a copy-on-write plan for 64 slots and 4 layers."""
    pool = _pool(heads, dtype, 16)
    ids = jax.ShapeDtypeStruct((64,), jnp.int32)
    whole = PartitionSpec()

    def run(k: Any, v: Any, src: Any, dst: Any) -> Any:
        return tpu_pages.copy_pages((k, v), src, dst, num_layers=4)

    return Case(
        name=f"copy K{heads[1]} D{heads[2]} {dtype}",
        what=_mib(2 * _bytes(pool)),
        compile=lambda: compile_for(
            make_mesh(chip),
            run,
            [pool, pool, ids, ids],
            pools=(0, 1),
            donated=True,
            results=(whole, whole),
        ),
        pool_bytes=2 * _bytes(pool),
        budget=0,
        in_place=True,
    )


def _pool(
    heads: tuple[int, int, int], dtype: str, page_size: int
) -> jax.ShapeDtypeStruct:
    of_page = page_size * heads[1] * heads[2] * jnp.dtype(dtype).itemsize
    pages = _POOL_BYTES // of_page // 4 * 4
    shape = (pages, page_size, *heads[1:])
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _id_shapes(call: tpu_chips.Call) -> list[tuple[int, ...]]:
    shapes = [(call.num_slots, call.pages_per_slot), (call.num_slots,)]
    return [*shapes, (call.num_slots + 1,)] if call.ragged else shapes


def _bytes(x: jax.ShapeDtypeStruct) -> int:
    return x.size * x.dtype.itemsize


def _mib(size: int) -> str:
    return f"{size / tpu_chips.MIB:.0f}"
