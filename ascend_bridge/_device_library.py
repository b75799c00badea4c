"""The device executor's part of the compiled library: its C functions and targets."""

import atexit
import ctypes
import functools

import jax

from ascend_bridge import _library, build

POOL_TARGETS = (
    "pool_write_kv",
    "pool_copy_pages",
    "pool_paged_attention",
    "pool_attend",
    "pool_read_pages",
    "npu_paged_attention",
)
# Names of the host's targets that the NPU has too, for arrays in its own memory, and
# the names under which XLA backends for the NPU look them up.
NPU_TARGETS = ("paged_attention", "write_kv", "copy_pages")
NPU_PLATFORMS = ("ASCEND", "npu")
DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
_MESSAGE = 2048


class CShape(ctypes.Structure):
    """`Shape` of page_store.h."""

    _fields_ = [
        (name, ctypes.c_int32)
        for name in (
            "num_layers",
            "num_pages",
            "page_size",
            "num_kv_heads",
            "head_dim",
            "dtype",
            "num_heads",
            "max_slots",
            "pages_per_slot",
            "max_tokens",
        )
    ]


class CStatus(ctypes.Structure):
    """`Status` of pool.h."""

    _fields_ = [
        ("state", ctypes.c_int32),
        ("version", ctypes.c_int32),
        ("bytes", ctypes.c_int64),
    ]


@functools.cache
def load() -> tuple[ctypes.CDLL | None, str]:
    """Load the library and register its targets, once.

    Returns:
        The library, or None and why it is not usable.
    """
    able, reason = _library.register()
    if not able:
        return None, reason
    library = ctypes.CDLL(str(build.HERE / build.LIBRARY))
    try:
        handlers = {name: library[_library.PREFIX + name] for name in POOL_TARGETS}
        on_npu = {
            name: library[f"{_library.PREFIX}on_npu_{name}"] for name in NPU_TARGETS
        }
        library.pagedjax_npu_look_in(str(build.HERE / "kernels").encode())
    except AttributeError as error:
        return None, (
            f"{build.LIBRARY} is older than the sources ({error}); rebuild it: "
            "`python -m ascend_bridge.build`"
        )
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(
            _library.PREFIX + name, jax.ffi.pycapsule(handler), platform="cpu"
        )
    for platform in NPU_PLATFORMS:
        for name, handler in on_npu.items():
            capsule = jax.ffi.pycapsule(handler)
            jax.ffi.register_ffi_target(
                _library.PREFIX + name, capsule, platform=platform
            )
    # Before the runtime's own clean-up, and before XLA's threads are gone.
    atexit.register(library.pagedjax_pool_shutdown)
    return library, ""


def require() -> ctypes.CDLL:
    """Return the library, or raise `NotImplementedError` with the reason."""
    library, reason = load()
    if library is None:
        raise NotImplementedError(reason)
    return library


def call(name: str, *arguments: object) -> tuple[int, str]:
    """Call a C function whose last arguments take a message; its result, and that."""
    message = ctypes.create_string_buffer(_MESSAGE)
    result = require()[_library.PREFIX + name](
        *arguments, message, ctypes.c_size_t(_MESSAGE)
    )
    return int(result), message.value.decode(errors="replace")
