"""Tool calls: finding them in a text that grows, holding them to their schemas, and sending them back and forth."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import jsonschema
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import OpenAI

import akv_sdk
from akv_server import loader
from akv_server.chat import Chat
from akv_server.errors import AkvError
from akv_server.generation import TextOut
from akv_server.grammar import Grammars, Shape
from akv_server.tokenizer import Tokenizer
from akv_server.tokenizer_files import from_directory
from akv_server.tools import CallFormat, Function, Parser, Style, ToolUse, tool_use
from tests.chats import QWEN_LIKE
from tests.models import tiny_model
from tests.server import Server, serving_model
from tests.tokenizers_for_tests import save, small_tokenizer

JSON = dict[str, Any]
STYLES: tuple[Style, ...] = ("hermes", "json", "pythonic")
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "São Paulo", 'a "quoted" one']},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "units": {"type": "array", "items": {"enum": ["C", "F"]}, "maxItems": 2},
        "exact": {"type": "boolean"},
        "near": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/near"}]},
    },
    "required": ["city", "exact"],
    "$defs": {"near": {"type": "object", "properties": {"km": {"enum": [2.5, 3]}}, "additionalProperties": False}},
}
BASH = {"type": "object", "properties": {"command": {"type": "string", "maxLength": 12}}, "required": ["command"]}
SCHEMAS = {"get_weather": WEATHER, "bash": BASH, "now": {"type": "object", "properties": {}}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "bash", "parameters": BASH}},
    {"type": "function", "function": {"name": "now"}},
]
FUNCTIONS = tool_use(TOOLS, None, None).functions

_HEAD = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
_TURN = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
_END = (
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"  # of a turn, and of all
)
TEMPLATES: dict[Style, str] = {
    "hermes": f"{_TURN}{_END}",  # knows neither tools nor calls
    "json": _HEAD
    + _TURN
    + "{% if message.tool_calls %}"
    + "{% if message.tool_calls | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}"
    + '{% set f = message.tool_calls[0].function %}{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
    + "{% endif %}"
    + _END,
    "pythonic": _HEAD
    + _TURN
    + "{% if message.tool_calls %}[{% for call in message.tool_calls %}{{ call.function.name }}("
    + "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value | tojson }}"
    + "{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]{% endif %}"
    + _END,
}


# --- parsing --------------------------------------------------------------------------------------------------------


def parsed(
    style: Style, *parts: str, many: bool = True, is_thinking: bool = False
) -> tuple[str, list[tuple[str, str]]]:
    """Content, and name and arguments of each call, put together from what came in pieces."""
    parser = Parser(CallFormat(style), FUNCTIONS, many=many, is_thinking=is_thinking)
    content, calls = "", []
    for text, deltas in [*(parser.push(part) for part in parts), parser.finish()]:
        content += text
        for delta in deltas:
            if delta.opens is not None:
                assert delta.index == len(calls) and not delta.arguments
                calls.append([delta.opens.name, ""])
            else:
                assert delta.arguments
                calls[delta.index][1] += delta.arguments
    assert [(call.name, call.arguments) for call in parser.calls] == [tuple(call) for call in calls]
    whole = "".join(parts)
    for call in parser.calls:
        assert call.begin == call.end or whole[call.begin - 1 : call.end + 1].startswith(call.arguments)
    return content, [(name, arguments) for name, arguments in calls]


def tag(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


LS = '{"name": "bash", "arguments": {"command": "ls"}}'
CASES: list[tuple[Style, str, str, list[tuple[str, str]]]] = [
    ("hermes", "No call.", "No call.", []),
    ("hermes", tag(LS), "", [("bash", '{"command": "ls"}')]),
    ("hermes", f"First.\n\n{tag(LS)}\n{tag(LS)}\n", "First.", [("bash", '{"command": "ls"}')] * 2),
    ("hermes", f"a {tag(LS)} b", "a\nb", [("bash", '{"command": "ls"}')]),
    ("hermes", '<tool_call>{"name":"now","arguments":{}}</tool_call>', "", [("now", "{}")]),
    ("hermes", tag('{"arguments": {"a": [1]}, "name": "now"}'), "", [("now", '{"a": [1]}')]),
    ("hermes", tag('{"name": "x", "arguments": "{\\"a\\": 1}"}'), "", [("x", '{"a": 1}')]),
    ("hermes", tag("{'name': 'bash', 'arguments': {'command': 'ls'}}"), "", [("bash", '{"command": "ls"}')]),
    ("hermes", tag('{"name": "now"}'), "", [("now", "{}")]),
    (
        "hermes",
        tag('{"name": "bash", "arguments": {"command": "echo \\"}</tool_call>{\\\\"}}'),
        "",
        [("bash", '{"command": "echo \\"}</tool_call>{\\\\"}')],
    ),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {"a": {}}\n</tool_call>x', "x", [("now", '{"a": {}}')]),
    ("hermes", '<tool_call>\n{"name": "bash", "arguments": {"command": "l', "", [("bash", '{"command": "l')]),
    ("hermes", '<tool_call>\n{"name": "bash", "argu', '<tool_call>\n{"name": "bash", "argu', []),
    ("hermes", "A <tool_call> tag, <tool", "A <tool_call> tag, <tool", []),
    ("hermes", tag("{nonsense}"), tag("{nonsense}"), []),
    ("hermes", f"<think>\n{tag(LS)}?\n</think>\n\n{tag(LS)}", f"<think>\n{tag(LS)}?\n</think>", [("bash", LS[30:-1])]),
    ("json", '{"name": "bash", "parameters": {"command": "ls"}}', "", [("bash", '{"command": "ls"}')]),
    ("json", f"\n{LS}; {LS}", "", [("bash", '{"command": "ls"}')] * 2),
    ("json", f"{LS}\n{LS} and so on", "and so on", [("bash", '{"command": "ls"}')] * 2),
    ("json", '{"name": "Ann", "arguments": {"age": 3}}', '{"name": "Ann", "arguments": {"age": 3}}', []),
    ("json", '{"answer": 42}', '{"answer": 42}', []),
    ("json", '{"type": "function", "name": "now", "parameters": {}}', "", [("now", "{}")]),
    ("json", f"Let me see. <|python_tag|>{LS}", "Let me see.", [("bash", '{"command": "ls"}')]),
    ("json", '<|python_tag|>{"name": "other", "parameters": {}}', "", [("other", "{}")]),
    ("json", "<|python_tag|>print(1)", "print(1)", []),
    ("json", f"Use {LS}", f"Use {LS}", []),
    ("pythonic", "[bash(command='ls')]", "", [("bash", '{"command": "ls"}')]),
    ("pythonic", '[now(), bash(command="a(\\"b\\")]")]', "", [("now", "{}"), ("bash", '{"command": "a(\\"b\\")]"}')]),
    (
        "pythonic",
        "[get_weather(city='x', exact=True, near=null, units=['C', 'F'])]",
        "",
        [("get_weather", '{"city": "x", "exact": true, "near": null, "units": ["C", "F"]}')],
    ),
    (
        "pythonic",
        "[get_weather(days=-1, near={'km': 2.5})]",
        "",
        [("get_weather", '{"days": -1, "near": {"km": 2.5}}')],
    ),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("pythonic", "[x(a=1)]", "[x(a=1)]", []),
    ("pythonic", "[bash(open('x'))]", "[bash(open('x'))]", []),
    ("pythonic", "[bash(command=", "[bash(command=", []),
    ("pythonic", "[a word](link)", "[a word](link)", []),
    ("pythonic", "Now: <|python_tag|>[now()]", "Now:", [("now", "{}")]),
]


@pytest.mark.parametrize(("style", "text", "content", "calls"), CASES)
def test_calls_are_found(style: Style, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parsed(style, text) == (content, calls)
    assert parsed(style, *text) == (content, calls)


def test_the_end_of_the_only_call_is_the_end() -> None:
    for style, text, rest in [
        ("hermes", tag(LS), "\n" + tag(LS)),
        ("json", LS, "; " + LS),
        ("pythonic", "[bash(command='ls')]", " so"),
    ]:
        assert parsed(style, text, rest, many=False) == parsed(style, text)  # type: ignore[arg-type]
        parser = Parser(CallFormat(style), FUNCTIONS, many=False)  # type: ignore[arg-type]
        done = [(parser.push(letter), parser.is_done)[1] for letter in text]
        assert done == [False] * (len(text) - 1) + [True]


def test_arguments_come_as_they_are_written() -> None:
    parser = Parser(CallFormat("hermes"), FUNCTIONS, many=True)
    deltas = [delta for letter in tag(LS) for delta in parser.push(letter)[1]]
    assert [delta.arguments for delta in deltas[1:]] == list('{"command": "ls"}')
    assert deltas[0].body()["function"] == {"name": "bash", "arguments": ""}
    assert all(delta.body() == {"index": 0, "function": {"arguments": delta.arguments}} for delta in deltas[1:])


def test_what_a_template_opened_is_thought() -> None:
    thought = f"hm, {tag(LS)}</think>"
    assert parsed("hermes", thought + tag(LS), is_thinking=True) == (thought, [("bash", '{"command": "ls"}')])


SCRAPS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "<think>",
        "</think>",
        "\n",
        " ",
        "; ",
        ", ",
        "[",
        "]",
        "{",
        "}",
    ),
    *(
        LS,
        LS[:-1],
        tag(LS),
        '{"name": "now", "parameters": {}}',
        '"',
        "\\",
        "\\\\",
        "'",
        "now()",
        "bash(command='",
        "')",
    ),
    *('{"name": "', '", "arguments": {', "bash", "é🙂", '"a": "\\u00e9"', "true", "1e5", "text", '{"a": 1}', "x(y="),
]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(STYLES),
    st.lists(st.sampled_from(SCRAPS), max_size=10),
    st.sets(st.integers(0, 300)),
    st.booleans(),
    st.booleans(),
)
def test_how_a_text_is_cut_up_changes_nothing(
    style: Style, scraps: list[str], cuts: set[int], many: bool, is_thinking: bool
) -> None:
    text = "".join(scraps)
    at = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    parts = [text[a:b] for a, b in pairwise(at)]
    whole = parsed(style, text, many=many, is_thinking=is_thinking)
    assert parsed(style, *parts, many=many, is_thinking=is_thinking) == whole
    assert parsed(style, *text, many=many, is_thinking=is_thinking) == whole
    assert style != "hermes" or whole[1] or whole[0] == text


# --- formats and grammars -------------------------------------------------------------------------------------------


def chat_of(folder: Path, template: str, special: list[str] | None = None, added: list[str] | None = None) -> Chat:
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(special or [])]
    built = small_tokenizer("qwen2", tokens, added)
    return Chat(from_directory(save(built, folder, eos_token="<|im_end|>", chat_template=template)))


def test_the_template_says_how_the_model_calls(tmp_path: Path, default_tokenizer: Tokenizer) -> None:
    keys = {"hermes": "arguments", "json": "parameters", "pythonic": "arguments"}
    for style, template in TEMPLATES.items():
        chat = chat_of(tmp_path / style, template)
        assert chat.call_format == CallFormat(style, keys[style])
        assert chat.takes_many_calls == (style != "json")
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


def written(style: Style, name: str, arguments: JSON) -> str:
    if style == "pythonic":
        return f"[{name}({', '.join(f'{key}={json.dumps(value)}' for key, value in arguments.items())})]"
    key = "parameters" if style == "json" else "arguments"
    body = f'{{"name": "{name}", "{key}": {json.dumps(arguments)}}}'
    return tag(body) if style == "hermes" else body


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
    assert admitted(chat, shape, written(style, "bash", {"command": 3})) is not True
    if style == "hermes":
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
        assert call.type == "function" and call.id.startswith("call_")
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    assert len({call.id for call in calls}) == len(calls)


def without_ids(message: JSON) -> JSON:
    calls = [{k: v for k, v in call.items() if k != "id"} for call in message.get("tool_calls") or []]
    return {**message, "tool_calls": calls}


@pytest.mark.parametrize("style", STYLES)
def test_calls_that_are_required_are_valid_whole_and_streamed(servers: dict[Style, Server], style: Style) -> None:
    with api_of(servers[style]) as api:
        for seed, choice in enumerate(["required", {"type": "function", "function": {"name": "get_weather"}}] * 3):
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
    messages: list[Any] = [{"role": "system", "content": "Use tools."}, QUESTION]
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
        assert ids[:-1] == ([] if style == "pythonic" else [f"call_{turn}_0" for turn in range(4)])
        assert [m["tool_call_id"] for m in replies[-1]["spans"] if m["role"] == "tool"] == [
            f"call_{turn}_0" for turn in range(4)
        ]
        servers[style].engine.check()


def test_several_calls_at_once_come_back(servers: dict[Style, Server]) -> None:
    with api_of(servers["pythonic"]) as api:
        replies = agent_loop(api, [TOOLS[2]], num_turns=2, max_tokens=300, temperature=1.0, seed=1)
    assert sum(span["role"] == "tool" for span in replies[-1]["spans"]) > 1


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
