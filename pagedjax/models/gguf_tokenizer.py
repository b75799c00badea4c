"""Rebuilding a tokenizer from the vocabulary in a GGUF file.

Two kinds are stored in such files. "gpt2" is byte-level BPE: a vocabulary, a list of
merges, and the name of a rule that cuts text into words. "llama" is SentencePiece BPE:
pieces with scores, where two neighbours merge if the whole is a piece, the best score
first; written as a list of merges in the order of the scores, it is plain BPE too.
"""

from typing import Any

import numpy as np

from pagedjax.models.chat import ChatTemplate
from pagedjax.models.errors import ModelError, require
from pagedjax.models.gguf_file import GGUFFile
from pagedjax.models.tokenizer import Tokenizer, token_to_bytes

__all__ = ["tokenizer_from_gguf"]

_SPACE = "\u2581"
_KEY = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

# The published word pattern of Llama 3; Qwen2 differs in taking digits one by one.
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS = {
    "llama-bpe": _LLAMA3_WORDS,
    "llama3": _LLAMA3_WORDS,
    "qwen2": _LLAMA3_WORDS.replace("{1,3}", ""),
}
_GPT2_WORDS = ("gpt-2", "gpt2", "default")


def tokenizer_from_gguf(file: GGUFFile) -> Tokenizer:
    """Build the tokenizer of a GGUF file.

    Args:
        file: its parsed head.

    Returns:
        The tokenizer.

    Raises:
        ModelError: the vocabulary is missing, inconsistent, or of an unsupported kind.

    Example:
        >>> from pagedjax.models.gguf_tokenizer import tokenizer_from_gguf
        >>> from pagedjax.models.gguf_file import open_gguf
        >>> from pagedjax.models.loading import find_model_file
        >>> file = open_gguf(find_model_file("smollm2-135m"))
        >>> tokenizer_from_gguf(file).encode("<|im_start|>user")
        [1, 4093]
    """
    tokens = _strings(file, "tokens")
    kinds = _kinds(file, len(tokens))
    model = file.get(_KEY + "model", str)
    if model == "gpt2":
        backend = _byte_level(file, tokens)
    elif model == "llama":
        backend = _sentencepiece(file, tokens)
    else:
        raise ModelError(
            f"{file.path}: tokenizer {model} is not supported (gpt2 and llama are)"
        )
    tokenizers = require("tokenizers")
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            tokenizers.AddedToken(tokens[i], special=special, normalized=False)
            for i in np.flatnonzero(kinds == kind)
            if tokens[i]
        ]
        backend.add_tokens(added)
    byte_level = model == "gpt2"
    verbatim = np.isin(kinds, (_UNKNOWN, _CONTROL, _USER_DEFINED))
    token_bytes = tuple(
        token.encode() if whole else token_to_bytes(token, byte_level=byte_level)
        for token, whole in zip(tokens, verbatim.tolist(), strict=True)
    )
    bos_id = _token_id(file, "bos_token_id", len(tokens))
    eos_ids = {
        _token_id(file, key, len(tokens))
        for key in ("eos_token_id", "eot_token_id", "eom_token_id")
    }
    named_eos = _token_id(file, "eos_token_id", len(tokens))
    template = file.get("tokenizer.chat_template", str, "")
    return Tokenizer(
        backend,
        token_bytes,
        special_ids=frozenset(np.flatnonzero(kinds == _CONTROL).tolist()),
        eos_ids=frozenset(i for i in eos_ids if i is not None),
        bos_id=bos_id,
        add_bos=file.get(_KEY + "add_bos_token", bool, model == "llama"),
        strip_first_space=not byte_level and _adds_space(file),
        chat_template=ChatTemplate(
            template,
            "" if bos_id is None else tokens[bos_id],
            "" if named_eos is None else tokens[named_eos],
        )
        if template
        else None,
    )


