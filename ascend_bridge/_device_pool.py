"""Opening, watching and closing a pool outside of XLA's memory."""

import ctypes
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ascend_bridge import _device_library
from ascend_bridge._options import checked_int

_STATES = ("open", "poisoned", "closed")
_TROUBLE = {1: ValueError, 2: RuntimeError, 3: NotImplementedError, 4: MemoryError}


@dataclasses.dataclass(frozen=True)
class PoolShape:
    """Sizes of a pool. The last four bound what one call may bring.

    Attributes:
        num_layers: L.
        num_pages: pages of a layer, N; also the id that names no page.
        page_size: tokens in a page.
        num_kv_heads: K.
        head_dim: D.
        dtype: name of the dtype of pages, queries and results.
        num_heads: query heads, H.
        max_slots: rows of a table, S, at most.
        pages_per_slot: columns of a table, P, at most.
        max_tokens: tokens that one call writes, T, at most.
    """

    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    num_heads: int
    max_slots: int
    pages_per_slot: int
    max_tokens: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DevicePool:
    """One version of a pool outside of XLA's memory.

    Attributes:
        handle: int32[]; which pool.
        version: int32[]; which of its versions.
        shape: its sizes (static).
        executor: "npu" or "host" (static).
    """

    handle: jax.Array
    version: jax.Array
    shape: PoolShape = dataclasses.field(metadata={"static": True})
    executor: str = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class PoolStatus:
    """What a pool is in now.

    Attributes:
        state: "open", "poisoned" (the device failed; close it) or "closed".
        version: the last one, which can be changed.
        device_bytes: held where the pages are, working space included.
        message: what poisoned it.
    """

    state: str
    version: int
    device_bytes: int
    message: str


def open_pool(
    *,
    num_layers: int,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    num_heads: int,
    max_slots: int,
    pages_per_slot: int,
    max_tokens: int | None = None,
    dtype: Any = jnp.float16,
    executor: str | None = None,
    device: int = 0,
    timeout_ms: int = 60_000,
) -> DevicePool:
    """Make a pool of zeros, with all the memory that its calls will need.

    Args:
        num_layers: layers that share a page table, L.
        num_pages: pages of each layer, N.
        page_size: tokens in a page; on an NPU a multiple of 16, best 128.
        num_kv_heads: key-value heads, K.
        head_dim: width of a head, D; on an NPU a multiple of 16.
        num_heads: query heads, H, a multiple of K.
        max_slots: rows of the tables that calls bring, at most.
        pages_per_slot: columns of them, at most.
        max_tokens: tokens that one call writes, at most; None means `max_slots`.
        dtype: float16, or bfloat16 (not on a 910A); float32 on the host only.
        executor: "npu", "host", or None for the NPU if it is there and can, else host.
        device: which NPU.
        timeout_ms: how long the NPU may take for one call, in milliseconds.

    Returns:
        The pool at version 0. Not a value to make inside `jit`.

    Raises:
        ValueError: a size is wrong, or the NPU cannot do it; the message has numbers.
        TypeError: a size is no int.
        MemoryError: there is no room on the NPU or on the host.
        NotImplementedError: there is no NPU, or no library; the message says why.
        RuntimeError: the NPU failed.

    Example:
        >>> import jax.numpy as jnp
        >>> from ascend_bridge import ascend
        >>> pool = ascend.open_pool(
        ...     num_layers=1,
        ...     num_pages=4,
        ...     page_size=16,
        ...     num_kv_heads=1,
        ...     head_dim=16,
        ...     num_heads=2,
        ...     max_slots=2,
        ...     pages_per_slot=2,
        ... )
        >>> kv = jnp.ones((1, 1, 16), jnp.float16)
        >>> pool = ascend.write_kv(pool, 0, kv, kv, jnp.array([3]), jnp.array([0]))
        >>> int(pool.version)
        1
        >>> ascend.close_pool(pool)
    """
    name = jnp.dtype(dtype).name
    if name not in _device_library.DTYPES:
        raise ValueError(
            f"dtype must be one of {', '.join(_device_library.DTYPES)}, got {name}"
        )
    if executor not in (None, "npu", "host"):
        raise ValueError(f"executor must be 'npu', 'host' or None, got {executor!r}")
    shape = PoolShape(
        num_layers=checked_int("num_layers", num_layers),
        num_pages=checked_int("num_pages", num_pages),
        page_size=checked_int("page_size", page_size),
        num_kv_heads=checked_int("num_kv_heads", num_kv_heads),
        head_dim=checked_int("head_dim", head_dim),
        dtype=name,
        num_heads=checked_int("num_heads", num_heads),
        max_slots=checked_int("max_slots", max_slots),
        pages_per_slot=checked_int("pages_per_slot", pages_per_slot),
        max_tokens=checked_int(
            "max_tokens", max_slots if max_tokens is None else max_tokens
        ),
    )
    timeout_ms = checked_int("timeout_ms", timeout_ms)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}"
        )
    c_shape = _c_shape(shape)
    chosen = executor or ("npu" if _npu_can(c_shape, device) else "host")
    handle = ctypes.c_int32()
    failed, message = _device_library.call(
        "pool_open",
        ctypes.byref(c_shape),
        int(chosen == "npu"),
        checked_int("device", device, 0),
        timeout_ms,
        ctypes.byref(handle),
    )
    if failed:
        error = _TROUBLE.get(failed, RuntimeError)
        raise error(f"no pool was opened on the {chosen}: {message}")
    return DevicePool(jnp.int32(handle.value), jnp.int32(0), shape, chosen)


