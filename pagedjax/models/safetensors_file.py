"""Reading safetensors checkpoints: one file, or shards with an index.

The `safetensors` package checks a file's head against its size before anything is
read. What is added here: shards, several files seen as one, and one kind of error.

Format: https://github.com/huggingface/safetensors
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.models.errors import ModelError, require
from pagedjax.models.json_file import read_json

__all__ = ["SafetensorsFiles", "open_safetensors"]

_FLOATS = ("F64", "F32", "F16", "BF16")
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclasses.dataclass(frozen=True)
class SafetensorsFiles:
    """Hold the open files of one checkpoint; the tensors stay on disk.

    Attributes:
        path: of the folder.
        shapes: tensor name to shape.
        handles: tensor name to the open file that holds it.
    """

    path: Path
    shapes: dict[str, tuple[int, ...]]
    handles: dict[str, Any]

    def read(self, name: str) -> np.ndarray:
        """Return one tensor.

        Args:
            name: a key of `shapes`.

        Returns:
            The tensor in the dtype of the file.

        Raises:
            ModelError: the dtype is not floating point, or a value is not finite.
        """
        handle = self.handles[name]
        dtype = handle.get_slice(name).get_dtype()
        if dtype not in _FLOATS:
            raise ModelError(
                f"{self.path}: tensor {name} has the unsupported type {dtype}"
            )
        values = handle.get_tensor(name)
        if not np.isfinite(values).all():
            raise ModelError(f"{self.path}: tensor {name} holds NaN or infinity")
        return values


def open_safetensors(folder: Path) -> SafetensorsFiles:
    """Open the safetensors files of a folder.

    Args:
        folder: holds `model.safetensors.index.json` and its shards, or
            `model.safetensors`, or exactly one other `.safetensors` file.

    Returns:
        The tensors of all files.

    Raises:
        ModelError: there is no file, a shard is missing, or a file is damaged.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    handles: dict[str, Any] = {}
    for path in _files(folder):
        handle = _open(path)
        for name in handle.keys():  # noqa: SIM118 (the handle is no mapping)
            if name in shapes:
                raise ModelError(f"{path}: tensor {name} is in two files")
            shapes[name] = tuple(handle.get_slice(name).get_shape())
            handles[name] = handle
    return SafetensorsFiles(folder, shapes, handles)


def _files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint, each once."""
    index = folder / _INDEX
    if not index.exists():
        if (folder / _SINGLE).exists():
            return [folder / _SINGLE]
        files = sorted(folder.glob("*.safetensors"))
        if len(files) == 1:
            return files
        found = ", ".join(file.name for file in files[:3]) or "none"
        message = f"expected {_INDEX} or one .safetensors file, found {found}"
        for file in sorted(folder.glob("*.gguf"))[:1]:
            message += f"; for the GGUF file in it give {file}"
        raise ModelError(f"{folder}: {message}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: weight_map is missing")
    names = list(weight_map.values())
    for name in names:
        # A shard is a plain file name: an index must not point outside its folder.
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(f"{index}: weight_map names a bad file: {name!r}")
    return [folder / name for name in sorted(set(names))]


def _open(path: Path) -> Any:
    """Open one file with the package, turning its errors into ours."""
    safetensors = require("safetensors")
    try:
        path.open("rb").close()  # the package calls every failure a missing file
    except FileNotFoundError as error:
        raise ModelError(f"{path}: no such file") from error
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}") from error
    try:
        return safetensors.safe_open(path, framework="numpy")
    except (OSError, safetensors.SafetensorError) as error:
        raise ModelError(f"{path}: damaged safetensors file: {error}") from error
