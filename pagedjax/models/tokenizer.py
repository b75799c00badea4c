"""Text to token ids and back, also while tokens arrive one by one.

Encoding is done by the `tokenizers` library, from a `tokenizer.json` or rebuilt from
the vocabulary in a GGUF file (`gguf_tokenizer`). Decoding is done here, from the bytes
of each token: the only way to emit a token's text at once, in linear time, and without
ever cutting a character that spans tokens.
"""

import codecs
import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pagedjax.models.chat import ChatTemplate, chat_template_from_folder
from pagedjax.models.errors import ModelError, require
from pagedjax.models.json_file import read_json, read_text

__all__ = ["TextStream", "Tokenizer", "tokenizer_from_folder"]

_SPACE = "\u2581"  # the visible space of SentencePiece
_MAX_GAPS = 1 << 16  # ids without a token; more of them is a damaged file


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Turn text into token ids and back.

    Attributes:
        token_bytes: the bytes of each id; an unused id has none.
        special_ids: ids of control tokens, such as the end of a turn.
        eos_ids: ids that end a generation.
        bos_id: the id a text starts with, or None.
        add_bos: whether `encode` puts it there.
        strip_first_space: whether a text that starts with a space has lost it
            (SentencePiece vocabularies put a space before every text).
        chat_template: of the model, or None.

    Example:
        >>> from pagedjax.models import load_tokenizer
        >>> tokenizer = load_tokenizer("smollm2-135m")
        >>> tokenizer.encode("The capital of France is")
        [504, 3575, 282, 4649, 314]
        >>> tokenizer.decode([504, 3575])
        'The capital'
    """

    backend: Any = dataclasses.field(repr=False)
    token_bytes: tuple[bytes, ...] = dataclasses.field(repr=False)
    special_ids: frozenset[int] = dataclasses.field(repr=False)
    eos_ids: frozenset[int]
    bos_id: int | None = None
    add_bos: bool = False
    strip_first_space: bool = False
    chat_template: ChatTemplate | None = None

    @property
    def vocab_size(self) -> int:
        """Return the number of ids, added tokens included."""
        return len(self.token_bytes)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Control tokens that are spelled out in the text become their ids.

        Args:
            text: any string.
            add_special_tokens: put what the model wants around a text (`bos`, where
                `add_bos` is set); False for text that a chat template wrote.

        Returns:
            The ids; an empty list for empty text without special tokens.

        Raises:
            ValueError: the text holds half of a surrogate pair, which is no text
                (bytes that were no UTF-8 become one on the command line).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text is not valid Unicode at character {error.start}"
            ) from error
        ids = list(self.backend.encode(text, add_special_tokens=False).ids)
        if add_special_tokens and self.add_bos and self.bos_id is not None:
            ids.insert(0, self.bos_id)
        return ids

    def decode(
        self,
        ids: Iterable[int],
        *,
        skip_special: bool = False,
        continues: bool = False,
    ) -> str:
        """Return the text of token ids.

        Args:
            ids: token ids.
            skip_special: leave control tokens out.
            continues: the ids go on from a text, so a space in front is meant.

        Returns:
            The text. Bytes that are no UTF-8 become U+FFFD.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        stream = self.stream(skip_special=skip_special, continues=continues)
        return "".join([stream.push(i) for i in ids]) + stream.finish()

    def stream(
        self, *, skip_special: bool = False, continues: bool = False
    ) -> "TextStream":
        """Return a decoder for ids that arrive one by one.

        Args:
            skip_special: leave control tokens out.
            continues: the ids go on from a text, so a space in front is meant.

        Returns:
            The stream.
        """
        return TextStream(self, skip_special=skip_special, continues=continues)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the token ids of a conversation, ready for the model's answer.

        Args:
            messages: `{"role": ..., "content": ...}`, oldest first.

        Returns:
            The ids, the opening of the assistant's turn included.

        Raises:
            ModelError: the model has no chat template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise ModelError("this model has no chat template; use a plain prompt")
        text = self.chat_template.render(messages)
        return self.encode(text, add_special_tokens=False)


