"""Functions to call, chat templates that write calls in each style, and the text of a call in each."""

from __future__ import annotations

import json
from typing import Any, get_args

from akv_server.tools import Style, tool_use

JSON = dict[str, Any]
STYLES: tuple[Style, ...] = get_args(Style)
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
    "xml": _HEAD
    + _TURN
    + "{% for call in message.tool_calls or [] %}"
    + "{{ '\n' if message.content or not loop.first }}<tool_call>\n<function={{ call.function.name }}>\n"
    + "{% for key, value in call.function.arguments | items %}<parameter={{ key }}>\n"
    + "{{ value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}\n"
    + "</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
    + _END,
    "mistral_list": _HEAD
    + _TURN
    + "{% if message.tool_calls %}[TOOL_CALLS] [{% for call in message.tool_calls or [] %}"
    + """{{ (call.function | tojson)[:-1] }}, "id": "{{ call.id[-9:] }}"}{{ ', ' if not loop.last }}{% endfor %}]"""
    + "{% endif %}"
    + _END,
    "mistral_args": _HEAD
    + _TURN
    + "{% for call in message.tool_calls or [] %}"
    + "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}"
    + _END,
}


def tag(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


def written(style: Style, name: str, arguments: JSON) -> str:
    if style == "pythonic":
        return f"[{name}({', '.join(f'{key}={json.dumps(value)}' for key, value in arguments.items())})]"
    if style == "xml":
        texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
        inner = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
        return tag(f"<function={name}>\n{inner}</function>")
    if style == "mistral_args":
        return f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}"
    key = "parameters" if style == "json" else "arguments"
    body = f'{{"name": "{name}", "{key}": {json.dumps(arguments)}}}'
    return {"hermes": tag(body), "mistral_list": f"[TOOL_CALLS] [{body}]"}.get(style, body)
