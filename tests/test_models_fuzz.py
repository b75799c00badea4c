"""Damaged files: a good load or one line, never anything else.

Only parsing runs here, without a model's arrays, so that hundreds of files take
seconds. `tracemalloc` sees numpy's memory: a length that is believed shows up there.
"""

import tracemalloc

import numpy as np
import pytest
import tiny_models as tiny

from pagedjax.models import ModelError, weight_shapes
from pagedjax.models.checkpoint import gguf_checkpoint, huggingface_checkpoint
from pagedjax.models.gguf_file import open_gguf
from pagedjax.models.gguf_tokenizer import tokenizer_from_gguf
from pagedjax.models.safetensors_file import open_safetensors
from pagedjax.models.tokenizer import tokenizer_from_folder

MANY = 300
MAX_BYTES = 16 << 20  # the files are 30 kB
PROMPT = "the king and 42 things"


def read_all(checkpoint):
    config, read = checkpoint
    for name, shape in weight_shapes(config):
        assert read(name).shape == shape


def try_gguf(path):
    file = open_gguf(path)
    read_all(gguf_checkpoint(file))
    tokenizer = tokenizer_from_gguf(file)
    tokenizer.decode(tokenizer.encode(PROMPT))


def try_folder(folder):
    read_all(huggingface_checkpoint(folder, open_safetensors(folder)))
    tokenizer = tokenizer_from_folder(folder)
    tokenizer.decode(tokenizer.encode(PROMPT))


def damaged(good, head, seed):
    """Yield copies with flipped bits, overwritten lengths, and cut ends."""
    rng = np.random.default_rng(seed)
    for i in range(MANY):
        data = bytearray(good)
        # Most of the file is weights; the head is where the structure is.
        end = head if i % 4 else len(data)
        kind = i % 3
        if kind == 0:
            data[rng.integers(end)] ^= 1 << rng.integers(8)
        elif kind == 1:
            at = rng.integers(end - 8)
            data[at : at + 8] = rng.choice(
                [b"\xff" * 8, b"\0" * 8, b"\xff" * 7 + b"\x7f", rng.bytes(8)]
            ).ljust(8, b"\0")
        else:
            del data[rng.integers(end) :]
        yield bytes(data)


def count_outcomes(files, path, attempt, argument):
    """Try every file; anything but a load or a one-line ModelError fails the test."""
    loads, errors = 0, 0
    for data in files:
        path.write_bytes(data)
        try:
            attempt(argument)
            loads += 1
        except ModelError as error:
            assert "\n" not in str(error) and 0 < len(str(error)) <= 500
            errors += 1
    return loads, errors


@pytest.fixture
def bounded_memory():
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MAX_BYTES


@pytest.mark.parametrize("seed", [0, 1])
def test_damaged_gguf(tmp_path, bounded_memory, seed):
    path = tmp_path / "tiny.gguf"
    tiny.write_gguf(path, tiny.CONFIG, tiny.make_weights(tiny.CONFIG))
    good = path.read_bytes()
    head = min(tensor.start for tensor in open_gguf(path).tensors.values())
    loads, errors = count_outcomes(damaged(good, head, seed), path, try_gguf, path)
    assert loads > MANY // 20 and errors > MANY // 3


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_damaged_folder(tmp_path, bounded_memory, name):
    folder = tmp_path / "a"
    tiny.write_folder(folder, tiny.CONFIG, tiny.make_weights(tiny.CONFIG))
    path = folder / name
    good = path.read_bytes()
    head = int.from_bytes(good[:8], "little") if name[0] == "m" else len(good)
    files = damaged(good, head, 2)
    loads, errors = count_outcomes(files, path, try_folder, folder)
    assert loads > 0 and errors > MANY // 3


def test_every_cut_of_a_gguf_head_is_reported(tmp_path):
    path = tmp_path / "tiny.gguf"
    tiny.write_gguf(path, tiny.CONFIG, tiny.make_weights(tiny.CONFIG))
    good = path.read_bytes()
    head = min(tensor.start for tensor in open_gguf(path).tensors.values())
    for end in [*range(0, 200), *range(200, head, 97)]:
        path.write_bytes(good[:end])
        with pytest.raises(ModelError, match="damaged GGUF file"):
            open_gguf(path)


@pytest.mark.parametrize("field", ["tensor count", "key count"])
@pytest.mark.parametrize("count", [2**31, 2**63, 2**64 - 1])
def test_impossible_counts_end_at_the_end_of_the_file(
    tmp_path, bounded_memory, field, count
):
    path = tmp_path / "tiny.gguf"
    tiny.write_gguf(path, tiny.CONFIG, tiny.make_weights(tiny.CONFIG))
    data = bytearray(path.read_bytes())
    at = {"tensor count": 8, "key count": 16}[field]
    data[at : at + 8] = count.to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(ModelError, match="damaged GGUF file"):
        open_gguf(path)


def test_overlapping_tensors_cannot_inflate_a_file(tmp_path):
    """Every tensor in the same place: a small file that would unfold to a large one."""
    path = tmp_path / "tiny.gguf"
    config = tiny.small(num_layers=40)
    tiny.write_gguf(path, config, tiny.make_weights(config))
    data = path.read_bytes()
    file = open_gguf(path)
    base = min(tensor.start for tensor in file.tensors.values())
    head = bytearray(data[:base])
    for name, tensor in file.tensors.items():
        at = head.index(name.encode()) + len(name) + 4 + 8 * len(tensor.shape) + 4
        head[at : at + 8] = bytes(8)
    largest = max(tensor.num_bytes for tensor in file.tensors.values())
    path.write_bytes(bytes(head) + data[base : base + largest])
    with pytest.raises(ModelError, match="tensors overlap"):
        open_gguf(path)
