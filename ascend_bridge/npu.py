"""The kernels for arrays that an XLA backend keeps in the memory of an Ascend NPU.

Such a backend is called "npu" or "ascend". The custom calls have the names of those in
`ascend_bridge.host`, run on the backend's own stream and copy nothing:

    paged_attention           the operands and attributes of the host's
    write_kv, copy_pages      the results take the place of the pages, which XLA copies
                              first unless they are donated; places and layers, which
                              no kernel computes, are spelled out in XLA

**Never executed on an NPU**: the lowering is tested, and the handlers ran on a mock.
"""

import ctypes
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import checkify
from jax.interpreters import mlir

from ascend_bridge import _calls, _device_library

__all__ = [
    "attend",
    "copy_pages",
    "lower_debug_checks",
    "supports",
    "target_npu",
    "write_kv",
]

PLATFORMS = ("npu", "ascend")
# Vector cores of a chip that is only lowered for: they decide about splits, not about
# what is supported.
_CORES = {2201: 40, 1001: 32}


def attend(
    call: Any,
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_indices: jax.Array,
    seq_lens: jax.Array,
    *,
    target: str = "paged_attention",
) -> tuple[jax.Array, jax.Array]:
    """Return (out[S, H, D], lse[S, H]) of a described decode call.

    Args:
        call: a description with the attributes `scale`, `window` and `soft_cap`.
        q: queries, [S, H, D].
        k_pages: keys, [pages, page_size, K, D].
        v_pages: values, likewise.
        page_indices: int32[S, P]; ids outside 0 .. pages - 1 name no page.
        seq_lens: int32[S].
        target: the custom call, without its prefix.
    """
    run = _calls.attention_caller(
        False,
        call.scale,
        int(call.window or 0),
        float(call.soft_cap or 0.0),
        True,
        target=target,
    )
    out, lse = run(q, k_pages, v_pages, page_indices, seq_lens)
    return out, lse


