"""Loading the compiled library and registering what it provides with jax."""

import ctypes
import functools
import os

import jax

from ascend_bridge import build

TARGETS = ("paged_attention", "ragged_paged_attention", "write_kv", "copy_pages")
PREFIX = "pagedjax_"  # of the names in the library and of the FFI targets


@functools.cache
def register() -> tuple[bool, str]:
    """Load the library and register its targets for the cpu platform, once.

    A library made with newer FFI headers than the running jaxlib's is refused before
    anything is registered: registering it would fail the whole cpu backend.

    Returns:
        Whether the targets are there, and why not or what runs them.
    """
    path = build.HERE / build.LIBRARY
    if not path.exists():
        return False, f"the host executor is not built: {_recorded_reason()}"
    try:
        library = ctypes.CDLL(str(path))
        major, minor = library.pagedjax_ffi_major(), library.pagedjax_ffi_minor()
        library.pagedjax_isa.restype = ctypes.c_char_p
        isa = library.pagedjax_isa().decode()
        handlers = {name: library[PREFIX + name] for name in TARGETS}
    except (OSError, AttributeError) as error:
        return False, f"{build.LIBRARY} cannot be loaded: {error}"
    try:
        running = build.ffi_version(build.include_dir())
    except build.BuildError as error:
        return False, f"the FFI version of the running jaxlib is unknown: {error}"
    if major != running[0] or minor > running[1]:
        return False, (
            f"{build.LIBRARY} was built for FFI {major}.{minor} but this jaxlib has "
            f"{running[0]}.{running[1]}; rebuild it: `python -m ascend_bridge.build`"
        )
    for name, handler in handlers.items():
        capsule = jax.ffi.pycapsule(handler)
        jax.ffi.register_ffi_target(PREFIX + name, capsule, platform="cpu")
    reason = f"native code for the processor ({isa})"
    wanted = os.environ.get("PAGEDJAX_HOST_ISA")
    if wanted and wanted != isa:
        reason += f"; PAGEDJAX_HOST_ISA={wanted} is none that runs here, and ignored"
    return True, reason


def _recorded_reason() -> str:
    """Return what the build said when it made no library."""
    record = build.read_record(build.HERE)
    return record.reason if record else "run `python -m ascend_bridge.build`"
