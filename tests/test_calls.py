"""Calls are found in a text that grows, in every style, however it is cut up."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akv_server.call_formats import parser_of
from akv_server.tools import CallFormat, Style
from tests.calling import FUNCTIONS, STYLES, tag, written


def parsed(
    style: Style, *parts: str, many: bool = True, is_thinking: bool = False
) -> tuple[str, list[tuple[str, str]]]:
    """Content, and name and arguments of each call, put together from what came in pieces."""
    parser = parser_of(CallFormat(style), FUNCTIONS, many=many, is_thinking=is_thinking)
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
    ids = [call.id for call in parser.calls]
    assert ids == sorted(set(ids))  # a framework that sorts calls by their ids leaves them where they are
    whole = "".join(parts)
    for call in parser.calls:
        assert call.begin == call.end or whole[call.begin - 1 : call.end + 1].startswith(call.arguments)
    return content, [(name, arguments) for name, arguments in calls]


def xml(name: str, **arguments: str) -> str:
    """A call in tags, of values as they are to stand there."""
    inner = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in arguments.items())
    return tag(f"<function={name}>\n{inner}</function>")


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
    ("pythonic", "<|python_start|>[bash(command='ls')]<|python_end|>", "", [("bash", '{"command": "ls"}')]),
    ("pythonic", "[now()] <|python_end|> so", "so", [("now", "{}")]),
    ("pythonic", "[now()] <b>", "<b>", [("now", "{}")]),
    ("json", f"Hm <|python_start|>{LS}{LS}<|python_end|>\n", "Hm", [("bash", '{"command": "ls"}')] * 2),
    ("mistral_list", f"[TOOL_CALLS] [{LS}]", "", [("bash", '{"command": "ls"}')]),
    ("mistral_list", f"Well.[TOOL_CALLS][{LS}, {LS}] so", "Well.\nso", [("bash", '{"command": "ls"}')] * 2),
    (
        "mistral_list",
        '[TOOL_CALLS] [{"name": "bash", "arguments": {"command": "]"}, "id": "abc123DEF"}]',
        "",
        [("bash", '{"command": "]"}')],
    ),
    ("mistral_list", '[TOOL_CALLS]{"arguments": {"a": 1}, "name": "other"}', "", [("other", '{"a": 1}')]),
    ("mistral_list", f"[TOOL_CALLS] [{LS[:-9]}", "", [("bash", '{"command')]),
    ("mistral_list", "[TOOL_CALLS] none", " none", []),
    ("mistral_list", f"[{LS}]", f"[{LS}]", []),
    ("mistral_args", '[TOOL_CALLS]bash[ARGS]{"command": "ls"}', "", [("bash", '{"command": "ls"}')]),
    ("mistral_args", '[TOOL_CALLS]bash{"command": "}"}', "", [("bash", '{"command": "}"}')]),
    (
        "mistral_args",
        'Both.[TOOL_CALLS]now[CALL_ID]a1B2c3D4e[ARGS]{}[TOOL_CALLS]bash [ARGS] {"command": "ls"} so',
        "Both.\nso",
        [("now", "{}"), ("bash", '{"command": "ls"}')],
    ),
    ("mistral_args", '[TOOL_CALLS]bash[ARGS]{"command": "l', "", [("bash", '{"command": "l')]),
    ("mistral_args", "[TOOL_CALLS]bash[ARGS]", "bash[ARGS]", []),
    ("mistral_args", "[TOOL_CALLS]what is it[TOOL_CALLS]now{}", "what is it", [("now", "{}")]),
    ("mistral_args", 'now[ARGS]{"a": 1}', 'now[ARGS]{"a": 1}', []),
    ("xml", xml("bash", command="ls"), "", [("bash", '{"command": "ls"}')]),
    (
        "xml",
        f"First.\n\n{xml('bash', command='ls')}\n{xml('now')} so",
        "First.\nso",
        [("bash", '{"command": "ls"}'), ("now", "{}")],
    ),
    (
        "xml",
        xml("bash", command='\n  echo "a"\n\n<b>\n</tool_call>é🙂'),
        "",
        [("bash", '{"command": "\\n  echo \\"a\\"\\n\\n<b>\\n</tool_call>é🙂"}')],
    ),
    (
        "xml",
        xml("get_weather", city="3", days="3", units='["C"]', exact="True", near="None"),
        "",
        [("get_weather", '{"city": "3", "days": 3, "units": ["C"], "exact": true, "near": null}')],
    ),
    (
        "xml",
        xml("get_weather", days="soon", near="{'km': 3}"),
        "",
        [("get_weather", '{"days": "soon", "near": {"km": 3}}')],
    ),
    (
        "xml",
        xml("other", a="1", b="NaN", c='"q"', d='{"e": [1]}', f=""),
        "",
        [("other", '{"a": 1, "b": "NaN", "c": "\\"q\\"", "d": {"e": [1]}, "f": ""}')],
    ),
    (
        "xml",
        "<tool_call><function=bash><parameter=command>ls</parameter></function></tool_call>",
        "",
        [("bash", '{"command": "ls"}')],
    ),
    (
        "xml",
        f"Hm {xml('bash', command='ls').removeprefix('<tool_call>')[:-12]}<function=now>\n</function>\n</tool_call>",
        "Hm",
        [("bash", '{"command": "ls"}'), ("now", "{}")],
    ),
    (
        "xml",
        "<tool_call>\n<function=bash>\nfirst <i>\n<parameter=command>\nls\n</parameter>\n</tool_call>",
        "",
        [("bash", '{"command": "ls"}')],
    ),
    ("xml", "<tool_call>\n<function=bash>\n<parameter=command>\nl\n</par", "", [("bash", '{"command": "l\\n</par')]),
    ("xml", "<tool_call>\n<function=bash>\n<parameter=comm", "", [("bash", "{")]),
    ("xml", "The <function=other> tag", "The <function=other> tag", []),
    ("xml", "A <tool_call> tag and <function=a b>", "A <tool_call> tag and <function=a b>", []),
    ("xml", f"<think>\n{xml('now')}?</think>{xml('now')}", f"<think>\n{xml('now')}?</think>", [("now", "{}")]),
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
        ("xml", xml("bash", command="ls"), "\n" + xml("now")),
        ("mistral_list", f"[TOOL_CALLS] [{LS}]", " so"),
        ("mistral_args", "[TOOL_CALLS]now[ARGS]{}", "[TOOL_CALLS]now[ARGS]{}"),
    ]:
        assert parsed(style, text, rest, many=False) == parsed(style, text)  # type: ignore[arg-type]
        parser = parser_of(CallFormat(style), FUNCTIONS, many=False)  # type: ignore[arg-type]
        done = [(parser.push(letter), parser.is_done)[1] for letter in text]
        assert done == [False] * (len(text) - 1) + [True]


def test_arguments_come_as_they_are_written() -> None:
    parser = parser_of(CallFormat("hermes"), FUNCTIONS, many=True)
    deltas = [delta for letter in tag(LS) for delta in parser.push(letter)[1]]
    assert [delta.arguments for delta in deltas[1:]] == list('{"command": "ls"}')
    assert deltas[0].body()["function"] == {"name": "bash", "arguments": ""}
    assert all(delta.body() == {"index": 0, "function": {"arguments": delta.arguments}} for delta in deltas[1:])


def test_a_text_in_tags_comes_as_it_is_written() -> None:
    parser = parser_of(CallFormat("xml"), FUNCTIONS, many=True)
    text = 'echo "<a>"\n</b>\n'
    deltas = [d for letter in xml("bash", command=text) for d in parser.push(letter)[1]]
    assert [d.arguments for d in deltas[1:4]] == ["{", '"command": ', '"']
    assert len(deltas) > 4 + len(text) - 4, "a letter each, but for those that might have been the end"
    assert "".join(d.arguments for d in deltas) == '{"command": "echo \\"<a>\\"\\n</b>\\n"}'


def test_what_a_template_opened_is_thought() -> None:
    thought = f"hm, {tag(LS)}</think>"
    assert parsed("hermes", thought + tag(LS), is_thinking=True) == (thought, [("bash", '{"command": "ls"}')])


@pytest.mark.parametrize("style", STYLES)
def test_what_is_cut_off_of_a_call_that_is_certain_is_no_content(style: Style) -> None:
    text = "<think>\nhm\n</think>\n\n" + written(style, "bash", {"command": "ls"})
    begins, named = text.index("</think>") + len("</think>"), False
    for end in range(len(text) + 1):
        parser = parser_of(CallFormat(style), FUNCTIONS, many=True, is_held=True)
        parts = [parser.push(letter) for letter in text[:end]] + [parser.finish()]
        assert "".join(content for content, _ in parts) == ("" if end < len("<think>") else text[: min(end, begins)])
        assert parser_content(style, text[:end]) == "".join(content for content, _ in parts)
        assert not named or parser.calls
        named = bool(parser.calls)
    assert named


def parser_content(style: Style, text: str) -> str:
    """What a text that came at once says besides a call that is certain."""
    parser = parser_of(CallFormat(style), FUNCTIONS, many=True, is_held=True)
    return parser.push(text)[0] + parser.finish()[0]


LONG = "a" * 5000
HEADS: list[tuple[Style, str, str]] = [
    ("hermes", '<tool_call>\n{"name": "', ""),
    ("json", '{"name": "', ""),
    ("json", '{"', ""),
    ("mistral_list", '[TOOL_CALLS] [{"name": "', "[TOOL_CALLS]"),
    ("mistral_args", "[TOOL_CALLS]", "[TOOL_CALLS]"),
    ("mistral_args", "[TOOL_CALLS]now [", "[TOOL_CALLS]"),
    ("pythonic", "[", ""),
    ("xml", "<function=", ""),
    ("xml", "<tool_call>\n<function=", ""),
]


@pytest.mark.parametrize(("style", "head", "mark"), HEADS)
def test_a_head_without_an_end_is_not_held_back(style: Style, head: str, mark: str) -> None:
    """No name is so long; and each piece would be looked at together with all before it."""
    text = head + LONG
    parser = parser_of(CallFormat(style), FUNCTIONS, many=True)
    said = 0
    for i in range(0, len(text), 4):
        content, deltas = parser.push(text[i : i + 4])
        said += len(content)
        assert not deltas and i + 4 - said < 400
    assert parsed(style, text) == parsed(style, *text) == (text.removeprefix(mark), [])


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("hermes", "hi" + " " * 5000),
        ("hermes", "<tool_call>" + " " * 5000),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}' + ' "b"' * 1000),
        ("hermes", f"{tag(LS)}" + "\n" * 5000),
        ("pythonic", "[now()" + " " * 5000),
        ("xml", f"<tool_call>\n<function=now>\n<parameter={LONG}"),
        ("xml", "<tool_call>\n<function=now>\n" + "\n" * 5000),
    ],
)
def test_a_piece_is_looked_at_with_little_of_what_came_before(style: Style, text: str) -> None:
    parser = parser_of(CallFormat(style), FUNCTIONS, many=True)
    for i in range(0, len(text), 4):
        parser.push(text[i : i + 4])
        assert len(parser._buffer) < 1100
    assert parsed(style, text) == parsed(style, *text)


def test_names_have_a_bound() -> None:
    for length, found in [(128, 1), (129, 0)]:
        for styled in STYLES:
            text = written(styled, "f" * length, {})
            if styled in ("json", "pythonic"):  # without a mark only functions that there are
                text = f"<|python_tag|>{text}"
            assert len(parsed(styled, text)[1]) == found == len(parsed(styled, *text)[1]), styled


SCRAPS = [
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_start|>", "<|python_end|>", "<function=now>", "<function=bash>"),
    *("<parameter=command>", "</parameter>", "</function>", "<parameter=b>", xml("bash", command="l s"), "now"),
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
    assert style not in ("hermes", "xml") or whole[1] or whole[0] == text
