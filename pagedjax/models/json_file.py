"""Reading the JSON files of a model folder."""

import json
from pathlib import Path
from typing import Any

from pagedjax.models.errors import ModelError

__all__ = ["read_json", "read_text"]


def read_text(path: Path) -> str:
    """Read a UTF-8 file.

    Args:
        path: of the file.

    Returns:
        Its text.

    Raises:
        ModelError: it cannot be read or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: not UTF-8 at byte {error.start}") from error
    except FileNotFoundError as error:
        raise ModelError(f"{path}: no such file") from error
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Args:
        path: of the file.

    Returns:
        The object.

    Raises:
        ModelError: it cannot be read, is not JSON, or holds something else.
    """
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value
