"""Tool calls: learning how a template writes them, holding them to their schemas, and sending them back and forth."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import jsonschema
import openai
import pytest
from openai import OpenAI

import akv_sdk
from akv_server import loader
from akv_server.call_formats import parser_of
from akv_server.chat import Chat
from akv_server.errors import AkvError
from akv_server.generation import TextOut
from akv_server.grammar import Grammars, Shape
from akv_server.tokenizer import Tokenizer
from akv_server.tokenizer_files import from_directory
from akv_server.tools import CallFormat, Function, Style, ToolUse, tool_use
from tests.calling import FUNCTIONS, JSON, SCHEMAS, STYLES, TEMPLATES, TOOLS, WEATHER, tag, written
from tests.chats import QWEN_LIKE
from tests.models import tiny_model
from tests.server import Server, serving_model
from tests.tokenizers_for_tests import save, small_tokenizer

# --- formats and grammars -------------------------------------------------------------------------------------------


def chat_of(folder: Path, template: str, special: list[str] | None = None, added: list[str] | None = None) -> Chat:
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(special or [])]
    built = small_tokenizer("qwen2", tokens, added)
    return Chat(from_directory(save(built, folder, eos_token="<|im_end|>", chat_template=template)))


def test_the_template_says_how_the_model_calls(tmp_path: Path, default_tokenizer: Tokenizer) -> None:
    for style, template in TEMPLATES.items():
        chat = chat_of(tmp_path / style, template)
        assert chat.call_format == CallFormat(style, "parameters" if style == "json" else "arguments")
        assert chat.takes_many_calls == (style != "json")
    for i, (call, style) in enumerate(
        [
            ('[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}, "id": "call00001"}]', "mistral_list"),
            ('[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}]', "mistral_list"),
            ('[TOOL_CALLS]f[CALL_ID]call00001[ARGS]{"x": 1}', "mistral_args"),
            ('[TOOL_CALLS]f{"x": 1}', "mistral_args"),
            ('[f(x="1")]', "pythonic"),
            ('<|python_start|><|python_end|>{"name": "f", "parameters": {"x": 1}}', "json"),
        ]
    ):
        template = TEMPLATES["hermes"].replace(
            "<|im_end|>", f"{{% if message.tool_calls %}}{call}{{% endif %}}<|im_end|>"
        )
        assert chat_of(tmp_path / str(i), template).call_format.style == style
    assert chat_of(tmp_path / "qwen", QWEN_LIKE).call_format == CallFormat("hermes")
    assert Chat(default_tokenizer).call_format == CallFormat("hermes")


@cache
def grammars_of(chat: Chat) -> Grammars:
    return Grammars(chat.tokenizer, chat.tokenizer.num_vocab + 7, chat.end_ids)


def admitted(chat: Chat, shape: Shape, text: str) -> bool | str:
    """Whether a grammar admits a text and its end; else what is left of the text where it did not."""
    tokenizer = chat.tokenizer
    make = grammars_of(chat).constraint(shape)
    assert make is not None
    constraint = make()
    ids = tokenizer.encode(text, parse_special=True)
    for i, token_id in enumerate(ids):
        mask = constraint.mask()
        assert mask.shape == (tokenizer.num_vocab + 7,) and not mask[tokenizer.num_vocab :].any()
        if not mask[token_id]:
            return tokenizer.decode(ids[i:], skip_special=False)
        if constraint.take(token_id):
            return i == len(ids) - 1
    return bool(constraint.mask()[tokenizer.eos_token_id])


@pytest.mark.parametrize("style", STYLES)
def test_a_grammar_admits_valid_calls_alone(tmp_path: Path, style: Style) -> None:
    chat = chat_of(tmp_path, TEMPLATES[style])
    required = Shape(tool_use(TOOLS, "required", None), chat.call_format)
    good = [
        {"city": "Paris", "exact": True},
        {"city": "Paris", "days": 7, "exact": False},
        {"city": "Paris", "days": 1, "units": ["C", "F"], "exact": True, "near": {"km": 3}},
        {"city": "Paris", "exact": True, "near": None},
    ]
    bad = [
        {"exact": True},
        {"city": "Rome", "exact": True},
        {"city": "Paris", "days": 8, "exact": True},
        {"city": "Paris", "exact": True, "more": 1},
    ]
    for arguments in good:
        jsonschema.validate(arguments, WEATHER)
        assert admitted(chat, required, written(style, "get_weather", arguments)) is True
    for arguments in bad:
        assert admitted(chat, required, written(style, "get_weather", arguments)) is not True
    assert admitted(chat, required, written(style, "unknown", {})) is not True
    assert admitted(chat, required, "Hello.") == "Hello."
    named = Shape(tool_use(TOOLS, {"type": "function", "function": {"name": "now"}}, None), chat.call_format)
    assert admitted(chat, named, written(style, "now", {})) is True
    assert admitted(chat, named, written(style, "bash", {"command": "ls"})) is not True


@pytest.mark.parametrize("style", STYLES)
def test_a_strict_function_is_held_to_its_schema_where_the_model_chooses_to_call_it(
    tmp_path: Path, style: Style
) -> None:
    chat = chat_of(tmp_path, TEMPLATES[style])
    strict = [{"type": "function", "function": {**TOOLS[1]["function"], "strict": True}}, TOOLS[0]]
    shape = Shape(tool_use(strict, "auto", None), chat.call_format)
    for text in ["Hello {there} [you].", " \n A list: [1, 2]", ""]:
        assert admitted(chat, shape, text) is True
    assert admitted(chat, shape, written(style, "bash", {"command": "ls"})) is True
    assert admitted(chat, shape, written(style, "get_weather", {"city": 3} if style != "pythonic" else {})) is True
    wrong = {"command": "13 letters are"} if style == "xml" else {"command": 3}
    assert admitted(chat, shape, written(style, "bash", wrong)) is not True
    if style not in ("json", "pythonic"):
        assert admitted(chat, shape, f"Well, {written(style, 'bash', {'command': 'ls'})} then") is True
        assert admitted(chat, shape, f"Well, {written(style, 'bash', {})} then") is not True


def test_marks_that_are_special_tokens_are_seen(tmp_path: Path) -> None:
    for special, added in [(["<tool_call>", "</tool_call>", "<think>", "</think>"], []), ([], ["<tool_call>"])]:
        chat = chat_of(tmp_path / str(len(special)), QWEN_LIKE, special, added)
        assert len(chat.marker_ids) == len(special)
        shape = Shape(tool_use(TOOLS, "required", None), chat.call_format)
        text = written("hermes", "bash", {"command": "ls"})
        assert admitted(chat, shape, text) is True
        assert (admitted(chat, shape, f"<think>\nhm\n</think>\n\n{text}") is True) == bool(special)
        ids = chat.tokenizer.encode(f"{text}<|im_end|>", parse_special=True)
        out = TextOut(chat.tokenizer, (), chat.marker_ids)
        assert "".join(out.push(token_id)[0] for token_id in ids) + out.finish() == text
        thinking = Shape(shape.use, shape.written, is_thinking=True)
        assert admitted(chat, thinking, f"so, {{a}} or\n[b]? </think>\n\n{text}") is True
        assert admitted(chat, thinking, f"so</think> {text[:-3]}") is not True


def test_a_mark_that_is_a_special_token_opens_a_call_and_is_read(tmp_path: Path) -> None:
    python, mistral = ["<|python_tag|>", "<|python_start|>", "<|python_end|>"], ["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"]
    named, listed = (
        '{"name": "bash", "parameters": {"command": "ls"}}',
        '{"name": "bash", "arguments": {"command": "ls"}}',
    )
    called, arguments = '[bash(command="ls")]', '{"command": "ls"}'
    cases: list[tuple[Style, list[str], list[str]]] = [
        ("pythonic", python, [called, f"<|python_start|>{called}<|python_end|>"]),
        ("json", python, [named, f"<|python_tag|>{named}", f"<|python_start|>{named}<|python_end|>"]),
        ("mistral_list", mistral, [f"[TOOL_CALLS] [{listed}]", f'[TOOL_CALLS][{listed[:-1]}, "id": "a1B2c3D4e"}}]']),
        (
            "mistral_args",
            mistral,
            [f"[TOOL_CALLS]bash{between}{arguments}" for between in ("[ARGS]", "", "[CALL_ID]a1B2c3D4e[ARGS]")],
        ),
    ]
    for style, special, texts in cases:
        chat = chat_of(tmp_path / style, TEMPLATES[style], special)
        assert chat.marker_ids == {chat.tokenizer.special[mark] for mark in special}
        shape = Shape(tool_use(TOOLS, "required", None), chat.call_format)
        for text in texts:
            assert admitted(chat, shape, text) is True, text
            ids = chat.tokenizer.encode(text, parse_special=True)
            assert any(map(chat.tokenizer.is_special, ids)) == (text not in (named, called))
            out = TextOut(chat.tokenizer, (), chat.marker_ids)
            parser = parser_of(chat.call_format, FUNCTIONS, many=True)
            content = "".join(parser.push(out.push(token_id)[0])[0] for token_id in ids)
            assert (content + parser.push(out.finish())[0] + parser.finish()[0]) == ""
            assert [(c.name, json.loads(c.arguments)) for c in parser.calls] == [("bash", {"command": "ls"})]


def test_values_in_tags_are_held_to_what_can_be_read_back(tmp_path: Path) -> None:
    chat = chat_of(tmp_path, TEMPLATES["xml"])

    def call(value: str, name: str = "a") -> str:
        return tag(f"<function=f>\n<parameter={name}>\n{value}\n</parameter>\n</function>")

    def shape(schema: JSON, choice: str = "required", is_strict: bool = True) -> Shape:
        parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        return Shape(ToolUse((Function("f", parameters, is_strict, "tools[0]"),), choice), chat.call_format)  # type: ignore

    text = "if a < b:\n\n  print('</tool_call>')\n"
    for schema, good, bad in [
        ({"type": "string"}, [text, "", "3", "\n"], ["</parameter>", "a\n</parameter>\nb"]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "a\nb"], ["a", "abcd"]),
        ({"type": ["string", "null"]}, ["null", text], ["x</parameter>"]),
        ({"type": "array", "items": {"type": "integer"}}, ["[1, 2]", "[]"], ['["a"]', "1"]),
        ({"enum": ["x y", 3, None]}, ["x y", "3", "null"], ["x", "4"]),
        ({"type": "boolean"}, ["true"], ["True", "yes"]),
    ]:  # fmt: skip
        for value in good:
            assert admitted(chat, shape(schema), call(value)) is True, (schema, value)
            parser = parser_of(chat.call_format, shape(schema).use.functions, many=True)
            parser.push(call(value))
            jsonschema.validate(json.loads(parser.calls[0].arguments), {"properties": {"a": schema}})
        for value in bad:
            assert admitted(chat, shape(schema), call(value)) is not True, (schema, value)
    assert admitted(chat, shape({"type": "string"}), call("x", "b")) is not True
    lenient = shape({"type": "string", "pattern": "^[ab]$"}, is_strict=False)
    assert admitted(chat, lenient, call("c")) is True
    with pytest.raises(AkvError, match="in tags") as caught:
        grammars_of(chat).constraint(shape({"type": "string", "pattern": "^[ab]$"}))
    assert caught.value.param == "tools[0]"
    open_ = Function("f", {"type": "object"}, False, "tools[0]")
    strict = Function("g", {"type": "object", "properties": {}}, True, "tools[1]")
    either = Shape(ToolUse((open_, strict), "auto"), chat.call_format)
    assert admitted(chat, either, call(text, "anything at all")) is True


def test_ids_that_mistrals_templates_take(tmp_path: Path) -> None:
    check = "{% if call.id | length != 9 %}{{ raise_exception('nine letters and digits') }}{% endif %}"
    styles: tuple[Style, ...] = ("mistral_list", "mistral_args")
    for style in styles:
        head, loop, tail = TEMPLATES[style].partition("{% for call in message.tool_calls or [] %}")
        chat = chat_of(tmp_path / style, head + loop + check + tail)
        assert chat.call_format == CallFormat(style)
        parser = parser_of(chat.call_format, FUNCTIONS, many=True)
        parser.push(written(style, "now", {}))
        parser.push(written(style, "now", {}))
        calls = [call.body() for call in parser.calls]
        assert len({call["id"] for call in calls}) == 2
        assert all(call["id"].isalnum() and call["id"].isascii() for call in calls)
        text = chat.render([QUESTION, {"role": "assistant", "content": None, "tool_calls": calls}]).text
        assert text.count('"name": "now"' if style == "mistral_list" else "now[ARGS]{}") == 2


def test_a_grammar_that_ends_leaves_only_the_end(default_tokenizer: Tokenizer) -> None:
    chat = Chat(default_tokenizer)
    for schema, good, bad in [
        ({"type": "object"}, '{\n  "a": [1, {}]\n}', "[1]"),
        ({"type": "array", "items": {"type": "integer"}}, "[1, 2]", '["a"]'),
        ({"enum": ["yes", "no"]}, '"yes"', '"maybe"'),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "null"}}}, "null", "0"),
    ]:
        assert admitted(chat, Shape(schema=schema), good) is True
        assert admitted(chat, Shape(schema=schema), bad) is not True
    both = Shape(tool_use(TOOLS, "auto", None), schema={"type": "object", "properties": {"a": {"const": 1}}})
    assert admitted(chat, both, '{"a": 1}') is True
    assert admitted(chat, both, written("hermes", "now", {})) is True
    assert admitted(chat, both, "text") == "text"


def test_what_cannot_be_enforced_is_refused_and_named(default_tokenizer: Tokenizer) -> None:
    grammars = Grammars(default_tokenizer, default_tokenizer.num_vocab, default_tokenizer.eos_token_ids)
    deep: JSON = {"type": "string"}
    for _ in range(300):
        deep = {"type": "object", "properties": {"a": deep}}
    unknown = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    for schema in [{"type": "nonsense"}, {"$ref": "#/$defs/none"}, {"pattern": "("}, {"properties": []}, deep]:
        with pytest.raises(AkvError, match="response_format") as caught:
            grammars.constraint(Shape(schema=schema))
        assert (caught.value.status, caught.value.param) == (400, "response_format")
    for is_strict in (True, False):
        use = ToolUse((FUNCTIONS[0], Function("f", unknown, is_strict, "tools[1].function.parameters")), "required")
        if not is_strict:
            assert grammars.constraint(Shape(use)) is not None  # the rest of it is held to
            continue
        with pytest.raises(AkvError, match='"not"') as caught:
            grammars.constraint(Shape(use))
        assert caught.value.param == "tools[1].function.parameters"


# --- a real server, a tiny model, the openai client -----------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def load_styled(folder: Path, style: Style) -> loader.LoadedModel:
    path = tiny_model(folder, name=style)
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATES[style]}))
    return loader.load(str(path), weights="float32")


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[dict[Style, Server]]:
    from contextlib import ExitStack

    with ExitStack() as stack:
        yield {s: stack.enter_context(serving_model(load_styled(folder, s), pool_tokens=8192)) for s in STYLES}


@pytest.fixture
def api(servers: dict[Style, Server]) -> Iterator[OpenAI]:
    with api_of(servers["hermes"]) as api:
        yield api
    servers["hermes"].engine.check()


def api_of(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


QUESTION: Any = {"role": "user", "content": "Go on."}
ASK: JSON = {"model": "default", "messages": [QUESTION], "max_tokens": 300, "temperature": 1.0}


def check_calls(calls: Any) -> None:
    assert calls
    for call in calls:
        assert call.type == "function" and re.fullmatch("call_[0-9a-f]{24}|[0-9a-f]{9}", call.id)
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    assert len({call.id for call in calls}) == len(calls)


def without_ids(message: JSON) -> JSON:
    calls = [{k: v for k, v in call.items() if k != "id"} for call in message.get("tool_calls") or []]
    return {**message, "tool_calls": calls}


@pytest.mark.parametrize("style", STYLES)
def test_calls_that_are_required_are_valid_whole_and_streamed(servers: dict[Style, Server], style: Style) -> None:
    with api_of(servers[style]) as api:
        for seed, choice in enumerate(["required", {"type": "function", "function": {"name": "get_weather"}}] * 2):
            ask = {**ASK, "tools": TOOLS, "tool_choice": choice, "seed": seed, "parallel_tool_calls": False}
            reply = api.chat.completions.create(**ask)
            message = reply.choices[0].message
            assert (reply.choices[0].finish_reason, message.content) == ("tool_calls", None)
            check_calls(message.tool_calls)
            assert len(message.tool_calls or []) == 1
            assert choice == "required" or message.tool_calls[0].function.name == "get_weather"  # type: ignore
            with api.chat.completions.stream(**ask) as stream:
                streamed = stream.get_final_completion().choices[0]
            assert streamed.finish_reason == "tool_calls"
            assert [c.function.arguments for c in streamed.message.tool_calls or []] == [
                c.function.arguments for c in message.tool_calls or []
            ]


@pytest.mark.parametrize("style", STYLES)
def test_a_required_call_that_is_cut_off_leaves_no_markup(servers: dict[Style, Server], style: Style) -> None:
    """Before its arguments begin it is nothing, and known again as that."""
    num_calls = []
    with api_of(servers[style]) as api:
        for max_tokens in (1, 7, 14, 60):
            ask = {**ASK, "tools": TOOLS[:1], "tool_choice": "required", "seed": 1, "max_tokens": max_tokens}
            more = {"akv": {"session": uuid4().hex}}
            choice = api.chat.completions.create(**ask, extra_body={**more, "return_token_ids": True}).choices[0]
            chunks = [chunk.choices[0] for chunk in api.chat.completions.create(**ask, stream=True)]
            assert choice.finish_reason == chunks[-1].finish_reason == "length"
            assert not choice.message.content and not any(chunk.delta.content for chunk in chunks)
            num_calls.append(len(choice.message.tool_calls or []))
            assert sum(call.id is not None for c in chunks for call in c.delta.tool_calls or []) == num_calls[-1]
            if not num_calls[-1]:
                answer = choice.message.model_dump(exclude_none=True)
                claimed = {**answer, "akv": {"token_ids": choice.token_ids}}  # type: ignore[attr-defined]
                for sent, extra in [(answer, more), (claimed, {})]:
                    ask["messages"] = [QUESTION, sent, QUESTION]
                    again = api.chat.completions.create(**ask, extra_body=extra)
                    assert again.akv["warnings"] == []  # type: ignore[attr-defined]
    assert num_calls == [0, 0, 0, style != "pythonic"], "a Python call is read as a whole"


def test_an_answer_may_come_back_under_its_agents_name(servers: dict[Style, Server]) -> None:
    """The model wrote none; of an answer that a client wrote, a template may have made some text."""
    with api_of(servers["hermes"]) as api:
        more, messages = {"akv": {"session": uuid4().hex}}, [QUESTION]
        for _ in range(3):
            reply = api.chat.completions.create(**{**ASK, "messages": messages, "max_tokens": 5}, extra_body=more)
            akv = reply.akv  # type: ignore[attr-defined]
            assert akv["warnings"] == []
            answer = {"role": "assistant", "content": reply.choices[0].message.content, "name": "researcher"}
            messages += [answer, QUESTION]
        answer["name"] = "writer"
        messages[1] = {**messages[1], "name": "writer"}
        reply = api.chat.completions.create(**{**ASK, "messages": messages, "max_tokens": 5}, extra_body=more)
        (warning,) = reply.akv["warnings"]  # type: ignore[attr-defined]
        assert warning.startswith("stream_diverged: messages[1] differs")


def test_a_call_streams_as_openai_streams_it(servers: dict[Style, Server]) -> None:
    body = {**ASK, "tools": TOOLS, "tool_choice": "required", "seed": 5, "max_tokens": 1500, "stream": True}
    with servers["hermes"].client() as client:
        lines = client.post("/v1/chat/completions", json=body).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line and not line.endswith("[DONE]")]
    choices = [chunk["choices"][0] for chunk in chunks]
    first, last = choices[0], choices[-1]
    assert first["delta"]["role"] == "assistant" and first["delta"]["content"] is None
    num_calls = 0
    for choice in choices[:-1]:
        assert choice["finish_reason"] is None
        (call,) = choice["delta"]["tool_calls"]
        if "id" in call:
            assert call["index"] == num_calls and call["type"] == "function"
            assert set(call["function"]) == {"name", "arguments"} and call["function"]["arguments"] == ""
            num_calls += 1
        else:
            assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
            assert call["index"] == num_calls - 1
        assert choice is first or "role" not in choice["delta"]
    assert num_calls > 0 and (last["delta"], last["finish_reason"]) == ({}, "tool_calls")


def test_several_calls_several_choices_and_log_probabilities(api: OpenAI) -> None:
    ask = {**ASK, "tools": TOOLS, "tool_choice": "required", "n": 3, "max_tokens": 1500, "logprobs": True, "seed": 4}
    reply = api.chat.completions.create(**ask, extra_body={"return_token_ids": True})
    for choice in reply.choices:
        check_calls(choice.message.tool_calls)
        assert choice.finish_reason == "tool_calls"
        assert choice.logprobs and choice.logprobs.content
        assert len(choice.logprobs.content) == len(choice.token_ids)  # type: ignore[attr-defined]
    assert max(len(choice.message.tool_calls or []) for choice in reply.choices) > 1
    assert len({str(without_ids(c.message.model_dump())) for c in reply.choices}) == 3
    token_ids: dict[int, list[int]] = {}
    for chunk in api.chat.completions.create(**ask, stream=True, extra_body={"return_token_ids": True}):
        for choice in chunk.choices:
            token_ids.setdefault(choice.index, []).extend(getattr(choice, "token_ids", None) or [])
    assert [token_ids[choice.index] for choice in reply.choices] == [c.token_ids for c in reply.choices]  # type: ignore


def test_without_a_need_to_call_the_answer_is_text(api: OpenAI) -> None:
    plain = api.chat.completions.create(**{**ASK, "temperature": 0, "max_tokens": 8}, tools=TOOLS, tool_choice="none")
    auto = api.chat.completions.create(**{**ASK, "temperature": 0, "max_tokens": 8}, tools=TOOLS)
    assert auto.choices[0].message.content == plain.choices[0].message.content
    assert plain.choices[0].message.tool_calls is None and auto.choices[0].message.tool_calls is None
    assert auto.choices[0].finish_reason in ("length", "stop")
    streamed = api.chat.completions.create(
        **{**ASK, "temperature": 0, "max_tokens": 8}, tools=TOOLS, stream=True, logprobs=True
    )
    chunks = [chunk.choices[0] for chunk in streamed]
    assert "".join(c.delta.content or "" for c in chunks) == auto.choices[0].message.content
    assert chunks[0].delta.role == "assistant" and all(c.delta.tool_calls is None for c in chunks)


def test_json_answers(api: OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["b"]}
    schema = {**schema, "additionalProperties": False}
    for seed in range(4):
        form: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}
        reply = api.chat.completions.create(**ASK, seed=seed, response_format=form)
        assert reply.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(reply.choices[0].message.content or ""), schema)
    reply = api.chat.completions.create(
        **{**ASK, "temperature": 0}, response_format={"type": "json_object"}, stop=["\x00"]
    )
    text = reply.choices[0].message.content or ""
    assert text.startswith("{") and (reply.choices[0].finish_reason == "length" or isinstance(json.loads(text), dict))


def tool(**function: Any) -> JSON:
    return {"type": "function", "function": {"name": "f", **function}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [tool(parameters={"type": "nonsense"})]}, "tools[0].function.parameters"),
        ({"tools": [tool(), tool(parameters=[1])]}, "tools[1].function.parameters"),
        (
            {"tools": [tool(), tool(parameters={"properties": {"a": {"type": "no"}}}, strict=True)]},
            "tools[1].function.parameters",
        ),
        (
            {"tools": [tool(parameters={"properties": {"a": {"$ref": "#/x"}}})], "tool_choice": "required"},
            "tools[0].function.parameters",
        ),
        ({"tools": [tool(name="")]}, "tools[0].function.name"),
        ({"tools": [tool(name="a b")]}, "tools[0].function.name"),
        ({"tools": [tool(strict="yes")]}, "tools[0].function.strict"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [tool()], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}},
            "response_format",
        ),
    ],
)
def test_bad_requests_name_their_field(servers: dict[Style, Server], body: JSON, param: str) -> None:
    with servers["hermes"].client() as client:
        reply = client.post("/v1/chat/completions", json={**ASK, **body})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "invalid_request", param)


def test_python_calls_refuse_schemas_that_they_cannot_carry(servers: dict[Style, Server]) -> None:
    schema = {"anyOf": [{"required": ["a"]}, {"required": ["b"]}], "properties": {"a": {}, "b": {}}}
    with servers["pythonic"].client() as client:
        for parameters in (schema, {"properties": {"a-b": {}}, "required": ["a-b"]}):
            body = {**ASK, "tools": [tool(parameters=parameters)], "tool_choice": "required"}
            error = client.post("/v1/chat/completions", json=body).json()["error"]
            assert error["param"] == "tools[0].function.parameters"


def test_a_grammar_holds_its_own_request_alone_and_survives_preemption(folder: Path) -> None:
    """Twelve sessions at once, half of them held to schemas, in a pool that has room for three."""

    def body(i: int) -> JSON:
        more = {"tools": TOOLS, "tool_choice": "required"} if i % 2 else {}
        messages = [{"role": "user", "content": f"request {i}"}]
        return {**ASK, "messages": messages, "seed": i, "max_tokens": 250, **more}

    def run(server: Server, client: httpx.Client, i: int) -> JSON:
        reply = client.post("/v1/chat/completions", json=body(i)).json()
        return without_ids(reply["choices"][0]["message"])

    loaded = load_styled(folder / "again", "hermes")
    with serving_model(loaded, pool_tokens=16384) as server, server.client() as client:
        alone = [run(server, client, i) for i in range(12)]
    with serving_model(loaded, pool_tokens=2048) as server, server.client() as client, ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda i: run(server, client, i), range(12)))
        assert server.engine.stats()["preemptions"] > 0
        server.engine.check()
    assert together == alone
    assert all(bool(message["tool_calls"]) == bool(i % 2) for i, message in enumerate(alone))


def resent(message: JSON, turn: int) -> JSON:
    """The model's own message as one framework or another sends it back."""
    calls = [
        {
            "id": f"call_{turn}_{i}",
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(json.loads(call["function"]["arguments"]), indent=turn, sort_keys=True),
            },
        }
        for i, call in enumerate(message["tool_calls"])
    ]
    content = [None, "", [{"type": "text", "text": ""}], "  "][turn % 4]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def agent_loop(api: OpenAI, tools: list[Any], num_turns: int = 5, **options: Any) -> list[JSON]:
    """An agent's turns; checks of each that it computed what is new and nothing else. Returns the `akv` objects."""
    messages: list[Any] = [{"role": "system", "content": f"Use tools {options['seed']} times."}, QUESTION]
    session, num_before, found = uuid4().hex, 0, []
    for turn in range(num_turns):
        reply = api.chat.completions.create(
            model="default",
            messages=messages,
            tools=tools,
            tool_choice="required",
            extra_body={"akv": {"session": session}},
            **options,
        )
        akv = reply.akv  # type: ignore[attr-defined]
        assert reply.choices[0].finish_reason == "tool_calls"
        assert akv["warnings"] == [] and akv["replayed_tokens"] == 0
        if turn:  # the first one may find the tools in the cache
            assert akv["prefilled_tokens"] == reply.usage.prompt_tokens - num_before  # type: ignore[union-attr]
            assert reply.usage.prompt_tokens_details.cached_tokens == num_before  # type: ignore[union-attr]
        num_before = akv["stream_tokens"]
        message = resent(reply.choices[0].message.model_dump(), turn)
        messages.append(message)
        for call in message["tool_calls"]:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"result {turn}: ok"})
        found.append(akv)
    return found


