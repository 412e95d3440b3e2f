"""Chat templates that write as those of known models do, a conversation that has everything, and it rendered whole."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

from akv_server.chat import Chat
from akv_server.streams import Message
from akv_server.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3_LIKE = """{{ bos_token }}
{%- for message in messages %}
{{- '<|start|>' + message['role'] + '<|stop|>\n\n' + message['content'] | trim + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|stop|>\n\n' }}{%- endif %}"""
# Closes a turn of tool results only when the next message is no tool result, writes calls itself, and hides the
# thoughts of answers before the last question.
QWEN_LIKE = """{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- '# Functions' }}
    {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
    {{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- if ns.searching and message.role == 'user' %}
        {%- set ns.last = messages|length - loop.index %}{%- set ns.searching = false %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- if '</think>' in content and loop.index0 < ns.last %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant' }}
        {%- if content %}{{- '\n' + content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
PLAIN = """{% for message in messages %}### {{ message.role }}:
{{ message.content }}

{% endfor %}{% if add_generation_prompt %}### assistant:
{% endif %}"""
BY_INDEX = (
    "{% for i in range(messages | length) %}<|im_start|>{{ messages[i].role }}\n{{ messages[i].content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
JSON_RESULTS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | tojson }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": ("smollm", CHATML),
    "llama3": ("llama-bpe", LLAMA3_LIKE),
    "qwen": ("qwen2", QWEN_LIKE),
    "plain": ("gpt-2", PLAIN),
    "by_index": ("smollm", BY_INDEX),
    "json": ("smollm", JSON_RESULTS),
}
OPEN, CLOSE = '<ephemeral_observation id="{}">', "</ephemeral_observation>"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|stop|>"]
TOOLS = [{"type": "function", "function": {"name": "ls", "parameters": {"type": "object", "properties": {"p": {}}}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"p": "/tmp"}'}}
SYSTEM = {"role": "system", "content": "You are terse."}
USER = {"role": "user", "content": "How many files?\n"}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "a.py 12\nb.py 345"}
ANSWER = {"role": "assistant", "content": "Two, 357 bytes."}
TALK = [SYSTEM, USER, CALLING, RESULT, RESULT, ANSWER, USER, ANSWER]


class Whole:
    """A conversation rendered, with all of its pieces, and `spans`: where they lie in the stream that they make up."""

    def __init__(
        self, chat: Chat, messages: list[dict[str, Any]], tools: list[Any] | None = None, *, prompt: bool = True
    ) -> None:
        self.rendered = chat.render(messages, tools, add_generation_prompt=prompt)
        self.text, self.generation = self.rendered.text, self.rendered.generation
        self.pieces = [self.rendered.piece(i) for i in range(len(messages))]
        self.tokens = [*(token for piece in self.pieces for token in piece.tokens), *self.generation]
        starts = accumulate((len(piece.tokens) for piece in self.pieces), initial=0)
        self.spans = [
            Message(
                identity=None,
                role=piece.role,
                start=start,
                end=start + len(piece.tokens),
                content_start=start + piece.content[0],
                content_end=start + piece.content[1],
                tool_call_id=piece.tool_call_id,
                blocks=tuple(block.moved(start) for block in piece.blocks),
            )
            for piece, start in zip(self.pieces, starts, strict=False)
        ]


def with_template(tokenizer: Tokenizer, template: str | None) -> Chat:
    return Chat(replace(tokenizer, chat_template=template))


def plain_talk(talk: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation without calls, for templates that do not know them."""
    return [{"role": message["role"], "content": message["content"] or ""} for message in talk]


def cut(talk: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    return [talk[:k] for k in range(1, len(talk) + 1)]