def write_kv(
    k_pages: jax.Array,
    v_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: jax.Array,
    offsets: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Store the keys and values of some tokens; arguments as `host.write_kv`.

    Returns:
        The new `(k_pages, v_pages)`, in the place of the old ones.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from ascend_bridge import npu
        >>> pages = jax.ShapeDtypeStruct((4, 16, 1, 16), jnp.float16)
        >>> kv = jax.ShapeDtypeStruct((2, 1, 16), jnp.float16)
        >>> ids = jax.ShapeDtypeStruct((2,), jnp.int32)
        >>> traced = jax.jit(npu.write_kv).trace(pages, pages, kv, kv, ids, ids)
        >>> "pagedjax_write_kv" in traced.lower(lowering_platforms=("npu",)).as_text()
        True
    """
    num_pages, page_size = k_pages.shape[:2]
    real = (pages >= 0) & (pages < num_pages) & (offsets >= 0) & (offsets < page_size)
    places = jnp.where(real, pages * page_size + offsets, -1).astype(jnp.int32)
    out = _calls.changing_pages("write_kv")(k_pages, v_pages, k, v, places)
    return out[0], out[1]


def copy_pages(
    k_pages: jax.Array,
    v_pages: jax.Array,
    src_pages: jax.Array,
    dst_pages: jax.Array,
    *,
    num_layers: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Copy whole pages in every layer; arguments as `host.copy_pages`.

    Returns:
        The new `(k_pages, v_pages)`, in the place of the old ones.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from ascend_bridge import npu
        >>> pages = jax.ShapeDtypeStruct((4, 16, 1, 16), jnp.float16)
        >>> ids = jax.ShapeDtypeStruct((2,), jnp.int32)
        >>> traced = jax.jit(npu.copy_pages).trace(pages, pages, ids, ids)
        >>> "pagedjax_copy_pages" in traced.lower(lowering_platforms=("npu",)).as_text()
        True
    """
    rows = k_pages.shape[0]
    num_pages = rows // num_layers
    real = (src_pages >= 0) & (src_pages < num_pages)
    real &= (dst_pages >= 0) & (dst_pages < num_pages) & (src_pages != dst_pages)
    layers = jnp.arange(num_layers, dtype=jnp.int32)[:, None] * num_pages

    def spell_out(ids: jax.Array) -> jax.Array:
        return jnp.where(real[None], ids[None] + layers, rows).reshape(-1)

    counts = jnp.arange(1, num_layers * src_pages.shape[0] + 1, dtype=jnp.int32)
    out = _calls.changing_pages("copy_pages")(
        k_pages, v_pages, spell_out(src_pages), spell_out(dst_pages), counts
    )
    return out[0], out[1]


def target_npu() -> tuple[str | None, str]:
    """Return the kind of NPU that is traced for, or None and why there is none.

    That is the device of the current abstract mesh, as an export sets it, or else the
    first device of the process.

    Example:
        >>> from ascend_bridge import npu
        >>> npu.target_npu()
        (None, 'the device is cpu')
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None or not device.device_kind.startswith("Ascend"):
        device = jax.devices()[0]
        if device.platform not in PLATFORMS:
            return None, f"the device is {device.platform}"
    lower_debug_checks()
    return device.device_kind, ""


@functools.cache
def lower_debug_checks() -> None:
    """Let `checkify.debug_check` be lowered for an NPU, where jax knows it not.

    It has rules for cpu, gpu and tpu only. Outside of `checkify` a debug check
    computes nothing, which is all that the rule says. `target_npu` calls this when it
    finds an NPU; an export that asks for no attention calls it itself.
    """

    def rule(_: Any, *args: Any, debug: bool, **parameters: Any) -> list[Any]:
        if debug:
            return []
        raise NotImplementedError(
            "checkify.check on an NPU needs checkify.checkify around the function"
        )

    traced = jax.make_jaxpr(lambda ok: checkify.debug_check(ok, "never"))(True)
    # Without a platform: for all that have no rule of their own. By its name jax takes
    # a rule only for a platform that it knows.
    mlir.register_lowering(traced.eqns[-1].primitive, rule)


def supports(call: Any, arch: int, cores: int | None = None) -> tuple[bool, str]:
    """Return whether the kernels can do a call, and the reason if they cannot.

    Args:
        call: a description, as `pagedjax` makes it.
        arch: 2201 (910B1 to 910B4, 910_93) or 1001 (910A).
        cores: vector cores of the device; None for those of a usual one.
    """
    if call.ragged:
        return False, "there is no kernel for several queries of a slot"
    if call.has_scales:
        return False, f"there is no kernel for {call.kv_dtype} pages"
    if call.q_dtype != call.kv_dtype:
        return False, f"q is {call.q_dtype} but the pages are {call.kv_dtype}"
    if call.kv_dtype not in ("float16", "bfloat16"):
        return False, f"the kernels take float16 and bfloat16, not {call.kv_dtype}"
    shape = _device_library.CShape(
        num_layers=1,
        num_pages=call.num_pages,
        page_size=call.page_size,
        num_kv_heads=call.num_kv_heads,
        head_dim=call.head_dim,
        dtype=_device_library.DTYPES[call.kv_dtype],
        num_heads=call.num_heads,
        max_slots=call.num_slots,
        pages_per_slot=call.pages_per_slot,
        max_tokens=1,
    )
    able, reason = _device_library.call(
        "npu_supports",
        ctypes.byref(shape),
        arch,
        cores or _CORES[arch],
        ctypes.c_float(call.scale),
        int(call.window or 0),
        ctypes.c_float(call.soft_cap or 0.0),
    )
    return bool(able), reason


def arch_of(kind: str) -> int:
    """Return the architecture of a device kind: 2201, 1001, or 0 if it is not known.

    Example:
        >>> from ascend_bridge import npu
        >>> npu.arch_of("Ascend910B3"), npu.arch_of("Ascend910A")
        (2201, 1001)
    """
    return int(_device_library.require().pagedjax_npu_arch_of(kind.encode()))
