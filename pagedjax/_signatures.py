"""Functions that take the same arguments: the list is written once."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def takes_arguments_of(
    other: Callable[P, Any],
) -> Callable[[Callable[[dict[str, Any]], R]], Callable[P, R]]:
    """Gives a function the parameters of another; it receives them by name."""
    signature = inspect.signature(other)

    def decorate(function: Callable[[dict[str, Any]], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return function(bound.arguments)

        result = inspect.signature(function).return_annotation
        shown = signature.replace(return_annotation=result)
        call.__signature__ = shown  # type: ignore[attr-defined]
        return call

    return decorate
