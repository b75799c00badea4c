"""Drives the Ascend C kernels on the simulator, through the C interface by ctypes.

Every array is a region of simulated device memory of exactly its size (the smallest
copy is 32 bytes, so int32 lists are padded to 8s, and lse to 8 rows). A call returns
what the kernels wrote, and raises `KernelError` with what the simulator found.
"""

import ctypes
import dataclasses
import functools
import os
from pathlib import Path

import ml_dtypes
import numpy as np

from ascend_bridge.kernels import build

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {np.dtype(np.float16): 0, BFLOAT16: 1}


class KernelError(Exception):
    """What the simulator found; `.errors` is a list of lines."""

    def __init__(self, errors: list[str]) -> None:
        super().__init__("\n".join(errors[:10]))
        self.errors = errors


class Refused(Exception):
    """The plan refused the call; the message is the plan's."""


def _structure(name: str, fields: str) -> type[ctypes.Structure]:
    kinds = {
        "i": ctypes.c_int32,
        "l": ctypes.c_int64,
        "f": ctypes.c_float,
        "e": ctypes.c_char * 256,
    }
    pairs = [x.split(":") for x in fields.split()]
    return type(
        name, (ctypes.Structure,), {"_fields_": [(n, kinds[k]) for n, k in pairs]}
    )


AttentionTiling = _structure(
    "AttentionTiling",
    "stats_offset:l slots:i heads:i kv_heads:i group:i head_dim:i num_pages:i"
    " page_size:i pages_per_slot:i window:i tile_tokens:i splits:i split_tokens:i"
    " rows:i return_lse:i query_scale:f soft_cap:f",
)
ReshapeTiling = _structure(
    "ReshapeTiling",
    "num_places:l row_elements:l tokens:i tokens_per_core:i rows_per_copy:i"
    " chunk_elements:i",
)
CopyTiling = _structure(
    "CopyTiling",
    "page_elements:l num_pages:i num_sources:i num_dests:i chunk_elements:i chunks:i"
    " unused:i",
)
Problem = _structure(
    "Problem",
    "arch:i cores:i dtype:i slots:i heads:i kv_heads:i head_dim:i num_pages:i"
    " page_size:i pages_per_slot:i max_tokens:i window:i return_lse:i tile_tokens:i"
    " splits:i scale:f soft_cap:f",
)


class AttentionPlan(ctypes.Structure):
    """As in plan.h."""

    _fields_ = [
        ("tiling", AttentionTiling),
        ("workspace_bytes", ctypes.c_int64),
        ("ub_bytes", ctypes.c_int64),
        ("blocks", ctypes.c_int32),
        ("combine_blocks", ctypes.c_int32),
        ("error", ctypes.c_char * 256),
    ]


def _copying_plan(tiling: type[ctypes.Structure]) -> type[ctypes.Structure]:
    fields = [
        ("tiling", tiling),
        ("ub_bytes", ctypes.c_int64),
        ("blocks", ctypes.c_int32),
        ("error", ctypes.c_char * 256),
    ]
    return type("CopyingPlan", (ctypes.Structure,), {"_fields_": fields})


ReshapePlan = _copying_plan(ReshapeTiling)
CopyPlan = _copying_plan(CopyTiling)


@functools.cache
def load(arch: int, flags: tuple[str, ...] = ("-O1",)) -> "Library":
    """Build the library of an architecture, once, and load it."""
    return Library(build.build_simulated(arch, flags=flags), arch)


