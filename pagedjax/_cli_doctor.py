"""`pagedjax doctor`: what is there on this machine and what is not."""

import importlib.metadata
import platform
from collections.abc import Iterator

_PACKAGES = ("jax", "jaxlib", "flax", "chex", "numpy")
_OPTIONAL = ("gguf", "safetensors", "tokenizers", "huggingface_hub", "jinja2", "tqdm")


def run_doctor() -> None:
    """Prints versions, devices, attention implementations and models."""
    for title, lines in (
        ("versions", _versions()),
        ("devices", _devices()),
        ("attention implementations", _implementations()),
        ("ascend", _ascend()),
        ("models", _models()),
        ("packages of pagedjax[models]", _optional_packages()),
        ("compiled programs", _cache()),
    ):
        print(title)
        for name, text in lines:
            print(f"  {name:<16} {text}")


def _versions() -> Iterator[tuple[str, str]]:
    from pagedjax import __version__

    yield "pagedjax", __version__
    yield "python", f"{platform.python_version()} ({platform.platform()})"
    for package in _PACKAGES:
        yield package, _version(package)


def _devices() -> Iterator[tuple[str, str]]:
    import jax

    try:
        devices = jax.devices()
    except RuntimeError as error:  # a platform was asked for that is not there
        yield "none", str(error).splitlines()[0]
        return
    for device in devices:
        yield f"{device.platform}:{device.id}", device.device_kind


def _implementations() -> Iterator[tuple[str, str]]:
    from pagedjax import available_implementations

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
    from pagedjax._cli_generate import compilation_cache_dir

    yield "folder", str(compilation_cache_dir() or "not kept")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