class TextStream:
    """Decode ids as they come: each piece is final, no character is ever cut.

    Example:
        >>> from pagedjax.models import load_tokenizer
        >>> tokenizer = load_tokenizer("smollm2-135m")
        >>> ids = tokenizer.encode("a \\U0001FAE0")  # the emoji spans tokens
        >>> stream = tokenizer.stream()
        >>> pieces = [stream.push(i) for i in ids] + [stream.finish()]
        >>> "".join(pieces) == "a \\U0001FAE0" and "\\ufffd" not in "".join(pieces)
        True
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = False,
        continues: bool = False,
    ):
        """Start an empty text; the arguments are those of `Tokenizer.stream`."""
        self._token_bytes = tokenizer.token_bytes
        self._hidden = tokenizer.special_ids if skip_special else frozenset()
        self._strip = tokenizer.strip_first_space and not continues
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the text that this token completes, possibly none.

        Args:
            token_id: the next id.

        Returns:
            The characters that are complete now.

        Raises:
            ValueError: the id is outside the vocabulary.
        """
        if not 0 <= token_id < len(self._token_bytes):
            raise ValueError(
                f"token id {token_id} is outside the vocabulary of "
                f"{len(self._token_bytes)}"
            )
        if token_id in self._hidden:
            return ""
        piece = self._token_bytes[token_id]
        if self._strip and piece:
            piece = piece.removeprefix(b" ")
            self._strip = False
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """Return what an unfinished last character leaves: U+FFFD or nothing."""
        return self._decoder.decode(b"", final=True)


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """Read the tokenizer of a Hugging Face model folder.

    Args:
        folder: holds `tokenizer.json`; `tokenizer_config.json`, `config.json`,
            `generation_config.json` and `chat_template.jinja` are used where present.

    Returns:
        The tokenizer.

    Raises:
        ModelError: a file is missing, damaged or of an unsupported kind.
    """
    path = folder / "tokenizer.json"
    byte_level, strip_first_space = _decoder_kind(path, read_json(path))
    with _library_errors(path):
        backend = require("tokenizers").Tokenizer.from_str(read_text(path))
        # Padding and truncation stored in the file would change what is encoded.
        backend.no_padding()
        backend.no_truncation()
        vocab = backend.get_vocab(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        around = [backend.encode("a", add_special_tokens=b).ids for b in (True, False)]
    prefix = around[0][: len(around[0]) - len(around[1])]
    if prefix + around[1] != around[0] or len(prefix) > 1:
        raise ModelError(f"{path}: only one token before a text is supported")
    vocab_size = max(vocab.values(), default=-1) + 1
    if not 0 < vocab_size <= 2 * len(vocab) + _MAX_GAPS:
        raise ModelError(f"{path}: {len(vocab)} tokens, ids up to {vocab_size - 1}")
    token_bytes = [b""] * vocab_size
    for token, token_id in vocab.items():
        if token_id in added:
            token_bytes[token_id] = token.encode()
        else:
            token_bytes[token_id] = token_to_bytes(token, byte_level=byte_level)
    settings = _optional_json(folder / "tokenizer_config.json")
    return Tokenizer(
        backend,
        tuple(token_bytes),
        special_ids=frozenset(i for i, token in added.items() if token.special),
        eos_ids=_eos_ids(folder, backend, settings, vocab_size),
        bos_id=prefix[0] if prefix else _named_id(backend, settings.get("bos_token")),
        add_bos=bool(prefix),
        strip_first_space=strip_first_space,
        chat_template=chat_template_from_folder(folder, settings),
    )


def token_to_bytes(token: str, *, byte_level: bool) -> bytes:
    """Return the bytes that a vocabulary entry stands for.

    Args:
        token: its spelling in the vocabulary.
        byte_level: whether bytes are spelled as in GPT-2; else as in SentencePiece,
            a space as U+2581 and a lone byte as <0x0A>.

    Returns:
        The bytes.

    Example:
        >>> from pagedjax.models.tokenizer import token_to_bytes
        >>> token_to_bytes("\\u0120the", byte_level=True)
        b' the'
        >>> token_to_bytes("<0x0A>", byte_level=False)
        b'\\n'
    """
    if byte_level:
        if all(character in BYTE_OF for character in token):
            return bytes(BYTE_OF[character] for character in token)
        return token.encode()
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return token.encode()
    return token.replace(_SPACE, " ").encode()


def _byte_spelling() -> dict[str, int]:
    """Return the byte of each character of the GPT-2 byte alphabet.

    Printable Latin-1 stands for itself, the other bytes for U+0100 onwards.

    Source: https://github.com/openai/gpt-2/blob/master/src/encoder.py
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in printable]
    spelling = {chr(byte): byte for byte in printable}
    spelling |= {chr(256 + i): byte for i, byte in enumerate(hidden)}
    return spelling


BYTE_OF = _byte_spelling()


@contextlib.contextmanager
def _library_errors(path: Path) -> Iterator[None]:
    """Turn the library's errors about a file into ours."""
    try:
        yield
    except Exception as error:
        # The library raises Exception itself; anything finer is not about the file.
        if type(error) is not Exception:
            raise
        raise ModelError(f"{path}: damaged tokenizer: {error}") from error


def _decoder_kind(path: Path, spec: dict[str, Any]) -> tuple[bool, bool]:
    """Return (byte level, strip the first space) of a `tokenizer.json`."""
    decoder = spec.get("decoder")
    steps = [decoder]
    if isinstance(decoder, dict) and decoder.get("type") == "Sequence":
        steps = decoder.get("decoders") or []
    kinds = [step.get("type") for step in steps if isinstance(step, dict)]
    if "ByteLevel" in kinds:
        return True, False
    if "Metaspace" in kinds:
        return False, True
    if "ByteFallback" in kinds:
        return False, "Strip" in kinds
    raise ModelError(
        f"{path}: decoder {kinds} is not supported (ByteLevel, ByteFallback, Metaspace)"
    )


def _eos_ids(
    folder: Path, backend: Any, settings: dict[str, Any], vocab_size: int
) -> frozenset[int]:
    """Collect the ids that end a generation from all files that name one."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _optional_json(folder / name).get("eos_token_id")
        values = value if isinstance(value, list) else [value]
        for token_id in values:
            if token_id is None:
                continue
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                raise ModelError(f"{folder / name}: bad eos_token_id {value!r}")
            ids.add(token_id)
    named = _named_id(backend, settings.get("eos_token"))
    return frozenset(ids | ({named} if named is not None else set()))


def _named_id(backend: Any, token: Any) -> int | None:
    """Return the id of a token given as a string or as an added-token object."""
    if isinstance(token, dict):
        token = token.get("content")
    return backend.token_to_id(token) if isinstance(token, str) else None


def _optional_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, or nothing where there is no file."""
    return read_json(path) if path.exists() else {}
