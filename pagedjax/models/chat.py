"""Chat templates: from messages to the text that a model was trained on."""

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pagedjax.models.errors import ModelError, require
from pagedjax.models.json_file import read_text

__all__ = ["ChatTemplate", "chat_template_from_folder"]

# What running a template can raise besides jinja2's own: it is a program. One that
# calls itself without end is a RuntimeError, one too deep to compile a SyntaxError.
_TEMPLATE_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """Hold a jinja2 template from a model file: untrusted, so it runs sandboxed.

    Attributes:
        source: the template.
        bos_token: spelling of the token that starts a text, "" for none.
        eos_token: spelling of the token that ends a turn, "" for none.

    Example:
        >>> from pagedjax.models import ChatTemplate
        >>> template = ChatTemplate("{{ messages[0].content }}!")
        >>> template.render([{"role": "user", "content": "hello"}])
        'hello!'
    """

    source: str
    bos_token: str = ""
    eos_token: str = ""

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the text of a conversation, up to the assistant's next turn.

        Args:
            messages: `{"role": ..., "content": ...}`, oldest first.

        Returns:
            The text, control tokens spelled out.

        Raises:
            ModelError: the template is broken or refuses the messages.
        """
        jinja2 = require("jinja2")
        sandbox = require("jinja2.sandbox")
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols"],
        )
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        try:
            return environment.from_string(self.source).render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                bos_token=self.bos_token,
                eos_token=self.eos_token,
            )
        except jinja2.TemplateError as error:
            raise ModelError(f"chat template: {error}") from error
        except _TEMPLATE_ERRORS as error:
            if isinstance(error, ModelError):
                raise
            raise ModelError(
                f"chat template: {type(error).__name__}: {error}"
            ) from error


def chat_template_from_folder(
    folder: Path, settings: Mapping[str, Any]
) -> ChatTemplate | None:
    """Find the chat template of a Hugging Face model folder.

    Args:
        folder: may hold `chat_template.jinja`.
        settings: the content of `tokenizer_config.json`.

    Returns:
        The template, or None where the model has none.
    """
    path = folder / "chat_template.jinja"
    source = read_text(path) if path.exists() else settings.get("chat_template")
    if isinstance(source, list):
        # Several named templates; the plain conversation is called "default".
        named = {t.get("name"): t.get("template") for t in source if type(t) is dict}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    return ChatTemplate(
        source,
        _spelling(settings.get("bos_token")),
        _spelling(settings.get("eos_token")),
    )


def _spelling(token: Any) -> str:
    """Return the text of a token given as a string or as an added-token object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _refuse(message: object) -> NoReturn:
    """Report what a template has against the messages."""
    raise ModelError(f"chat template: {message}")


def _now(pattern: str) -> str:
    """Return the present date as a template asks for it."""
    return datetime.datetime.now().strftime(pattern)
