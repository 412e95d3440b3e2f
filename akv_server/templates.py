"""Chat templates: programs in Jinja that come with a model, run in a sandbox.

Owns the names and settings that templates are written for, and making one tell where each message begins. Knows
neither tokens nor what a message is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from akv_server.errors import AkvError


class Template:
    """One chat template. May be used from any thread."""

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        """`names`: what it may call by name beside the conversation. Raises jinja2.TemplateError if it is broken."""
        environment = _environment()
        tree = environment.parse(source)
        self.knows_tools = "tools" in jinja2.meta.find_undeclared_variables(tree)
        self.knows_calls = "tool_calls" in source
        self.knows_developer = "developer" in source
        self._names = dict(names)
        self._plain = environment.from_string(source)
        self._marked = environment.from_string(_mark_items(tree, environment))

    def run(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool = False,
        mark: Callable[[object], str] | None = None,
    ) -> str:
        """The text that it makes of a conversation. `mark` says what to write before each item of a loop.

        Raises AkvError("invalid_request", param="messages") whatever the template does wrong.
        """
        template, marks = (self._plain, {}) if mark is None else (self._marked, {_MARK: mark})
        try:
            return template.render(
                **self._names, messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **marks
            )
        except Exception as error:  # the request is refused, and nothing else happens
            raise AkvError(
                "invalid_request", f"the chat template does not take these messages: {error}", param="messages"
            ) from None


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, with which some templates mark what a model is trained on. Here it means nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The sandbox that chat templates are written for: these names, and blocks that leave no blank lines."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _mark_items(tree: jinja2.nodes.Template, environment: jinja2.Environment) -> jinja2.nodes.Template:
    """Makes every loop over single things write a mark before each."""
    for loop in list(tree.find_all(jinja2.nodes.For)):
        if isinstance(loop.target, jinja2.nodes.Name):
            item = jinja2.nodes.Name(loop.target.name, "load")
            mark = jinja2.nodes.Call(jinja2.nodes.Name(_MARK, "load"), [item], [], None, None)
            loop.body.insert(0, jinja2.nodes.Output([mark]).set_lineno(loop.lineno))
    tree.set_environment(environment)
    return tree


_MARK = "_akv_mark"
