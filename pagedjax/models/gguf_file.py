"""Reading GGUF files that may be damaged.

    +--------+-----------+-------------------+---------+------------------+
    | header | key/value | name, shape, type | padding | data of tensor 0 |
    | counts | pairs     | offset per tensor |         | data of tensor 1 |
    +--------+-----------+-------------------+---------+------------------+

The reader of the `gguf` package trusts the counts and lengths in a file: a flipped bit
makes it loop or allocate without bound, and on a good file it takes seconds to wrap
each of 100,000 vocabulary entries in arrays. Here every length is checked against the
bytes that are left before it is used; the tables of types and the dequantisation are
the package's.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import dataclasses
import math
import struct
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pagedjax.models.errors import ModelError, require

__all__ = ["GGUFFile", "GGUFTensor", "open_gguf"]

_Value = TypeVar("_Value")

# Scalar types of the format, by their number: struct code, numpy dtype.
_SCALARS = {
    0: ("<B", "<u1"),
    1: ("<b", "<i1"),
    2: ("<H", "<u2"),
    3: ("<h", "<i2"),
    4: ("<I", "<u4"),
    5: ("<i", "<i4"),
    6: ("<f", "<f4"),
    7: ("<?", "<u1"),
    10: ("<Q", "<u8"),
    11: ("<q", "<i8"),
    12: ("<d", "<f8"),
}
_STRING, _ARRAY = 8, 9
_MAGIC = b"GGUF"
_MAX_DIMS = 4
_DEFAULT_ALIGNMENT = 32


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """Locate one tensor: its shape (rows first), ggml type, and bytes in the file."""

    shape: tuple[int, ...]
    ggml_type: int
    start: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """Hold the parsed head of a GGUF file; the tensors stay on disk.

    Attributes:
        path: of the file.
        metadata: key to int, float, bool, str, list of str, or a 1-D numpy array.
        tensors: name to `GGUFTensor`.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def get(
        self, key: str, kind: type[_Value], default: _Value | None = None
    ) -> _Value:
        """Return a metadata value of the given type.

        Args:
            key: its name.
            kind: int, float, bool, str, list or numpy.ndarray.
            default: returned where the key is missing.

        Returns:
            The value.

        Raises:
            ModelError: the key is missing without a default, or has another type.
        """
        value = self.metadata.get(key, default)
        if value is None:
            raise ModelError(f"{self.path}: metadata key {key} is missing")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ModelError(
                f"{self.path}: metadata key {key} should be {kind.__name__}, "
                f"got {type(value).__name__}"
            )
        return value

    def read(self, name: str) -> np.ndarray:
        """Dequantise one tensor.

        Args:
            name: a key of `tensors`.

        Returns:
            float32 of the tensor's shape.

        Raises:
            ModelError: the type cannot be dequantised, or a value is not finite.
        """
        tensor = self.tensors[name]
        gguf = require("gguf")
        kind = gguf.GGMLQuantizationType(tensor.ggml_type)
        raw = np.memmap(
            self.path, np.uint8, "r", offset=tensor.start, shape=(tensor.num_bytes,)
        )
        rows = raw.reshape(*tensor.shape[:-1], -1)
        if kind.name in ("F32", "F16"):
            rows = rows.view("<f4" if kind.name == "F32" else "<f2")
        try:
            # Scales of a damaged file overflow; the check below reports them.
            with np.errstate(all="ignore"):
                values = gguf.quants.dequantize(rows, kind)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.path}: tensor {name} has the unsupported type {kind.name}"
            ) from error
        if not np.isfinite(values).all():
            raise ModelError(f"{self.path}: tensor {name} holds NaN or infinity")
        return values


def open_gguf(path: Path) -> GGUFFile:
    """Parse the head of a GGUF file and check that its tensors lie inside the file.

    Args:
        path: of the file.

    Returns:
        The metadata and the places of the tensors.

    Raises:
        ModelError: the file is not GGUF, is damaged, or uses an unknown type.
    """
    try:
        size = path.stat().st_size  # an empty file cannot be mapped
        data = np.memmap(path, np.uint8, "r").data if size else memoryview(b"")
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}") from error
    if path.suffix.lower() != ".gguf" and bytes(data[:4]) != _MAGIC:
        message = f"{path}: not a GGUF file: give one, or the folder of a model"
        if (path.parent / "config.json").is_file():
            message += f", such as {path.parent}"
        raise ModelError(message)
    try:
        return _parse(path, _Cursor(data))
    except _Damaged as error:
        raise ModelError(f"{path}: damaged GGUF file: {error}") from error


