"""The prompts of the command line: from arguments and files to token ids."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

_KINDS = ("prompt", "messages", "prompt_token_ids")


class CommandError(Exception):
    """Something the user can change; the message is one line.

    Example:
      >>> from pagedjax._cli_prompts import CommandError
      >>> str(CommandError("no such file"))
      'no such file'
    """


@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    """The options of `pagedjax generate`; the names are those of the flags."""

    model: str
    prompts: list[str] | None = None
    prompts_file: str | None = None
    chat: bool = False
    system: str | None = None
    max_tokens: int = 128
    n: int = 1
    num_beams: int | None = None
    draft: str | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    batch_size: int = 32
    dtype: str | None = None
    ignore_eos: bool = False
    json: bool = False

    @property
    def rows_per_prompt(self) -> int:
        """Sequences that run at once for a prompt: its samples, or its beams."""
        return self.num_beams or self.n


def check_options(options: GenerateOptions) -> list[str]:
    """Checks what the flags are together.

    Returns:
      What changes nothing beside the other flags, a line each.

    Raises:
      CommandError: two of them do not go together.

    Example:
      >>> from pagedjax._cli_prompts import GenerateOptions, check_options
      >>> check_options(GenerateOptions("m", num_beams=4, n=2))
      []
      >>> check_options(GenerateOptions("m", top_k=5))
      ['--top-k changes nothing at --temperature 0']
    """
    filters = [
        flag
        for flag, given in (
            ("--top-k", options.top_k != 0),
            ("--top-p", options.top_p != 1),
            ("--seed", options.seed is not None),
        )
        if given
    ]
    if options.num_beams is None:
        if options.temperature > 0:
            return []
        notes = []
        if filters:
            verb = "changes" if len(filters) == 1 else "change"
            flags = " and ".join(filters)
            notes.append(f"{flags} {verb} nothing at --temperature 0")
        if options.n > 1:
            notes.append(
                f"the {options.n} samples of a prompt are the same at --temperature 0"
            )
        return notes
    if options.temperature > 0:
        raise CommandError("--num-beams does not sample: leave --temperature at 0")
    if filters:
        raise CommandError(f"--num-beams does not sample: leave out {filters[0]}")
    if options.n > options.num_beams:
        raise CommandError(
            f"--n {options.n} sequences cannot come from --num-beams"
            f" {options.num_beams}"
        )
    if options.draft is not None:
        raise CommandError("--draft and --num-beams do not go together")
    return []


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt as the user gave it.

    Attributes:
      where: how to name it in a message.
      kind: "prompt", "messages" or "prompt_token_ids".
      content: text, messages, or token ids.
    """

    where: str
    kind: str
    content: Any


def read_prompts(options: GenerateOptions) -> list[Prompt]:
    """Gives the prompts of the arguments or of the file.

    Raises:
      CommandError: there is none, one is empty or malformed, the file cannot be
        read, or flags contradict each other.

    Example:
      >>> from pagedjax._cli_prompts import GenerateOptions, read_prompts
      >>> read_prompts(GenerateOptions("m", prompts=["Hi"], chat=True))[0].content
      [{'role': 'user', 'content': 'Hi'}]
    """
    if options.prompts is not None:
        several = len(options.prompts) > 1
        prompts = [
            Prompt(f"--prompt number {i}" if several else "--prompt", "prompt", text)
            for i, text in enumerate(options.prompts, 1)
        ]
    else:
        assert options.prompts_file is not None
        prompts = _read_file(options.prompts_file)
    for prompt in prompts:
        if not prompt.content:
            raise CommandError(f"{prompt.where} is empty")
    return [_with_chat(prompt, options) for prompt in prompts]


def encode_prompt(prompt: Prompt, tokenizer: Any, vocab_size: int) -> list[int]:
    """Gives the token ids of a prompt; at least one.

    Args:
      prompt: the prompt.
      tokenizer: the `Tokenizer` of the model.
      vocab_size: ids that the model knows.

    Raises:
      CommandError: the text has no tokens or is no Unicode, the model has no chat
        template, or an id is out of range.
    """
    if prompt.kind == "prompt_token_ids":
        ids = prompt.content
        if bad := [i for i in ids if not 0 <= i < vocab_size]:
            raise CommandError(
                f"{prompt.where}: token id {bad[0]} is not in the model's vocabulary"
                f" of {vocab_size}"
            )
        return ids
    try:
        if prompt.kind == "messages":
            ids = tokenizer.encode_chat(prompt.content)
        else:
            ids = tokenizer.encode(prompt.content)
    except ValueError as error:
        raise CommandError(f"{prompt.where}: {error}") from error
    if not ids:
        raise CommandError(f"{prompt.where}: the text has no tokens")
    return ids


def _read_file(name: str) -> list[Prompt]:
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except FileNotFoundError as error:
        raise CommandError(f"{name}: no such file") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        reason = getattr(error, "strerror", None) or error
        raise CommandError(f"{name}: {reason}") from error
    prompts = []
    # Not `splitlines`: a JSON string may hold other line separators as they are.
    for number, line in enumerate(data.split(b"\n"), 1):
        where = f"{name} line {number}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise CommandError(
                f"{where}: not UTF-8 at byte {error.start + 1} of the line"
            ) from error
        if text.strip():
            prompts.append(_parse_line(text, where))
    if not prompts:
        raise CommandError(f"{name} holds no prompts")
    return prompts


def _parse_line(text: str, where: str) -> Prompt:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise CommandError(
            f"{where}: not JSON: {error.msg} at column {error.colno}"
        ) from error
    except (RecursionError, ValueError) as error:  # ValueError: an endless number
        raise CommandError(f"{where}: not JSON: {error}") from error
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict):
        raise CommandError(
            f"{where}: expected an object or a string, got {type(value).__name__}"
        )
    kinds = [kind for kind in _KINDS if kind in value]
    if len(kinds) != 1:
        given = " and ".join(kinds) or "none of them"
        raise CommandError(f"{where}: give one of {', '.join(_KINDS)}; got {given}")
    kind = kinds[0]
    content = value[kind]
    valid = {
        "prompt": lambda: isinstance(content, str),
        "messages": lambda: (
            isinstance(content, list) and all(map(_is_message, content))
        ),
        "prompt_token_ids": lambda: (
            isinstance(content, list) and all(type(i) is int for i in content)
        ),
    }
    wanted = {
        "prompt": "a string",
        "messages": 'a list of {"role": "...", "content": "..."}',
        "prompt_token_ids": "a list of whole numbers",
    }
    if not valid[kind]():
        raise CommandError(f"{where}: {kind} must be {wanted[kind]}")
    return Prompt(where, kind, content)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(key), str) for key in ("role", "content")
    )


def _with_chat(prompt: Prompt, options: GenerateOptions) -> Prompt:
    """Makes messages of a text under --chat, and puts the system message first."""
    messages = prompt.content
    if prompt.kind == "prompt_token_ids" and options.chat:
        raise CommandError(
            f"{prompt.where}: --chat does not go with prompt_token_ids, which are"
            " taken as they are"
        )
    if prompt.kind == "prompt" and options.chat:
        messages = [{"role": "user", "content": prompt.content}]
    elif prompt.kind != "messages":
        if options.system is not None:
            raise CommandError(f"{prompt.where}: --system needs --chat or messages")
        return prompt
    if options.system is not None:
        if any(message["role"] == "system" for message in messages):
            raise CommandError(
                f"{prompt.where}: --system, but the messages have a system message"
            )
        messages = [{"role": "system", "content": options.system}, *messages]
    return Prompt(prompt.where, "messages", messages)