@pytest.mark.parametrize("style", STYLES)
def test_an_agent_computes_what_is_new_alone(servers: dict[Style, Server], style: Style) -> None:
    with api_of(servers[style]) as api:
        options = {"max_tokens": 200, "temperature": 1.0, "seed": 11, "parallel_tool_calls": False}
        replies = agent_loop(api, TOOLS[:2], **options)
        inputs = [b for m in replies[-1]["spans"] if m["role"] == "assistant" for b in m["blocks"]]
        assert all(block["kind"] == "tool_input" for block in inputs)
        # by the ids under which the framework sent them; the last answer was not sent back yet
        ids = [block["tool_call_id"] for block in inputs]
        assert ids[:-1] == ([] if style in ("pythonic", "xml") else [f"call_{turn}_0" for turn in range(4)])
        assert [m["tool_call_id"] for m in replies[-1]["spans"] if m["role"] == "tool"] == [
            f"call_{turn}_0" for turn in range(4)
        ]
        servers[style].engine.check()


def test_several_calls_at_once_come_back(servers: dict[Style, Server]) -> None:
    styles: tuple[Style, ...] = ("pythonic", "xml", "mistral_list", "mistral_args")
    for style in styles:
        with api_of(servers[style]) as api:
            runs = (agent_loop(api, [TOOLS[2]], num_turns=2, max_tokens=300, temperature=1.0, seed=s) for s in range(8))
            assert any(sum(span["role"] == "tool" for span in run[-1]["spans"]) > 1 for run in runs), style


