"""Tiny models on disk, written by the formats' own writers.

Where the `models` extra is not installed, the tests that import this are skipped.
"""

import dataclasses
import json

import numpy as np
import pytest

from pagedjax.models import LlamaConfig, weight_shapes
from pagedjax.models.tokenizer import BYTE_OF

gguf = pytest.importorskip("gguf")
save_file = pytest.importorskip("safetensors.numpy").save_file
pytest.importorskip("tokenizers")

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = ["th", "the", "Ġthe", "an", "and", "Ġan", "Ġand", "in", "ing"]
TOKENS = [*CONTROL, *sorted(BYTE_OF), "Ġt", "Ġa", *WORDS]
MERGES = [
    *("t h", "th e", "Ġ t", "a n", "an d", "Ġ a", "Ġa n", "Ġan d"),
    *("i n", "in g", "Ġ the", "Ġ an", "Ġ and"),
]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + "
    "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONFIG = LlamaConfig(
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    hidden_size=8,
    ffn_size=12,
    vocab_size=len(TOKENS),
    max_seq_len=64,
    tied_embeddings=True,
)
_GGUF = {
    "embed": "token_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
    "attn_norm": "blk.{}.attn_norm.weight",
    "q": "blk.{}.attn_q.weight",
    "k": "blk.{}.attn_k.weight",
    "v": "blk.{}.attn_v.weight",
    "q_bias": "blk.{}.attn_q.bias",
    "k_bias": "blk.{}.attn_k.bias",
    "v_bias": "blk.{}.attn_v.bias",
    "out": "blk.{}.attn_output.weight",
    "ffn_norm": "blk.{}.ffn_norm.weight",
    "gate": "blk.{}.ffn_gate.weight",
    "up": "blk.{}.ffn_up.weight",
    "down": "blk.{}.ffn_down.weight",
}
_LAYER = "model.layers.{}."
_HUGGINGFACE = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attn_norm": _LAYER + "input_layernorm.weight",
    "q": _LAYER + "self_attn.q_proj.weight",
    "k": _LAYER + "self_attn.k_proj.weight",
    "v": _LAYER + "self_attn.v_proj.weight",
    "q_bias": _LAYER + "self_attn.q_proj.bias",
    "k_bias": _LAYER + "self_attn.k_proj.bias",
    "v_bias": _LAYER + "self_attn.v_proj.bias",
    "out": _LAYER + "self_attn.o_proj.weight",
    "ffn_norm": _LAYER + "post_attention_layernorm.weight",
    "gate": _LAYER + "mlp.gate_proj.weight",
    "up": _LAYER + "mlp.up_proj.weight",
    "down": _LAYER + "mlp.down_proj.weight",
}


def make_weights(config, seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(shape, np.float32)
        for name, shape in weight_shapes(config)
    }


def write_gguf(
    path, config, weights, *, arch="llama", quantise=None, change=None, extra=None
):
    """Write a GGUF file.

    `quantise` is a ggml type for the matrices; `change` maps metadata keys to new
    values (None leaves the key out); `extra` holds more tensors.
    """
    writer = gguf.GGUFWriter(path, arch)
    types = [3] * len(CONTROL) + [1] * (len(TOKENS) - len(CONTROL))
    metadata = {
        f"{arch}.block_count": config.num_layers,
        f"{arch}.context_length": config.max_seq_len,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.ffn_size,
        f"{arch}.attention.head_count": config.num_heads,
        f"{arch}.attention.head_count_kv": config.num_kv_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.rope.freq_base": config.rope_theta,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_eps,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    } | (change or {})
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, values in weights.items():
        layer, _, part = name.rpartition(".")
        if part in ("q", "k") and arch == "llama":
            values = _halves_to_pairs(values, config.head_dim)
        target = _GGUF[part].format(layer)
        if quantise is not None and values.ndim == 2:
            packed = gguf.quants.quantize(values, quantise)
            writer.add_tensor(target, packed, raw_dtype=quantise)
        else:
            writer.add_tensor(target, values)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_folder(
    folder, config, weights, *, model_type="llama", change=None, shards=1, dtype=None
):
    """Write a Hugging Face folder; `change` maps config.json keys to new values."""
    folder.mkdir(exist_ok=True)
    spec = {
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "sliding_window": config.window,
        "eos_token_id": 2,
    } | (change or {})
    (folder / "config.json").write_text(json.dumps(spec))
    tensors = {}
    for name, values in weights.items():
        layer, _, part = name.rpartition(".")
        tensors[_HUGGINGFACE[part].format(layer)] = values.astype(dtype or np.float32)
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
    else:
        files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
        for i, file in enumerate(files):
            save_file({n: tensors[n] for n in names[i::shards]}, folder / file)
        weight_map = {n: files[i % shards] for i, n in enumerate(names)}
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": weight_map})
        )
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_spec()))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "bos_token": "<|im_start|>",
                "eos_token": {"content": "<|im_end|>"},
                "chat_template": TEMPLATE,
            }
        )
    )
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')


def tokenizer_spec():
    """Return the tokenizer.json that says what the GGUF metadata says."""
    added = [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, token in enumerate(CONTROL)
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    digits = {"type": "Digits", "individual_digits": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(TOKENS)},
            "merges": [merge.split(" ") for merge in MERGES],
        },
    }


def small(**change):
    """Return the tiny config with other values."""
    return dataclasses.replace(CONFIG, **change)


def _halves_to_pairs(rows, head_dim):
    """Order q and k rows as GGUF does: row i and row i + D/2 of a head neighbours."""
    order = [
        head * head_dim + i + half * (head_dim // 2)
        for head in range(len(rows) // head_dim)
        for i in range(head_dim // 2)
        for half in (0, 1)
    ]
    return np.ascontiguousarray(rows[order])