def _byte_level(file: GGUFFile, tokens: list[str]) -> Any:
    """Build byte-level BPE."""
    tokenizers = require("tokenizers")
    words = file.get(_KEY + "pre", str, "default")
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [_split(file, merge, vocab) for merge in _strings(file, "merges")]
    # Llama 3 takes a word that is in the vocabulary whole, whatever the merges say.
    model = tokenizers.models.BPE(
        vocab, merges, ignore_merges=words in ("llama-bpe", "llama3")
    )
    backend = tokenizers.Tokenizer(model)
    steps = tokenizers.pre_tokenizers
    if words in _WORDS:
        cut = steps.Split(tokenizers.Regex(_WORDS[words]), "isolated")
        last = steps.ByteLevel(add_prefix_space=False, use_regex=False)
    elif words == "smollm":
        cut = steps.Digits(individual_digits=True)
        last = steps.ByteLevel(add_prefix_space=False)
    elif words in _GPT2_WORDS:
        cut = None
        last = steps.ByteLevel(add_prefix_space=False)
    else:
        known = ", ".join(["smollm", *_WORDS, *_GPT2_WORDS])
        raise ModelError(
            f"{file.path}: pre-tokenizer {words} is not supported ({known})"
        )
    backend.pre_tokenizer = steps.Sequence([cut, last]) if cut else last
    if words == "qwen2":
        backend.normalizer = tokenizers.normalizers.NFC()
    return backend


def _sentencepiece(file: GGUFFile, tokens: list[str]) -> Any:
    """Build SentencePiece BPE with byte fallback."""
    tokenizers = require("tokenizers")
    scores = file.get(_KEY + "scores", np.ndarray)
    if len(scores) != len(tokens):
        raise ModelError(f"{file.path}: {len(tokens)} tokens but {len(scores)} scores")
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = _token_id(file, "unknown_token_id", len(tokens))
    model = tokenizers.models.BPE(
        vocab,
        _merges_from_scores(tokens, scores, vocab),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    steps = [tokenizers.normalizers.Replace(" ", _SPACE)]
    if _adds_space(file):
        steps.insert(0, tokenizers.normalizers.Prepend(_SPACE))
    backend.normalizer = tokenizers.normalizers.Sequence(steps)
    return backend


def _merges_from_scores(
    tokens: list[str], scores: np.ndarray, vocab: dict[str, int]
) -> list[tuple[str, str]]:
    """List every way to make a piece of two pieces, the best score first.

    Bounded: a piece longer than any word has too many ways to be one of SentencePiece.
    """
    merges: list[tuple[float, int, str, str]] = []
    for token_id, token in enumerate(tokens):
        if len(token) > 512:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                merges.append((-float(scores[token_id]), token_id, left, right))
    merges.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in merges]


def _split(file: GGUFFile, merge: str, vocab: dict[str, int]) -> tuple[str, str]:
    """Split "left right" and check that both and their join are tokens."""
    left, _, right = merge.partition(" ")
    if left not in vocab or right not in vocab or left + right not in vocab:
        raise ModelError(f"{file.path}: merge {merge!r} is not made of tokens")
    return left, right


def _strings(file: GGUFFile, name: str) -> list[str]:
    """Return an array of strings of the tokenizer's metadata."""
    values = file.get(_KEY + name, list)
    if not values:
        raise ModelError(f"{file.path}: metadata key {_KEY}{name} is empty")
    return values


def _kinds(file: GGUFFile, num_tokens: int) -> np.ndarray:
    """Return the kind of each token; a file without kinds has normal ones only."""
    kinds = file.get(_KEY + "token_type", np.ndarray, np.ones(num_tokens, np.int32))
    if len(kinds) != num_tokens:
        raise ModelError(
            f"{file.path}: {num_tokens} tokens but {len(kinds)} token types"
        )
    return kinds


def _token_id(file: GGUFFile, name: str, num_tokens: int) -> int | None:
    """Return a token id of the metadata, or None where it is not given."""
    if _KEY + name not in file.metadata:
        return None
    token_id = file.get(_KEY + name, int)
    if not 0 <= token_id < num_tokens:
        raise ModelError(
            f"{file.path}: {name} is {token_id}, the vocabulary has {num_tokens}"
        )
    return token_id


def _adds_space(file: GGUFFile) -> bool:
    """Return whether a space is put before every text."""
    return file.get(_KEY + "add_space_prefix", bool, True)
