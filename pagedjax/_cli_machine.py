"""What the command line asks of the machine: devices, memory, a folder for programs."""

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from pagedjax._cli_prompts import CommandError


def find_devices() -> list[jax.Device]:
    """Gives jax's devices.

    Raises:
      CommandError: there is none, as where `JAX_PLATFORMS` names what is not there.

    Example:
      >>> from pagedjax._cli_machine import find_devices
      >>> len(find_devices()) > 0
      True
    """
    try:
        return jax.devices()
    except RuntimeError as error:
        raise CommandError(str(error).splitlines()[0]) from error
    except AssertionError as error:  # a platform jax knows, without its plugin
        platforms = os.environ.get("JAX_PLATFORMS")
        raise CommandError(
            f"jax has no device for JAX_PLATFORMS={platforms}"
        ) from error


def device_memory() -> int | None:
    """Gives the memory of the default device in bytes, or None if unknown."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, OSError, ValueError):
            return None
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit")


@dataclasses.dataclass(frozen=True)
class ProgramCache:
    """Says where compiled programs are kept.

    Attributes:
      folder: where; None: nowhere.
      reason: why there or why not; "" for the usual place.
      failed: whether a folder was wanted that cannot be used.
    """

    folder: Path | None
    reason: str = ""
    failed: bool = False


def find_program_cache() -> ProgramCache:
    """Finds the folder of compiled programs, and makes it if there is none.

    jax's own setting comes first, then `PAGEDJAX_CACHE_DIR`, which may be empty for
    nowhere, then the user's cache folder.

    Example:
      >>> import os
      >>> from pagedjax._cli_machine import find_program_cache
      >>> os.environ["PAGEDJAX_CACHE_DIR"] = ""
      >>> find_program_cache().reason
      'PAGEDJAX_CACHE_DIR is empty'
      >>> del os.environ["PAGEDJAX_CACHE_DIR"]
    """
    if not jax.config.values["jax_enable_compilation_cache"]:
        return ProgramCache(None, "JAX_ENABLE_COMPILATION_CACHE is off")
    if own := jax.config.values["jax_compilation_cache_dir"]:
        return ProgramCache(Path(own), "jax's own setting")
    name = os.environ.get("PAGEDJAX_CACHE_DIR")
    if name == "":
        return ProgramCache(None, "PAGEDJAX_CACHE_DIR is empty")
    if name is None:
        name = (os.environ.get("XDG_CACHE_HOME") or "~/.cache") + "/pagedjax"
    try:
        folder = Path(name).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
    except RuntimeError:
        return ProgramCache(None, f"{name}: no such home directory", failed=True)
    except FileExistsError:
        return ProgramCache(None, f"{name} is not a folder", failed=True)
    except OSError as error:
        return ProgramCache(None, f"{name}: {error.strerror}", failed=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        return ProgramCache(None, f"{folder} cannot be written", failed=True)
    return ProgramCache(folder)


@contextlib.contextmanager
def cache_errors() -> Iterator[list[str]]:
    """Collects what jax warns of compiled programs that it cannot read or write.

    Returns:
      The list of these warnings, growing; others are shown as ever.
    """
    found: list[str] = []
    with warnings.catch_warnings():
        show = warnings.showwarning

        def collect(message: Warning | str, *rest: Any, **more: Any) -> None:
            if "persistent compilation cache" in str(message):
                found.append(str(message).splitlines()[0])
            else:
                show(message, *rest, **more)

        warnings.showwarning = collect
        yield found
