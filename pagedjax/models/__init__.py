"""Models of the Llama family: sizes, parameters, checkpoints, tokenizers."""

from pagedjax.models.chat import ChatTemplate
from pagedjax.models.config import (
    CONFIGS,
    LlamaConfig,
    llama3_rope_divisors,
    rope_frequencies,
)
from pagedjax.models.errors import ModelError
from pagedjax.models.llama import Llama, weight_shapes
from pagedjax.models.loading import LoadedModel, load_model, load_tokenizer
from pagedjax.models.tokenizer import TextStream, Tokenizer

__all__ = [
    "CONFIGS",
    "ChatTemplate",
    "Llama",
    "LlamaConfig",
    "LoadedModel",
    "ModelError",
    "TextStream",
    "Tokenizer",
    "llama3_rope_divisors",
    "load_model",
    "load_tokenizer",
    "rope_frequencies",
    "weight_shapes",
]