class _Damaged(Exception):
    """What is wrong at which byte; becomes a ModelError with the path in front."""


class _Cursor:
    """Read forwards through bytes, never past their end."""

    def __init__(self, data: memoryview):
        self.data = data
        self.at = 0

    def take(self, count: int, what: str) -> memoryview:
        left = len(self.data) - self.at
        if count > left:
            raise _Damaged(
                f"{what} at byte {self.at} needs {count} bytes, {left} are left"
            )
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, code: str, what: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code), what))[0]

    def text(self, what: str) -> str:
        at = self.at
        raw = self.take(self.number("<Q", what), what)
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as error:
            raise _Damaged(f"{what} at byte {at} is not UTF-8") from error

    def value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.text(what)
        if kind in _SCALARS:
            return self.number(_SCALARS[kind][0], what)
        if kind != _ARRAY:
            raise _Damaged(f"{what} at byte {self.at} has unknown type {kind}")
        kind, count = self.number("<I", what), self.number("<Q", what)
        if kind == _STRING:
            # Each string takes 8 bytes at least, so the end of the file stops this.
            return [self.text(what) for _ in range(count)]
        if kind not in _SCALARS:
            raise _Damaged(f"{what} at byte {self.at} is an array of type {kind}")
        dtype = np.dtype(_SCALARS[kind][1])
        return np.frombuffer(self.take(count * dtype.itemsize, what), dtype)


def _parse(path: Path, cursor: _Cursor) -> GGUFFile:
    """Parse header, metadata and tensor places."""
    if len(cursor.data) < 4 or bytes(cursor.take(4, "magic")) != _MAGIC:
        raise _Damaged("it does not start with GGUF")
    version = cursor.number("<I", "version")
    if version not in (2, 3):
        raise _Damaged(f"version {version} is not supported (2 and 3 are)")
    num_tensors = cursor.number("<Q", "tensor count")
    num_keys = cursor.number("<Q", "key count")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.text("metadata key")
        if key in metadata:
            raise _Damaged(f"metadata key {key} appears twice")
        metadata[key] = cursor.value(cursor.number("<I", key), key)
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise _Damaged(f"general.alignment is {alignment!r}, not a power of two")
    heads: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(num_tensors):
        name = cursor.text("tensor name")
        if name in heads:
            raise _Damaged(f"tensor {name} appears twice")
        num_dims = cursor.number("<I", name)
        if not 1 <= num_dims <= _MAX_DIMS:
            raise _Damaged(f"tensor {name} has {num_dims} dimensions")
        dims = struct.unpack(f"<{num_dims}Q", cursor.take(8 * num_dims, name))
        heads[name] = (dims[::-1], cursor.number("<I", name), cursor.number("<Q", name))
    base = cursor.at + -cursor.at % alignment
    tensors = {
        name: _place(name, *head, base, alignment, len(cursor.data))
        for name, head in heads.items()
    }
    total = sum(tensor.num_bytes for tensor in tensors.values())
    if total > len(cursor.data):
        raise _Damaged(f"tensors overlap: {total} bytes in all")
    return GGUFFile(path, metadata, tensors)


def _place(
    name: str,
    shape: tuple[int, ...],
    ggml_type: int,
    offset: int,
    base: int,
    alignment: int,
    file_size: int,
) -> GGUFTensor:
    """Check one tensor's type, shape and offset against the file."""
    gguf = require("gguf")
    try:
        kind = gguf.GGMLQuantizationType(ggml_type)
    except ValueError as error:
        raise _Damaged(f"tensor {name} has unknown type {ggml_type}") from error
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if min(shape) < 1 or shape[-1] % block:
        raise _Damaged(
            f"tensor {name} has shape {list(shape)}; {kind.name} needs rows of a "
            f"multiple of {block}"
        )
    num_bytes = math.prod(shape) // block * block_bytes
    start = base + offset
    if offset % alignment or start + num_bytes > file_size:
        raise _Damaged(
            f"tensor {name} lies at bytes {start}..{start + num_bytes} of a file of "
            f"{file_size}, alignment {alignment}"
        )
    return GGUFTensor(shape, ggml_type, start, num_bytes)
