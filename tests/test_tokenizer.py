"""Token ids against llama.cpp's (golden) and the tokenizers library's; decoding; what is refused."""

from __future__ import annotations

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gguf import GGUFWriter, TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from akv_server import tiktoken_export
from akv_server.errors import AkvError
from akv_server.tokenizer_files import from_directory, from_gguf
from tests.tokenizers_for_tests import TEXT, save, small_tokenizer

KINDS = ["gpt-2", "smollm", "llama-bpe", "qwen2"]
SPECIAL = ["<|endoftext|>", "<|begin|>", "<|end|>"]
PLAIN = [TEXT, "", " ", "<|end|> is text", "a<|begin|><|end|>b", "e\u0301 12 1234\n\n\n", "\x00\x7f", "x" * 300]


def write_gguf(path: Path, library: Tokenizer, pre: str | None, model: str = "gpt2") -> Path:
    """A GGUF file with nothing but a tokenizer in it."""
    spec = json.loads(library.to_str())
    vocab = spec["model"]["vocab"] | {token["content"]: token["id"] for token in spec["added_tokens"]}
    kind_of = {
        token["content"]: TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
        for token in spec["added_tokens"]
    }
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer = GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(model)
    if pre:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([kind_of.get(token, TokenType.NORMAL) for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in spec["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    writer.add_chat_template("{{ messages }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def random_texts(num: int, seed: int = 0) -> list[str]:
    generator = random.Random(seed)
    letters = TEXT + "".join(SPECIAL)
    return ["".join(generator.choices(letters, k=generator.randint(1, 40))) for _ in range(num)]


def test_the_default_tokenizer_gives_the_golden_ids(shared, default_tokenizer):
    golden = json.loads((shared / "golden" / "tokenization.json").read_text())
    for case in golden["plain"]:
        assert default_tokenizer.encode(case["text"]) == case["ids"], case["text"]
        assert default_tokenizer.decode(case["ids"]) == case["text"]
    for case in golden["special"]:
        assert default_tokenizer.encode(case["text"], parse_special=True) == case["ids"]
        assert default_tokenizer.decode(case["ids"], skip_special=False) == case["text"]


def test_the_default_tokenizer_knows_its_ends(default_tokenizer):
    assert default_tokenizer.eos_token_ids == {2}
    assert default_tokenizer.template_names["eos_token"] == "<|im_end|>"
    assert not default_tokenizer.add_bos
    assert default_tokenizer.num_vocab == 49152
    assert "<|im_start|>" in default_tokenizer.chat_template


@pytest.mark.parametrize("kind", KINDS)
def test_gguf_and_directory_equal_the_library(tmp_path, kind):
    library = small_tokenizer(kind, SPECIAL)
    folder = save(library, tmp_path / "model", bos_token="<|begin|>", eos_token={"content": "<|end|>"})
    for ours in (from_directory(folder), from_gguf(write_gguf(tmp_path / "model.gguf", library, kind))):
        assert (ours.bos_token_id, ours.eos_token_id) == (1, 2)
        for text in [*PLAIN, *random_texts(200)]:
            library.encode_special_tokens = False
            assert ours.encode(text, parse_special=True) == library.encode(text, add_special_tokens=False).ids
            library.encode_special_tokens = True
            assert ours.encode(text) == library.encode(text, add_special_tokens=False).ids
            if kind != "qwen2":  # which brings text to its normal form
                assert ours.decode(ours.encode(text)) == text


def test_gguf_lists_every_end_and_the_template(tmp_path):
    ours = from_gguf(write_gguf(tmp_path / "m.gguf", small_tokenizer("smollm", SPECIAL), "smollm"))
    assert ours.eos_token_ids == {0, 2}
    assert ours.chat_template == "{{ messages }}"
    assert ours.is_special(0)
    assert not ours.is_special(3)


def test_the_pre_tokenizer_decides(tmp_path):
    """The same vocabulary under another name cuts digits in another way."""
    library = small_tokenizer("gpt-2", SPECIAL)
    by_name = {pre: from_gguf(write_gguf(tmp_path / f"{pre}.gguf", library, pre)) for pre in ("gpt-2", "smollm")}
    assert len(by_name["gpt-2"].encode("12")) == 1
    assert len(by_name["smollm"].encode("12")) == 2


@pytest.mark.parametrize(
    ("pre", "model", "reason"), [("tekken", "gpt2", "'tekken' is unknown"), ("default", "llama", "byte-level BPE")]
)
def test_what_gguf_names_and_we_do_not_know_is_refused(tmp_path, pre, model, reason):
    path = write_gguf(tmp_path / "m.gguf", small_tokenizer("gpt-2", SPECIAL), pre, model)
    with pytest.raises(AkvError, match=reason) as refused:
        from_gguf(path)
    assert (refused.value.code, refused.value.param) == ("invalid_request", "model")


def test_a_broken_directory_is_refused(tmp_path):
    with pytest.raises(AkvError, match=r"tokenizer\.json cannot be read"):
        from_directory(tmp_path)
    folder = save(Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")), tmp_path / "wordpiece")
    with pytest.raises(AkvError, match="only BPE"):
        from_directory(folder)
    folder = save(small_tokenizer("gpt-2", SPECIAL), tmp_path / "no-end")
    with pytest.raises(AkvError, match="eos"):
        from_directory(folder)


def test_a_directory_names_ends_templates_and_further_tokens(tmp_path):
    library = small_tokenizer("gpt-2", SPECIAL)
    num = library.get_vocab_size()
    folder = save(
        library,
        tmp_path / "model",
        eos_token="<|end|>",
        chat_template=[{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}],
        added_tokens_decoder={str(num): {"content": "<|late|>", "special": True, "normalized": False}},
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    ours = from_directory(folder)
    assert ours.eos_token_ids == {0, 2}
    assert ours.chat_template == "yes"
    assert ours.encode("a<|late|>", parse_special=True)[-1] == num
    (folder / "chat_template.jinja").write_text("from the file")
    assert from_directory(folder).chat_template == "from the file"


def test_added_tokens_that_are_text_are_found_in_any_text(tmp_path):
    library = small_tokenizer("qwen2", SPECIAL, added=["<think>"])
    ours = from_directory(save(library, tmp_path / "m", eos_token="<|end|>"))
    token = library.token_to_id("<think>")
    assert token in ours.encode("a <think> b")
    assert not ours.is_special(token)
    assert ours.decode([token]) == "<think>"


def test_special_tokens_may_swallow_whitespace(tmp_path):
    library = small_tokenizer("gpt-2", ["<|endoftext|>"])
    library.add_special_tokens([AddedToken("<|end|>", rstrip=True, normalized=False)])
    ours = from_directory(save(library, tmp_path / "m", eos_token="<|end|>"))
    for text in ("a <|end|> \n b", "<|end|><|end|>  ", "a  <|endoftext|>  b"):
        assert ours.encode(text, parse_special=True) == library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_sentencepiece_vocabularies(tmp_path, scheme):
    """As Llama 2 and Mistral have them: spaces are letters, other bytes have tokens of their own."""
    library = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=special + [f"<0x{i:02X}>" for i in range(256)], show_progress=False
    )
    library.train_from_iterator(["the quick brown fox [INST] runs on and on"] * 3, trainer)
    spec = json.loads(library.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] in special]
    library = Tokenizer.from_str(json.dumps(spec))
    ours = from_directory(save(library, tmp_path / "m", bos_token="<s>", eos_token="</s>", add_bos_token=True))
    assert ours.add_bos
    for text in ["the fox", "<s>[INST] the </s>", "the<s>fox</s> on é 日", " two  spaces", ""]:
        assert ours.encode(text, parse_special=True) == library.encode(text, add_special_tokens=False).ids
    assert ours.decode(ours.encode("the fox é 日")) == "the fox é 日"
    assert ours.published().tiktoken is None


@pytest.mark.parametrize("text", ["🙂👩‍👩‍👧 日本語", "plain", "é" * 5])
def test_incremental_decoding_never_shows_half_a_character(default_tokenizer, text):
    ids = default_tokenizer.encode(text)
    decoder = default_tokenizer.decode_stream()
    shown = ""
    for token_id in ids:
        shown += decoder.push(token_id)
        assert text.startswith(shown)
    assert shown + decoder.finish() == text


def test_a_character_cut_off_for_good_is_marked(default_tokenizer):
    ids = default_tokenizer.encode("a🙂")[:-1]
    decoder = default_tokenizer.decode_stream()
    assert "".join(map(decoder.push, ids)) == "a"
    assert decoder.finish() == "\ufffd"
    assert default_tokenizer.decode(ids) == "a\ufffd"


def test_token_bytes_add_up_to_the_text(default_tokenizer):
    assert b"".join(map(default_tokenizer.token_bytes, default_tokenizer.encode(TEXT))) == TEXT.encode()
    assert default_tokenizer.token_bytes(2) == b"<|im_end|>"
    assert default_tokenizer.token_bytes(10**9) == b""
    assert default_tokenizer.decode([2, 10**9]) == ""


def test_half_a_surrogate_pair_is_refused(default_tokenizer):
    with pytest.raises(AkvError, match="surrogate") as refused:
        default_tokenizer.encode("a\ud800b")
    assert refused.value.code == "invalid_request"


def test_other_threads_run_while_a_long_text_is_tokenized(default_tokenizer):
    text, num_steps, has_ended = TEXT * 1000, 0, threading.Event()

    def step():
        nonlocal num_steps
        while not has_ended.wait(0.001):
            num_steps += 1

    with ThreadPoolExecutor() as pool:
        pool.submit(step)
        for encode in (default_tokenizer.encode, default_tokenizer.encode_run):
            before = num_steps
            assert encode(text)
            assert num_steps > before + 5
        has_ended.set()


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_has_no_fewer_tokens_than_can_be_said_at_once(tmp_path, kind):
    ours = from_directory(save(small_tokenizer(kind, SPECIAL), tmp_path / "m", eos_token="<|end|>"))
    longest = max(ours.spec["model"]["vocab"], key=len)
    texts = [*PLAIN, *random_texts(200), "\u0399\u0308\u0341\u1fbe\u0308\u0341" * 200, SPECIAL[0] * 50, longest * 50]
    for text in texts:
        assert ours.least_tokens(text) <= len(ours.encode(text, parse_special=True))
    assert ours.least_tokens(TEXT * 100) > 100


def test_nothing_is_said_of_a_text_that_the_tokenizer_may_shorten(tmp_path, default_tokenizer):
    assert default_tokenizer.least_tokens("a" * 8100) == 100  # the longest token is 81 letters
    assert default_tokenizer.least_tokens("\x04" * 8100) == len(default_tokenizer.encode("\x04" * 8100)) == 0
    library = small_tokenizer("gpt-2", SPECIAL)
    library.normalizer = normalizers.Sequence([normalizers.Replace("a", ""), normalizers.NFC()])
    ours = from_directory(save(library, tmp_path / "m", eos_token="<|end|>"))
    assert ours.encode("a" * 10_000) == []
    assert ours.least_tokens("a" * 10_000) == 0


def test_what_tiktoken_cannot_say_is_not_published(tmp_path):
    library = small_tokenizer("gpt-2", SPECIAL)
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    published = from_directory(save(library, tmp_path / "m", eos_token="<|end|>")).published()
    assert published.tiktoken is None
    assert published.special_tokens == {"<|endoftext|>": 0, "<|begin|>": 1, "<|end|>": 2}


def test_a_wrong_expression_is_found_out(tmp_path, monkeypatch):
    """The check at the end: were the expression for digits wrong, nothing would be published."""
    ours = from_directory(save(small_tokenizer("smollm", SPECIAL), tmp_path / "m", eos_token="<|end|>"))
    monkeypatch.setattr(tiktoken_export, "DIGITS_GPT2_PATTERN", tiktoken_export.GPT2_PATTERN)
    assert ours.published().tiktoken is None
