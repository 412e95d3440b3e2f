"""Reading a tokenizer from a GGUF file or a model directory.

Owns what those files call things, and refusing a kind of vocabulary that is not supported. What the tokenizer then does
is `tokenizer.py`'s.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from akv_server.files import ModelFiles, gguf_reader
from akv_server.tokenizer import Tokenizer, refused
from akv_server.tokenizer_spec import LLAMA3, PRE_TOKENIZERS, Spec, added_token, byte_level_spec, steps_of


def load(found: ModelFiles) -> Tokenizer:
    """The tokenizer of a model on disk. Raises AkvError("invalid_request", param="model") with the reason."""
    return from_gguf(found.path, found.name) if found.kind == "gguf" else from_directory(found.path, found.name)


def from_gguf(path: Path, name: str | None = None) -> Tokenizer:
    """The tokenizer inside a GGUF file, with the pre-tokenizer that the file names (`tokenizer.ggml.pre`).

    Raises AkvError("invalid_request", param="model") for a vocabulary that is no BPE, or an unknown pre-tokenizer.
    """
    name = name or path.stem
    fields = gguf_reader(path).fields

    def value(key: str) -> Any:
        return fields[key].contents() if key in fields else None

    def strings(key: str) -> list[str]:  # far faster than contents() on a long list
        if key not in fields:
            raise refused(name, f"the file has no {key}")
        return [bytes(fields[key].parts[i]).decode() for i in fields[key].data]

    if (kind := value("tokenizer.ggml.model")) != "gpt2":
        raise refused(name, f"its vocabulary is of kind {kind!r}; only byte-level BPE (gpt2) is read from GGUF")
    pre = value("tokenizer.ggml.pre") or "default"
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise refused(name, f"pre-tokenizer {pre!r} is unknown; known are {known}")
    rules = PRE_TOKENIZERS[pre]
    tokens = strings("tokenizer.ggml.tokens")
    kinds = [int(fields["tokenizer.ggml.token_type"].parts[i][0]) for i in fields["tokenizer.ggml.token_type"].data]
    special_kinds = (_GGUF_CONTROL, _GGUF_UNKNOWN)
    spec = byte_level_spec(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[merge.split(" ", 1) for merge in strings("tokenizer.ggml.merges")],
        added=[
            added_token(tokens[i], i, special=kind in special_kinds)
            for i, kind in enumerate(kinds)
            if kind in (*special_kinds, _GGUF_USER_DEFINED)
        ],
        **rules,
    )
    eos = value("tokenizer.ggml.eos_token_id")
    if eos is None:
        raise refused(name, "the file has no tokenizer.ggml.eos_token_id")
    ends = [value(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    bos = value("tokenizer.ggml.bos_token_id")
    ids = {
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": value("tokenizer.ggml.unknown_token_id"),
        "pad_token": value("tokenizer.ggml.padding_token_id"),
    }
    add_bos = value("tokenizer.ggml.add_bos_token")
    return Tokenizer(
        name=name,
        spec=spec,
        eos_token_id=eos,
        eos_token_ids=frozenset(end for end in ends if end is not None),
        bos_token_id=bos,
        add_bos=bos is not None and (bool(add_bos) if add_bos is not None else rules is LLAMA3),
        chat_template=value("tokenizer.chat_template"),
        template_names={key: tokens[i] for key, i in ids.items() if i is not None},
    )


def from_directory(path: Path, name: str | None = None) -> Tokenizer:
    """The tokenizer of a model directory: `tokenizer.json`, with the chat template and named tokens of
    `tokenizer_config.json` and `chat_template.jinja`, and further ends from `generation_config.json`.

    Raises AkvError("invalid_request", param="model") where a file is missing or broken.
    """
    name = name or path.resolve().name
    spec = _read(path / "tokenizer.json", name)
    config = _read(path / "tokenizer_config.json", name, optional=True)
    model = spec.get("model", {})
    if model.get("type") != "BPE":
        raise refused(name, f"tokenizer.json holds a {model.get('type')} model; only BPE is supported")
    model["merges"] = [m.split(" ", 1) if isinstance(m, str) else list(m) for m in model["merges"]]
    known = {token["content"] for token in spec.setdefault("added_tokens", [])}
    for token_id, token in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
        if token["content"] not in known:
            spec["added_tokens"].append({**added_token(token["content"], int(token_id), special=True), **token})
    vocab = model["vocab"] | {token["content"]: token["id"] for token in spec["added_tokens"]}
    named: dict[str, str] = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = config.get(key)
        if text := token.get("content") if isinstance(token, dict) else token:
            named[key] = text
    ends = [
        end
        for file in ("generation_config.json", "config.json")
        for end in _as_list(_read(path / file, name, optional=True).get("eos_token_id"))
    ]
    if (eos := vocab.get(named.get("eos_token", ""), next(iter(ends), None))) is None:
        raise refused(name, "neither tokenizer_config.json nor config.json names an eos token")
    bos = vocab.get(named.get("bos_token", ""))
    template_file = path / "chat_template.jinja"
    template = template_file.read_text("utf-8") if template_file.is_file() else config.get("chat_template")
    if isinstance(template, list):  # several by name; "default" is the one for plain chat
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    add_bos = config.get("add_bos_token")
    if add_bos is None:
        add_bos = _puts_first(spec.get("post_processor"), named.get("bos_token", ""))
    return Tokenizer(
        name=name,
        spec=spec,
        eos_token_id=eos,
        eos_token_ids=frozenset([eos, *ends]),
        bos_token_id=bos,
        add_bos=bos is not None and bool(add_bos),
        chat_template=template,
        template_names=named,
    )


def _puts_first(post_processor: Spec | None, bos: str) -> bool:
    return any(
        step["type"] == "TemplateProcessing"
        and step["single"]
        and step["single"][0].get("SpecialToken", {}).get("id") == bos
        for step in steps_of(post_processor)
    )


def _as_list(value: Any) -> list[int]:
    return [] if value is None else [int(v) for v in value] if isinstance(value, list) else [int(value)]


def _read(path: Path, name: str, *, optional: bool = False) -> Spec:
    if optional and not path.is_file():
        return {}
    try:
        content: Spec = json.loads(path.read_text("utf-8"))
        return content
    except (OSError, ValueError) as error:
        raise refused(name, f"{path.name} cannot be read ({error})") from None


_GGUF_UNKNOWN, _GGUF_CONTROL, _GGUF_USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type
