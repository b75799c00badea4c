"""Reading a config and the weights of a checkpoint, whatever format they are in.

Both formats end as the same pair: a `LlamaConfig`, and a reader of the tensors that
`weight_shapes` lists. Every tensor's presence and shape is checked before the first
one is read.
"""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.models.config import LlamaConfig, llama3_rope_divisors
from pagedjax.models.errors import ModelError
from pagedjax.models.gguf_file import GGUFFile
from pagedjax.models.json_file import read_json
from pagedjax.models.llama import WeightReader, weight_shapes
from pagedjax.models.safetensors_file import SafetensorsFiles

__all__ = ["gguf_checkpoint", "huggingface_checkpoint"]

_GGUF_NAMES = {
    "embed": "token_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "out": "attn_output.weight",
    "ffn_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}
_HUGGINGFACE_NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "out": "self_attn.o_proj.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
_ROPE_FREQS = "rope_freqs.weight"
_MAX_HEAD_DIM = 1 << 16  # far above any model; a damaged size must not be allocated


def gguf_checkpoint(file: GGUFFile) -> tuple[LlamaConfig, WeightReader]:
    """Return the config and the weights of a GGUF file.

    Args:
        file: its parsed head.

    Returns:
        The config, and a reader of float32 tensors by the names of `weight_shapes`.

    Raises:
        ModelError: the architecture is unsupported, a number is missing or impossible,
            or a tensor is missing or has the wrong shape.
    """
    config = _gguf_config(file)
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    extra = {_ROPE_FREQS}
    names = _find_tensors(file.path, config, _GGUF_NAMES, "blk.", shapes, extra)
    # The converter stores q and k of "llama" with each head's rotary pairs side by
    # side; those of "qwen2" as they are.
    paired = file.get("general.architecture", str) == "llama"
    heads = {"q": config.num_heads, "k": config.num_kv_heads}

    def read(name: str) -> np.ndarray:
        values = file.read(names[name])
        num_heads = heads.get(name.rpartition(".")[2]) if paired else None
        return values if num_heads is None else _pairs_to_halves(values, num_heads)

    return config, read


def huggingface_checkpoint(
    folder: Path, files: SafetensorsFiles
) -> tuple[LlamaConfig, WeightReader]:
    """Return the config and the weights of a Hugging Face model folder.

    Args:
        folder: holds `config.json`.
        files: its open safetensors files.

    Returns:
        The config, and a reader of tensors by the names of `weight_shapes`.

    Raises:
        ModelError: as for `gguf_checkpoint`.
    """
    config = huggingface_config(folder / "config.json")
    shapes = dict(files.shapes)
    if config.tied_embeddings:
        # Some checkpoints store the tied head a second time.
        shapes.pop(_HUGGINGFACE_NAMES["head"], None)
    extra = {name for name in shapes if name.endswith("rotary_emb.inv_freq")}
    names = _find_tensors(
        folder, config, _HUGGINGFACE_NAMES, "model.layers.", shapes, extra
    )
    return config, lambda name: files.read(names[name])


def huggingface_config(path: Path) -> LlamaConfig:
    """Read a `config.json` of transformers.

    Args:
        path: of the file.

    Returns:
        The config.

    Raises:
        ModelError: it cannot be read, or describes a model that is not supported.
    """
    spec = read_json(path)
    kind = spec.get("model_type")
    if kind not in ("llama", "mistral", "qwen2"):
        raise ModelError(
            f"{path}: model_type {kind!r} is not supported (llama, mistral, qwen2 are)"
        )
    for key, only in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("use_sliding_window", False),
        ("partial_rotary_factor", 1.0),
        ("rope_interleaved", False),
        ("quantization_config", None),
    ):
        if spec.get(key, only) not in (only, None):
            raise ModelError(f"{path}: {key}={spec[key]!r} is not supported")
    try:
        hidden, heads = spec["hidden_size"], spec["num_attention_heads"]
        head_dim = spec.get("head_dim")
        rope = spec.get("rope_parameters") or {}
        rope = {"rope_theta": spec.get("rope_theta", 10_000.0), **rope}
        scaling = spec.get("rope_scaling") or rope
        theta = rope["rope_theta"]
        head_dim = hidden // heads if head_dim is None else head_dim
        return LlamaConfig(
            num_layers=spec["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=spec.get("num_key_value_heads", heads),
            head_dim=head_dim,
            hidden_size=hidden,
            ffn_size=spec["intermediate_size"],
            vocab_size=spec["vocab_size"],
            max_seq_len=spec.get("max_position_embeddings", 2048),
            rope_theta=theta,
            rope_divisors=_rope_divisors(path, scaling, head_dim, theta),
            rms_eps=spec.get("rms_norm_eps", 1e-6),
            qkv_bias=kind == "qwen2",
            tied_embeddings=spec.get("tie_word_embeddings", False) is True,
            window=spec.get("sliding_window") if kind == "mistral" else None,
        )
    except KeyError as error:
        raise ModelError(f"{path}: {error.args[0]} is missing") from error
    except (ArithmeticError, TypeError, ValueError) as error:
        raise _as_model_error(path, error) from error


def _gguf_config(file: GGUFFile) -> LlamaConfig:
    """Translate the metadata of a GGUF file."""
    arch = file.get("general.architecture", str)
    if arch not in ("llama", "qwen2"):
        raise ModelError(
            f"{file.path}: architecture {arch} is not supported (llama and qwen2 are)"
        )
    if file.get(f"{arch}.expert_count", int, 0):
        raise ModelError(f"{file.path}: mixtures of experts are not supported")
    hidden = file.get(f"{arch}.embedding_length", int)
    heads = file.get(f"{arch}.attention.head_count", int)
    head_dim = file.get(
        f"{arch}.attention.key_length", int, hidden // heads if heads else 0
    )
    for key in ("rope.dimension_count", "attention.value_length"):
        if file.get(f"{arch}.{key}", int, head_dim) != head_dim:
            raise ModelError(
                f"{file.path}: {key} other than the head size {head_dim} is not "
                "supported"
            )
    theta = file.get(f"{arch}.rope.freq_base", float, 10_000.0)
    embed = file.tensors.get(_GGUF_NAMES["embed"])
    scaling = {
        "rope_type": file.get(f"{arch}.rope.scaling.type", str, "none"),
        "factor": file.get(f"{arch}.rope.scaling.factor", float, 1.0),
    }
    window = file.get(f"{arch}.attention.sliding_window", int, 0)
    try:
        divisors = _rope_divisors(file.path, scaling, head_dim, theta)
        if _ROPE_FREQS in file.tensors:
            divisors = tuple(file.read(_ROPE_FREQS).ravel().tolist())
        return LlamaConfig(
            num_layers=file.get(f"{arch}.block_count", int),
            num_heads=heads,
            num_kv_heads=file.get(f"{arch}.attention.head_count_kv", int, heads),
            head_dim=head_dim,
            hidden_size=hidden,
            ffn_size=file.get(f"{arch}.feed_forward_length", int),
            vocab_size=embed.shape[0] if embed else 0,
            max_seq_len=file.get(f"{arch}.context_length", int),
            rope_theta=theta,
            rope_divisors=divisors,
            rms_eps=file.get(f"{arch}.attention.layer_norm_rms_epsilon", float),
            qkv_bias=arch == "qwen2",
            tied_embeddings=_GGUF_NAMES["head"] not in file.tensors,
            window=window or None,
        )
    except (ArithmeticError, TypeError, ValueError) as error:
        raise _as_model_error(file.path, error) from error


def _rope_divisors(
    path: Path, scaling: Mapping[str, Any], head_dim: int, theta: float
) -> tuple[float, ...] | None:
    """Translate a description of rotary scaling; what is unknown is refused.

    Frequencies that are stretched wrongly give fluent text for a while, so guessing
    is worse than an error.
    """
    if not isinstance(scaling, Mapping):
        raise ModelError(f"{path}: rope scaling is not a table: {scaling!r}")
    if not 0 < head_dim <= _MAX_HEAD_DIM:
        raise ModelError(f"{path}: impossible head size {head_dim}")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in ("default", "none", None):
        return None
    if kind == "linear":
        return (float(scaling["factor"]),) * (head_dim // 2)
    if kind == "llama3":
        return llama3_rope_divisors(
            head_dim=head_dim,
            rope_theta=theta,
            factor=float(scaling["factor"]),
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
            original_max_seq_len=scaling["original_max_position_embeddings"],
        )
    raise ModelError(
        f"{path}: rope scaling {kind!r} is not supported (linear and llama3 are)"
    )


def _find_tensors(
    path: Path,
    config: LlamaConfig,
    spelling: Mapping[str, str],
    layer_prefix: str,
    shapes: Mapping[str, tuple[int, ...]],
    extra: set[str],
) -> dict[str, str]:
    """Map the names of `weight_shapes` to the file's, checking every shape.

    Args:
        path: for messages.
        config: the sizes.
        spelling: our name without the layer to the file's.
        layer_prefix: what the file puts before a layer's number.
        shapes: what the file holds.
        extra: tensors of the file that may be left over.

    Returns:
        Our name to the file's name.

    Raises:
        ModelError: tensors are missing, left over, or of another shape.
    """
    names: dict[str, str] = {}
    missing = _missing_tensors(config, spelling, layer_prefix, shapes)
    some = list(itertools.islice(missing, 4))
    if some:
        more = ", ..." if len(some) == 4 else ""
        raise ModelError(f"{path}: missing tensors: {', '.join(some[:3])}{more}")
    for name, shape in weight_shapes(config):
        there = _spell(name, spelling, layer_prefix)
        if shapes[there] != shape:
            raise ModelError(
                f"{path}: tensor {there} has shape {list(shapes[there])}, the config "
                f"asks for {list(shape)}"
            )
        names[name] = there
    left_over = sorted(set(shapes) - set(names.values()) - extra)
    if left_over:
        raise ModelError(
            f"{path}: {len(left_over)} tensors of an unsupported kind: "
            f"{', '.join(left_over[:3])}"
        )
    return names


def _missing_tensors(
    config: LlamaConfig,
    spelling: Mapping[str, str],
    layer_prefix: str,
    shapes: Mapping[str, tuple[int, ...]],
) -> Iterator[str]:
    """Yield the file's names of tensors that it lacks, lazily."""
    for name, _ in weight_shapes(config):
        there = _spell(name, spelling, layer_prefix)
        if there not in shapes:
            yield there


def _spell(name: str, spelling: Mapping[str, str], layer_prefix: str) -> str:
    """Return the file's name of a tensor: "3.q" is blk.3.attn_q.weight."""
    layer, dot, part = name.rpartition(".")
    return f"{layer_prefix}{layer}.{spelling[part]}" if dot else spelling[part]


def _pairs_to_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo the row order of GGUF's q and k.

    a head of 6 rows in the file:  0 3 1 4 2 5    (pairs side by side)
    and as the rotation wants it:  0 1 2 3 4 5    (first halves, then seconds)
    """
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _as_model_error(path: Path, error: Exception) -> ModelError:
    """Put the path in front of what a config's check found."""
    if isinstance(error, ModelError):
        return error
    return ModelError(f"{path}: {error}")
