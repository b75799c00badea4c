"""The one exception that loading a model raises."""

import importlib
from typing import Any

__all__ = ["ModelError", "require"]


class ModelError(ValueError):
    """Report a model that cannot be used: one line that says which and why.

    Everything a user can get wrong about a model ends here: an unknown name, a file
    that is damaged or of an unsupported kind, a missing tensor, a bad config.

    Example:
        >>> from pagedjax.models import ModelError, load_model
        >>> try:
        ...     load_model("smollm3-135m.gguf")
        ... except ModelError as error:
        ...     print(error)
        smollm3-135m.gguf: no such file
    """

    def __init__(self, message: str):
        # A damaged file can put any character into a message: keep it one short line.
        line = "".join(c if c.isprintable() else "?" for c in message)
        super().__init__(line if len(line) <= 500 else line[:497] + "...")


def require(module: str) -> Any:
    """Import a module of the `models` extra when it is first needed.

    Args:
        module: dotted name.

    Returns:
        The module.

    Raises:
        ModelError: it is not installed; the message says how to install it.

    Example:
        >>> from pagedjax.models.errors import require
        >>> require("gguf.quants").__name__
        'gguf.quants'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModelError(
            f"the Python package {error.name} is needed: pip install 'pagedjax[models]'"
        ) from error