@dataclasses.dataclass
class Library:
    """The kernel library of one architecture."""

    path: Path
    arch: int
    cores: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        """Open the library, apart from any other of its kind."""
        self.c = ctypes.CDLL(str(self.path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
        self.c.pagedjax_sim_error.restype = ctypes.c_char_p
        self.c.pagedjax_sim_instructions.restype = ctypes.c_int64
        assert self.c.pagedjax_ascend_arch() == self.arch

    def plan_attention(self, **fields: float) -> AttentionPlan:
        """Return the plan of a problem, or raise Refused."""
        problem, plan = Problem(**{"arch": self.arch, **fields}), AttentionPlan()
        ok = self.c.pagedjax_ascend_plan_paged_attention(
            ctypes.byref(problem), ctypes.byref(plan)
        )
        if not ok:
            raise Refused(plan.error.decode())
        assert plan.error == b""
        return plan

    def attend(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        table: np.ndarray,
        lens: np.ndarray,
        *,
        scale: float | None = None,
        window: int = 0,
        soft_cap: float = 0.0,
        splits: int = 0,
        tile: int = 0,
        max_tokens: int = 0,
        lse: bool = True,
        change: dict[str, float] | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (out[S, H, D] in the dtype of q, lse float32[S, H]).

        Args:
            change: fields of the tiling to set to something else, for faults.
        """
        slots, heads, dim = q.shape
        plan = self.plan_attention(
            cores=self.cores,
            dtype=DTYPES[q.dtype],
            slots=slots,
            heads=heads,
            kv_heads=k.shape[2],
            head_dim=dim,
            num_pages=k.shape[0],
            page_size=k.shape[1],
            pages_per_slot=table.shape[1],
            max_tokens=max_tokens,
            window=window,
            return_lse=int(lse),
            tile_tokens=tile,
            splits=splits,
            scale=dim**-0.5 if scale is None else scale,
            soft_cap=soft_cap,
        )
        for name, value in (change or {}).items():
            setattr(plan.tiling, name, value)
        out = np.full(q.shape, np.nan, q.dtype)
        rows = (slots * heads + 7) // 8 * 8
        lses = np.full(rows, np.nan, np.float32)
        workspace = np.full(plan.workspace_bytes // 4, np.nan, np.float32)
        arrays = {
            "q": q,
            "k": k,
            "v": v,
            "table": _padded(table),
            "lens": _padded(lens),
            "workspace": workspace,
            "out": out,
            "lse": lses if lse else np.zeros(0, np.float32),
        }
        tiling = np.frombuffer(bytearray(plan.tiling), np.uint8)
        with _Regions(self.c, arrays):
            at = {name: _pointer(x) for name, x in arrays.items()}
            code = DTYPES[q.dtype]
            self._start(
                self.c.pagedjax_ascend_paged_attention,
                (code, plan.blocks, None, at["q"], at["k"], at["v"], at["table"])
                + (at["lens"], at["workspace"], _pointer(tiling)),
            )
            self._start(
                self.c.pagedjax_ascend_combine,
                (code, plan.combine_blocks, None, at["workspace"], at["out"])
                + (at["lse"], _pointer(tiling)),
            )
        assert not lse or (lses[slots * heads :] == -np.inf).all()
        return out, lses[: slots * heads].reshape(slots, heads)

    def write(
        self,
        k_new: np.ndarray,
        v_new: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        slots: np.ndarray,
        change: dict[str, int] | None = None,
    ) -> None:
        """Write rows [T, K, D] into k and v, in place."""
        plan = ReshapePlan()
        ok = self.c.pagedjax_ascend_plan_reshape_and_cache(
            self.arch, self.cores, 0, len(slots), *k.shape, ctypes.byref(plan)
        )
        if not ok:
            raise Refused(plan.error.decode())
        for name, value in (change or {}).items():
            setattr(plan.tiling, name, value)
        arrays = {"k_new": k_new, "v_new": v_new, "k": k, "v": v}
        arrays["slots"] = _padded(slots)
        tiling = np.frombuffer(bytearray(plan.tiling), np.uint8)
        with _Regions(self.c, arrays):
            at = [_pointer(x) for x in arrays.values()]
            self._start(
                self.c.pagedjax_ascend_reshape_and_cache,
                (plan.blocks, None, *at, _pointer(tiling)),
            )

    def copy(
        self,
        k: np.ndarray,
        v: np.ndarray,
        src: np.ndarray,
        dst: np.ndarray,
        cumsum: np.ndarray,
        change: dict[str, int] | None = None,
    ) -> None:
        """Copy page src[i] to dst[cumsum[i-1]:cumsum[i]] in k and v, in place."""
        plan = CopyPlan()
        ok = self.c.pagedjax_ascend_plan_block_copy(
            self.arch, self.cores, 0, len(src), len(dst), *k.shape, ctypes.byref(plan)
        )
        if not ok:
            raise Refused(plan.error.decode())
        for name, value in (change or {}).items():
            setattr(plan.tiling, name, value)
        arrays = {"k": k, "v": v, "src": _padded(src), "dst": _padded(dst)}
        arrays["cumsum"] = _padded(cumsum)
        tiling = np.frombuffer(bytearray(plan.tiling), np.uint8)
        with _Regions(self.c, arrays):
            at = [_pointer(x) for x in arrays.values()]
            self._start(
                self.c.pagedjax_ascend_block_copy,
                (plan.blocks, None, *at, _pointer(tiling)),
            )

    def _start(self, function: ctypes._CFuncPtr, arguments: tuple) -> None:
        self.c.pagedjax_sim_clear_errors()
        self.c.pagedjax_sim_set_seed(ctypes.c_uint64(self.seed))
        status = function(*arguments)
        count = self.c.pagedjax_sim_error_count()
        errors = [self.c.pagedjax_sim_error(i).decode() for i in range(count)]
        if errors:
            raise KernelError(errors)
        assert status == 0, f"the launch returned {status}"


class _Regions:
    """Arrays as simulated device memory, for as long as a call takes."""

    def __init__(self, library: ctypes.CDLL, arrays: dict[str, np.ndarray]) -> None:
        self.c, self.arrays = library, arrays

    def __enter__(self) -> None:
        self.c.pagedjax_sim_clear_regions()
        for name, array in self.arrays.items():
            assert array.flags.c_contiguous
            if array.size:
                self.c.pagedjax_sim_add_region(
                    _pointer(array), ctypes.c_size_t(array.nbytes), name.encode()
                )

    def __exit__(self, *_: object) -> None:
        self.c.pagedjax_sim_clear_regions()


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _padded(numbers: np.ndarray) -> np.ndarray:
    """Return a flat int32 copy, at least 8 long; the rest is a number out of range."""
    flat = np.asarray(numbers, np.int32).reshape(-1)
    padded = np.full(-(-flat.size // 8) * 8, 1 << 30, np.int32)
    padded[: flat.size] = flat
    return padded