def test_another_call_than_the_models_own_is_another_message(servers: dict[Style, Server], api: OpenAI) -> None:
    ask = {**ASK, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "bash"}}}
    more = {"akv": {"session": uuid4().hex}}
    reply = api.chat.completions.create(**ask, extra_body=more)
    message = resent(reply.choices[0].message.model_dump(), 1)
    message["tool_calls"][0]["function"]["arguments"] = '{"command": "not that"}'
    again = api.chat.completions.create(**{**ask, "messages": [QUESTION, message, QUESTION]}, extra_body=more)
    (warning,) = again.akv["warnings"]  # type: ignore[attr-defined]
    assert warning.startswith("stream_diverged: messages[1] differs")


def test_the_sdk_puts_streamed_calls_together(servers: dict[Style, Server]) -> None:
    ask: JSON = {"tools": TOOLS, "tool_choice": "required", "seed": 3, "max_tokens": 800}
    with akv_sdk.Client(servers["hermes"].url) as client:
        whole = client.chat([QUESTION], **ask)
        with client.chat_stream([QUESTION], **ask) as stream:
            for _ in stream:
                pass
            streamed = stream.final
    assert whole.finish_reason == streamed.finish_reason == "tool_calls"
    assert without_ids(streamed.message)["tool_calls"] == without_ids(whole.message)["tool_calls"]