def close_pool(pool: DevicePool) -> None:
    """Wait for the call in flight and free the memory. Later calls are errors.

    Closing a closed pool does nothing.

    Args:
        pool: any version of the pool; concrete, not inside `jit`.

    Raises:
        NotImplementedError: there never was such a pool.

    Example:
        >>> import jax.numpy as jnp
        >>> from ascend_bridge import ascend
        >>> pool = ascend.open_pool(
        ...     num_layers=1, num_pages=4, page_size=16, num_kv_heads=1, head_dim=16,
        ...     num_heads=2, max_slots=2, pages_per_slot=2
        ... )
        >>> ascend.close_pool(pool)
        >>> ascend.pool_status(pool).state
        'closed'
    """
    failed, message = _device_library.call("pool_close", int(pool.handle))
    if failed:
        raise _TROUBLE.get(failed, RuntimeError)(message)


def pool_status(pool: DevicePool) -> PoolStatus:
    """Return what a pool is in now, whatever the version at hand.

    Args:
        pool: any version of the pool; concrete, not inside `jit`.

    Example:
        >>> import jax.numpy as jnp
        >>> from ascend_bridge import ascend
        >>> pool = ascend.open_pool(
        ...     num_layers=1, num_pages=4, page_size=16, num_kv_heads=1, head_dim=16,
        ...     num_heads=2, max_slots=2, pages_per_slot=2
        ... )
        >>> status = ascend.pool_status(pool)
        >>> status.state, status.version
        ('open', 0)
        >>> ascend.close_pool(pool)
    """
    status = _device_library.CStatus()
    _, message = _device_library.call(
        "pool_status", int(pool.handle), ctypes.byref(status)
    )
    return PoolStatus(_STATES[status.state], status.version, status.bytes, message)


def latest(pool: DevicePool) -> DevicePool:
    """Return the last version of a pool: what to go on with after an error.

    Args:
        pool: any version of the pool; concrete, not inside `jit`.

    Example:
        >>> import jax.numpy as jnp
        >>> from ascend_bridge import ascend
        >>> pool = ascend.open_pool(
        ...     num_layers=1, num_pages=4, page_size=16, num_kv_heads=1, head_dim=16,
        ...     num_heads=2, max_slots=2, pages_per_slot=2
        ... )
        >>> kv = jnp.ones((1, 1, 16), jnp.float16)
        >>> _ = ascend.write_kv(pool, 0, kv, kv, jnp.array([3]), jnp.array([5]))
        >>> int(pool.version), int(ascend.latest(pool).version)
        (0, 1)
        >>> ascend.close_pool(pool)
    """
    version = jnp.int32(pool_status(pool).version)
    return dataclasses.replace(pool, version=version)


def usable(device: int = 0) -> tuple[bool, str]:
    """Return whether an NPU can be used from here, and which or why not.

    That takes the vendor's runtime, the compiled kernels and a device.

    Example:
        >>> from ascend_bridge import ascend
        >>> able, reason = ascend.usable()
        >>> reason != ""
        True
    """
    library, reason = _device_library.load()
    if library is None:
        return False, reason
    _, _, able, text = _probe(device)
    return able, text


def diagnose() -> dict[str, str]:
    """Return what there is of each thing that an NPU takes, or what is missing.

    Example:
        >>> from ascend_bridge import ascend
        >>> list(ascend.diagnose())
        ['runtime', 'kernels', 'device']
    """
    library, reason = _device_library.load()
    if library is None:
        return {"library": reason}
    found = {}
    for name in ("runtime", "kernels"):
        able, text = _device_library.call(f"npu_has_{name}")
        found[name] = text if able else f"missing: {text}"
    if any(text.startswith("missing") for text in found.values()):
        found["device"] = "not asked: that takes both"
    else:
        _, _, able, text = _probe(0)
        found["device"] = text if able else f"missing: {text}"
    return found


def npu_arch_and_cores(device: int = 0) -> tuple[int, int]:
    """Return the architecture and the vector cores of an NPU that is usable."""
    arch, cores, _, _ = _probe(device)
    return arch, cores


# --- helpers -------------------------------------------------------------------------


def _c_shape(shape: PoolShape) -> _device_library.CShape:
    sizes = dataclasses.asdict(shape)
    sizes["dtype"] = _device_library.DTYPES[shape.dtype]
    return _device_library.CShape(**sizes)


def _probe(device: int) -> tuple[int, int, bool, str]:
    """Return (arch, cores, usable, text) of an NPU."""
    arch, cores = ctypes.c_int32(), ctypes.c_int32()
    able, text = _device_library.call(
        "npu_probe",
        checked_int("device", device, 0),
        ctypes.byref(arch),
        ctypes.byref(cores),
    )
    return arch.value, cores.value, bool(able), text


def _npu_can(c_shape: _device_library.CShape, device: int) -> bool:
    """Return whether there is an NPU and its kernels can hold such a pool."""
    arch, cores, able, _ = _probe(device)
    if not able:
        return False
    fits, _ = _device_library.call(
        "npu_supports",
        ctypes.byref(c_shape),
        arch,
        cores,
        ctypes.c_float(1.0),
        0,
        ctypes.c_float(0.0),
    )
    return bool(fits)
