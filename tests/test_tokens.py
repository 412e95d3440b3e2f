"""The client's token ids against the server's."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest

from akv_sdk.tokens import Tokens, build_encoding
from akv_sdk.types import TokenizerReply
from akv_server.tokenizer_files import from_directory
from tests.tokenizers_for_tests import TEXT, save, small_tokenizer

SPECIAL = ["<|endoftext|>", "<|end|>"]


@pytest.fixture(scope="module")
def tokens(default_tokenizer) -> Tokens:
    """Built from what goes over the wire, and nothing else."""
    return Tokens(TokenizerReply.model_validate_json(default_tokenizer.published().model_dump_json()))


def random_texts(num: int) -> list[str]:
    generator = random.Random(1)
    letters = TEXT + "<|end|><think>\x04\x06e\u0301"
    return ["".join(generator.choices(letters, k=generator.randint(1, 40))) for _ in range(num)]


def test_golden_strings(shared, tokens):
    golden = json.loads((shared / "golden" / "tokenization.json").read_text())["plain"]
    assert [tokens.encode(case["text"]) for case in golden] == [case["ids"] for case in golden]


def test_every_message_of_the_trajectories(shared, tokens, default_tokenizer):
    num_messages = 0
    for path in (shared / "trajectories").glob("*.json"):
        for message in json.loads(path.read_text())["messages"]:
            text = message["content"] or ""
            assert tokens.encode(text) == default_tokenizer.encode(text)
            num_messages += 1
    assert num_messages > 1000


def test_random_texts(tokens, default_tokenizer):
    assert tokens.is_local
    for text in random_texts(2000):
        assert tokens.encode(text) == default_tokenizer.encode(text), text
    assert tokens.count(TEXT) == len(default_tokenizer.encode(TEXT))


@pytest.mark.parametrize("kind", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_every_kind_of_vocabulary(tmp_path, kind, shuffled):
    """Also where ids do not follow the order of merges, so that a rank is not an id."""
    library = small_tokenizer(kind, SPECIAL, added=["<think>"])
    folder = save(library, tmp_path / "m", eos_token="<|end|>")
    if shuffled:
        spec = json.loads((folder / "tokenizer.json").read_text())
        vocab = spec["model"]["vocab"]
        plain = [token for token in vocab if token not in SPECIAL]
        ids = [vocab[token] for token in plain]
        random.Random(0).shuffle(ids)
        vocab.update(zip(plain, ids, strict=True))
        (folder / "tokenizer.json").write_text(json.dumps(spec))
    ours = from_directory(folder)
    published = TokenizerReply.model_validate_json(ours.published().model_dump_json())
    assert (published.tiktoken.rank_to_id is not None) == shuffled
    tokens = Tokens(published)
    for text in [TEXT, "", *random_texts(500)]:
        assert tokens.encode(text) == ours.encode(text), text


def test_merges_that_tiktoken_would_do_otherwise_are_left_out(tmp_path):
    """ "abc" can be merged only from "a" and "bc", which never meet: BPE makes "ab" first."""
    library = small_tokenizer("gpt-2", SPECIAL)
    folder = save(library, tmp_path / "m", eos_token="<|end|>")
    spec = json.loads((folder / "tokenizer.json").read_text())
    vocab = spec["model"]["vocab"]
    merges = [["q", "x"], ["x", "z"], ["q", "xz"], ["Q", "X"], ["X", "Z"], ["QX", "Z"]]
    for a, b in merges:
        vocab.setdefault(a + b, len(vocab))
    spec["model"]["merges"] += merges
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    ours = from_directory(folder)
    assert len(ours.encode("qxz")) == 2
    tokens = Tokens(ours.published())
    generator = random.Random(0)
    for _ in range(500):
        text = "".join(generator.choices("qxzQXZ ", k=8))
        assert tokens.encode(text) == ours.encode(text)


def test_where_tiktoken_cannot_the_server_is_asked():
    reply = TokenizerReply(name="odd", num_vocab=3, eos_token_id=2, special_tokens={}, tiktoken=None)
    asked: list[str] = []

    def ask(text: str) -> list[int]:
        asked.append(text)
        return [0, 1]

    tokens = Tokens(reply, ask)
    assert not tokens.is_local
    assert tokens.count("some text") == 2
    assert asked == ["some text"]
    with pytest.raises(ValueError, match="odd"):
        Tokens(reply)
    with pytest.raises(ValueError, match="odd"):
        build_encoding(reply)


def test_a_byte_without_a_token_is_the_servers_to_judge(tokens, default_tokenizer):
    """U+40000 begins with byte F1, for which SmolLM2 has no token, and goes on with bytes that have one."""
    with pytest.raises(ValueError, match="only the server"):
        tokens.encode("a\U00040000b")
    asking = Tokens(default_tokenizer.published(), default_tokenizer.encode)
    assert asking.encode("a\U00040000b") == default_tokenizer.encode("a\U00040000b")


def test_importing_it_pulls_in_neither_torch_nor_a_server():
    code = (
        "import sys, akv_sdk.tokens; "
        "print([name for name in ('torch', 'fastapi', 'tokenizers', 'akv_server') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