def test_a_grammar_that_grows_too_complex_ends_its_request_alone(servers: dict[Style, Server], api: OpenAI) -> None:
    server = servers["hermes"]
    compiled = server.service._grammars.constraint

    class Broken:
        def mask(self) -> Any:
            return working.mask()

        def take(self, token_id: int) -> bool:
            raise AkvError("invalid_request", "the schema is too complex to hold an answer to it")

    working = compiled(Shape(schema={"type": "object"}))()  # type: ignore[misc]
    server.service._grammars.constraint = lambda shape: Broken  # type: ignore
    try:
        with pytest.raises(openai.BadRequestError, match="too complex"):
            api.chat.completions.create(**ASK, response_format={"type": "json_object"})
    finally:
        server.service._grammars.constraint = compiled  # type: ignore[method-assign]
    assert api.chat.completions.create(**ASK).choices[0].finish_reason in ("stop", "length")


# --- the default model ----------------------------------------------------------------------------------------------


def test_even_the_default_model_returns_valid_calls_and_json() -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "country": {"type": "string"}, "big": {"type": "boolean"}},
        "required": ["city", "country", "big"],
        "additionalProperties": False,
    }
    loaded = loader.load("default", weights="int8")
    with serving_model(loaded, pool_tokens=4096) as server, api_of(server) as api:
        for name in ("bash",):
            reply = api.chat.completions.create(
                model="default",
                messages=[{"role": "user", "content": "What is the weather in Paris?"}],
                tools=TOOLS[:2],
                tool_choice={"type": "function", "function": {"name": name}},
                max_tokens=100,
                temperature=0,
            )
            assert reply.choices[0].finish_reason == "tool_calls"
            check_calls(reply.choices[0].message.tool_calls)
        reply = api.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "Describe Paris as JSON."}],
            response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
            max_tokens=100,
            temperature=0,
        )
        jsonschema.validate(json.loads(reply.choices[0].message.content or ""), schema)
        assert reply.choices[0].finish_reason == "stop"
        server.engine.check()
