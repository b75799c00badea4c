"""Text to ids and back: two sources of one vocabulary, streaming, chat templates."""

import json
import shutil
import time

import numpy as np
import pytest
import tiny_models as tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.models import ChatTemplate, ModelError, Tokenizer
from pagedjax.models.gguf_file import open_gguf
from pagedjax.models.gguf_tokenizer import tokenizer_from_gguf
from pagedjax.models.tokenizer import tokenizer_from_folder

tokenizers = pytest.importorskip("tokenizers")

TEXTS = [
    "",
    "the",
    " the thing and\tthe 2024 ants\n\n",
    "it's  1234  it'll   end ",
    "<|im_start|>user\nhi<|im_end|>",
    "aé漢\U0001fae0 \u200d\u0301",
    "\0\x7f\u00a0\u2028",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer") / "a"
    tiny.write_folder(folder, tiny.CONFIG, tiny.make_weights(tiny.CONFIG))
    return folder


@pytest.fixture(scope="module")
def from_folder(folder):
    return tokenizer_from_folder(folder)


def build_gguf(path, **change):
    change = {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    tiny.write_gguf(path, tiny.CONFIG, tiny.make_weights(tiny.CONFIG), change=change)
    return tokenizer_from_gguf(open_gguf(path))


@pytest.fixture(scope="module")
def from_gguf(tmp_path_factory):
    return build_gguf(tmp_path_factory.mktemp("tokenizer") / "tiny.gguf")


@pytest.mark.parametrize("text", TEXTS)
def test_gguf_and_folder_agree_and_come_back(from_gguf, from_folder, folder, text):
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = library.encode(text).ids
    for tokenizer in (from_gguf, from_folder):
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=False)


def test_what_a_tokenizer_knows(from_gguf, from_folder):
    assert from_gguf.token_bytes == from_folder.token_bytes
    assert from_gguf.special_ids == from_folder.special_ids == {0, 1, 2}
    assert from_gguf.eos_ids == {2}
    assert from_folder.eos_ids == {0, 2}  # generation_config.json names both
    assert from_gguf.bos_id == from_folder.bos_id == 1
    assert from_gguf.vocab_size == len(tiny.TOKENS)


def test_control_tokens_can_be_left_out(from_gguf):
    ids = from_gguf.encode("<|im_start|>the<|im_end|>")
    assert len(ids) == 3
    assert from_gguf.decode(ids, skip_special=True) == "the"


def test_bos_goes_in_front_of_plain_text_only(tmp_path):
    tokenizer = build_gguf(tmp_path / "tiny.gguf", add_bos_token=True)
    the = tiny.TOKENS.index("the")
    assert tokenizer.encode("the") == [1, the]
    assert tokenizer.encode("the", add_special_tokens=False) == [the]
    chat = tokenizer.encode_chat([{"role": "user", "content": "the"}])
    assert chat.count(1) == 2  # the two that the template spells out
    assert chat[0] == 1


@pytest.mark.parametrize(
    ("words", "text", "pieces"),
    [
        ("smollm", "a123 b", "a|1|2|3|Ġ|b"),
        ("gpt-2", "a123 b", "a|123|Ġ|b"),
        ("default", "a123 b", "a|123|Ġ|b"),
        ("llama-bpe", "a12345 b", "a|123|45|Ġ|b"),
        ("qwen2", "a123 b", "a|1|2|3|Ġ|b"),
        ("llama-bpe", "x\n\n  y", "x|Ċ|Ċ|Ġ|Ġ|y"),
    ],
)
def test_word_rules_of_gguf(tmp_path, words, text, pieces):
    digits = ["123", "12", "45", "23"]
    tokens = [*tiny.TOKENS[: -len(digits)], *digits]
    tokenizer = build_gguf(
        tmp_path / "tiny.gguf",
        pre=words,
        tokens=tokens,
        merges=["1 2", "12 3", "4 5", "2 3"],
    )
    got = [tokens[i] for i in tokenizer.encode(text)]
    assert got == pieces.split("|")


def stream(tokenizer, ids, **options):
    decoder = tokenizer.stream(**options)
    return [*(decoder.push(i) for i in ids), decoder.finish()]


def byte_ids(data):
    """Return one id per byte, whatever merges there are."""
    single = {b: tiny.TOKENS.index(c) for c, b in tiny.BYTE_OF.items()}
    return [single[byte] for byte in data]


def test_stream_never_cuts_a_character(from_gguf):
    text = "aé漢\U0001fae0!"
    ids = byte_ids(text.encode())
    pieces = stream(from_gguf, ids)
    assert [piece for piece in pieces if piece] == list(text)
    assert len(pieces) == len(ids) + 1 and pieces[-1] == ""


def test_stream_that_ends_inside_a_character(from_gguf):
    pieces = stream(from_gguf, byte_ids("a\U0001fae0".encode()[:-1]))
    assert "".join(pieces) == "a\ufffd"
    assert pieces[-1] == "\ufffd"


def test_invalid_bytes_take_linear_time(from_gguf):
    def seconds(count):
        ids = byte_ids(b"\x80" * count)
        began = time.process_time()
        pieces = stream(from_gguf, ids)
        assert pieces[:-1] == ["\ufffd"] * count
        return time.process_time() - began

    # Quadratic work would be 64 times as much for 8 times the bytes.
    ratios = [seconds(80_000) / seconds(10_000) for _ in range(5)]
    assert sorted(ratios)[2] < 24


@settings(max_examples=200)
@given(st.lists(st.integers(0, len(tiny.TOKENS) - 1), max_size=30))
def test_pieces_join_to_the_decoded_text(from_gguf, ids):
    pieces = stream(from_gguf, ids)
    data = b"".join(from_gguf.token_bytes[i] for i in ids)
    assert "".join(pieces) == from_gguf.decode(ids)
    assert "".join(pieces) == data.decode(errors="replace")


@settings(max_examples=100)
@given(st.text(max_size=40))
def test_any_text_comes_back(from_gguf, text):
    assert from_gguf.decode(from_gguf.encode(text)) == text


@pytest.mark.parametrize("token_id", [-1, len(tiny.TOKENS), 2**40])
def test_ids_outside_the_vocabulary(from_gguf, token_id):
    with pytest.raises(ValueError, match=f"token id {token_id} is outside"):
        from_gguf.decode([0, token_id])


def test_half_a_surrogate_pair_is_no_text(from_gguf):
    with pytest.raises(ValueError, match="not valid Unicode at character 2"):
        from_gguf.encode("ab\udc80")


# SentencePiece: pieces with scores, bytes as a last resort.
SPM_PIECES = "▁the ▁th he ▁t th in ing ▁in ▁ t h e i n g a b aa aaa aab ▁a ba".split()


def build_spm(path, **change):
    tokens = ["<unk>", "<s>", "</s>"]
    kinds = [2, 3, 3]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    kinds += [6] * 256
    scores = [0.0] * len(tokens) + [-float(i) for i in range(len(SPM_PIECES))]
    tokens += SPM_PIECES
    kinds += [1] * len(SPM_PIECES)
    tokenizer = build_gguf(
        path,
        model="llama",
        pre=None,
        merges=None,
        tokens=tokens,
        token_type=kinds,
        scores=scores,
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
        **{"add_bos_token": True} | change,
    )
    return tokenizer, tokens, dict(zip(tokens, scores, strict=True))


def greedy_pieces(text, scores):
    """SentencePiece BPE as published: merge the best-scored pair, leftmost first."""
    pieces = list(text)
    while True:
        pairs = [
            (-scores[a + b], i)
            for i, (a, b) in enumerate(zip(pieces, pieces[1:], strict=False))
            if a + b in scores
        ]
        if not pairs:
            return pieces
        at = min(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


def test_sentencepiece_vocabulary(tmp_path):
    tokenizer, tokens, scores = build_spm(tmp_path / "tiny.gguf")
    rng = np.random.default_rng(0)
    for _ in range(200):
        text = "".join(rng.choice(list("thing ab"), rng.integers(1, 20)))
        want = greedy_pieces("▁" + text.replace(" ", "▁"), scores)
        ids = tokenizer.encode(text)
        assert ids[0] == 1
        assert [tokens[i] for i in ids[1:]] == want
        assert tokenizer.decode(ids, skip_special=True) == text


def test_sentencepiece_bytes_and_spaces(tmp_path):
    tokenizer, tokens, _ = build_spm(tmp_path / "tiny.gguf", add_bos_token=False)
    ids = tokenizer.encode("the é")
    assert [tokens[i] for i in ids] == ["▁the", "▁", "<0xC3>", "<0xA9>"]
    assert stream(tokenizer, ids) == ["the", " ", "", "é", ""]
    assert stream(tokenizer, ids, continues=True)[0] == " the"
    assert tokenizer.special_ids == {1, 2}
    plain, tokens, _ = build_spm(
        tmp_path / "plain.gguf", add_bos_token=False, add_space_prefix=False
    )
    ids = plain.encode("the")
    assert [tokens[i] for i in ids] == ["t", "he"]  # "he" scores better
    assert plain.decode(plain.encode(" the")) == " the"


def test_chat_of_both_sources(from_gguf, from_folder):
    messages = [{"role": "user", "content": "the\n<|im_end|>"}]
    ids = from_gguf.encode_chat(messages)
    assert ids == from_folder.encode_chat(messages)
    assert from_gguf.decode(ids) == (
        "<|im_start|>user\nthe\n<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )


def test_model_without_a_chat_template(from_gguf):
    bare = Tokenizer(
        from_gguf.backend, from_gguf.token_bytes, frozenset(), frozenset({2})
    )
    with pytest.raises(ModelError, match="has no chat template"):
        bare.encode_chat([{"role": "user", "content": "the"}])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", "chat template: Expected an expression"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content.x.y }}", "chat template: "),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages + 1 }}", "TypeError"),
        ("{{ ().__class__.__base__.__subclasses__() }}", "chat template: "),
        ("{{ messages.append(1) }}", "chat template: "),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for i in '' %}" * 25 + "{% endfor %}" * 25, "SyntaxError"),
        ("{{ 'x' * 10**18 }}", "MemoryError"),
    ],
)
def test_bad_chat_template(source, message):
    with pytest.raises(ModelError) as caught:
        ChatTemplate(source).render([{"role": "user", "content": "hi"}])
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_template_sees_the_usual_names():
    template = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'skip' %}"
        "{% continue %}{% endif %}{{ m.content | trim }}{% endfor %}"
        "{{ eos_token }}{{ strftime_now('%Y') | length }}{{ add_generation_prompt }}",
        bos_token="<s>",
        eos_token="</s>",
    )
    messages = [{"role": "skip", "content": "x"}, {"role": "user", "content": " y "}]
    assert template.render(messages) == "<s>y</s>4True"


@pytest.mark.parametrize("where", ["file", "list"])
def test_template_of_a_folder(folder, tmp_path, where):
    shutil.copytree(folder, tmp_path / "b")
    if where == "file":
        (tmp_path / "b" / "chat_template.jinja").write_text("from a file")
    else:
        named = [
            {"name": "tool_use", "template": "no"},
            {"name": "default", "template": "from a list"},
        ]
        (tmp_path / "b" / "tokenizer_config.json").write_text(
            json.dumps({"chat_template": named})
        )
    tokenizer = tokenizer_from_folder(tmp_path / "b")
    assert tokenizer.chat_template.render([]) == f"from a {where}"
