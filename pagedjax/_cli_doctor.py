"""`pagedjax doctor`: what is there on this machine and what is not."""

import importlib.metadata
import platform
from collections.abc import Iterator

from pagedjax import __version__, available_implementations
from pagedjax._cli_machine import find_devices, find_program_cache
from pagedjax._cli_output import write
from pagedjax._cli_prompts import CommandError

_WIDTH = 16  # of the names, at least
_PACKAGES = ("jax", "jaxlib", "flax", "chex", "numpy")
_OPTIONAL = ("gguf", "safetensors", "tokenizers", "huggingface_hub", "jinja2", "tqdm")


def run_doctor() -> None:
    """Prints versions, devices, attention implementations and models.

    Raises:
      CommandError: jax has no device; raised when the rest is printed.
    """
    error: CommandError | None = None
    try:
        find_devices()
    except CommandError as found:
        error = found
    for title, find in (
        ("versions", _versions),
        ("devices", _devices if error is None else None),
        ("attention implementations", _implementations if error is None else None),
        ("ascend", _ascend),
        ("models", _models),
        ("packages of pagedjax[models]", _optional_packages),
        ("compiled programs", _cache),
    ):
        lines = [("none", str(error))] if find is None else list(find())
        width = max(_WIDTH, *(len(name) for name, _ in lines))
        rows = [f"  {name:<{width}} {text}\n" for name, text in lines]
        write(f"{title}\n{''.join(rows)}")
    if error is not None:
        raise error


def _versions() -> Iterator[tuple[str, str]]:
    yield "pagedjax", __version__
    yield "python", f"{platform.python_version()} ({platform.platform()})"
    for package in _PACKAGES:
        yield package, _version(package)


def _devices() -> Iterator[tuple[str, str]]:
    for device in find_devices():
        yield f"{device.platform}:{device.id}", device.device_kind


def _implementations() -> Iterator[tuple[str, str]]:
    for name, (usable, reason) in available_implementations().items():
        yield name, f"{'usable' if usable else 'not usable'}: {reason}"


def _ascend() -> Iterator[tuple[str, str]]:
    from ascend_bridge import ascend

    yield from ascend.diagnose().items()


def _models() -> Iterator[tuple[str, str]]:
    try:
        from pagedjax.models import loading
    except ModuleNotFoundError as error:
        yield "none", f"{error.name} is missing: pip install 'pagedjax[models]'"
        return
    for name in loading._KNOWN:
        try:
            yield name, f"found: {loading.find_model_file(name)}"
        except loading.ModelError as error:
            yield name, f"not found: {error}"


def _optional_packages() -> Iterator[tuple[str, str]]:
    for package in _OPTIONAL:
        yield package, _version(package)


def _cache() -> Iterator[tuple[str, str]]:
    cache = find_program_cache()
    if cache.folder is None:
        yield "folder", f"not kept: {cache.reason}"
    else:
        yield "folder", f"{cache.folder}{cache.reason and f' ({cache.reason})'}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
