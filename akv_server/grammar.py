"""Holding what a model writes to a grammar: calls whose arguments fit their schema, answers in JSON.

Owns writing the grammar of a request and which tokens it admits next; the only module that knows llguidance. Knows
neither messages nor the engine, which asks for a mask before it samples.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from akv_server.errors import AkvError, invalid
from akv_server.tokenizer import Tokenizer
from akv_server.tools import (
    ARGS,
    CALL_ID,
    CLOSING,
    FUNCTION,
    FUNCTION_END,
    HERMES,
    NO_TOOLS,
    OPENING,
    PARAMETER,
    PARAMETER_END,
    PYTHON_END,
    PYTHON_START,
    PYTHON_TAG,
    THINK_CLOSING,
    THINK_OPENING,
    TOOL_CALLS,
    CallFormat,
    Function,
    ToolUse,
)
from akv_server.values import types_of

Schema = dict[str, Any]

MAX_CALLS = 16  # in one answer that is held to a grammar
_MAX_GRAMMARS = 64  # kept compiled
# Space without a bound would let a small model never come to an end. Digits have none where the schema sets none: all
# that llguidance has for that is minimum and maximum, and they leave the digits of a fraction open.
_AS_TEMPLATES_WRITE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ON_LINES = {"whitespace_pattern": r"(\n[ ]{0,32}|[ ])?"}
_REST = r"/(.|\n)*/"
_ID = "/[a-zA-Z0-9]{9}/"
_SHARED = ("$defs", "definitions")
# What may be said of a string and is kept where it stands as a bare text.
_HELD_IN_TEXT = frozenset({"type", "minLength", "maxLength", "title", "description", "default", "examples", *_SHARED})


@dataclass(frozen=True, slots=True)
class Shape:
    """What an answer must look like. `schema`: JSON of this schema, `is_strict`: or a refusal where parts of it cannot
    be enforced. None: any text. Calls as `use` allows. `is_thinking`: the template opened the model's reasoning."""

    use: ToolUse = NO_TOOLS
    written: CallFormat = HERMES
    schema: Schema | None = None
    is_strict: bool = False
    is_thinking: bool = False

    @property
    def is_free(self) -> bool:
        """Whether any text will do."""
        calls_are_free = self.use.choice != "required" and not any(f.is_strict for f in self.use.functions)
        return self.schema is None and (calls_are_free or self.use.choice == "none")


class Grammars:
    """Compiles grammars for one model. May be used from any thread."""

    def __init__(self, tokenizer: Tokenizer, num_vocab: int, end_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._num_vocab = num_vocab
        self._end_ids = sorted(end_ids)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def constraint(self, shape: Shape) -> Callable[[], Constraint] | None:
        """Makes constraints to `shape`, one for each answer; None where any text will do.

        Raises AkvError("invalid_request") that names the schema which is none, or which cannot be enforced.
        """
        if shape.is_free:
            return None
        if shape.schema is not None:
            self._check("response_format", _json(shape.schema, _ON_LINES, lenient=not shape.is_strict))
        for function in shape.use.functions:
            if shape.use.choice == "required" or function.is_strict:
                rule = _json(_closed(function.parameters), _AS_TEMPLATES_WRITE, lenient=not function.is_strict)
                self._check(function.param, rule)
        param = "tools" if shape.schema is None else "response_format"
        compiled = self._compile(_Writer(shape, self._tokenizer).grammar(), param)
        return lambda: Constraint(compiled.deep_copy(), self._num_vocab)

    @cached_property
    def _library(self) -> LLTokenizer:
        wrapper = TokenizerWrapper(_Bytes(self._tokenizer, self._num_vocab))
        return LLTokenizer(wrapper, n_vocab=self._num_vocab, eos_token=self._end_ids)

    def _check(self, param: str, json_rule: str) -> None:
        self._compile(f"start: {json_rule}", param)

    def _compile(self, grammar: str, param: str) -> LLMatcher:
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar]
            compiled = LLMatcher(self._library, grammar, log_level=0)
            if compiled.is_error():
                reason = compiled.get_error().partition("\n   1 |")[0].rpartition("JSON schema: ")[2]
                raise invalid(param, f"cannot be enforced: {reason[:500]}")
            self._compiled[grammar] = compiled
            if len(self._compiled) > _MAX_GRAMMARS:
                self._compiled.popitem(last=False)
            return compiled


class _Bytes:
    """The tokenizer as llguidance asks for one. Given the model's own files, it would take added tokens that look like
    tags for special ones."""

    def __init__(self, tokenizer: Tokenizer, num_vocab: int) -> None:
        self.eos_token_id = tokenizer.eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(num_vocab)]
        self.special_token_ids = sorted(tokenizer.special.values())
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode_run(text, continues=True).ids


class Constraint:
    """One answer on its way through its grammar. Mutable; used by one thread at a time."""

    def __init__(self, matcher: LLMatcher, num_vocab: int) -> None:
        self._matcher = matcher
        self._num_vocab = num_vocab

    def mask(self) -> NDArray[np.bool_]:  # [vocab]
        """The tokens that may come next. All, once the grammar has failed: `take` says so."""
        bits = np.full(-(-self._num_vocab // 32), -1, np.int32)
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self._matcher.is_error():
            return np.ones(self._num_vocab, np.bool_)
        return np.unpackbits(bits.view(np.uint8), bitorder="little")[: self._num_vocab].view(np.bool_)

    def take(self, token_id: int) -> bool:
        """Goes on with a token that the mask allowed; whether the answer is complete.

        Raises AkvError("invalid_request") where the grammar became too complex to follow.
        """
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)
        if self._matcher.is_error():
            message = f"the schema is too complex to hold an answer to it: {self._matcher.get_error()[:300]}"
            raise AkvError("invalid_request", message)
        return self._matcher.is_stopped()


class _Writer:
    """Writes the grammar of a shape, in llguidance's dialect of Lark."""

    def __init__(self, shape: Shape, tokenizer: Tokenizer) -> None:
        self._shape = shape
        self._tokenizer = tokenizer
        self._rules: list[str] = [f"REST: {_REST}"]

    def grammar(self) -> str:
        shape = self._shape
        bodies = [] if shape.use.choice == "none" else [self._calls()]
        if shape.use.choice != "required":
            bodies.append(self._add("answer", self._answer()))
        thought = ""
        if shape.is_thinking:
            thought = self._until("thought", THINK_CLOSING) + r" /\s*/ "
        elif THINK_OPENING in self._tokenizer.special | self._tokenizer.added:
            thought = f"({self._mark(THINK_OPENING)} {self._until('thought', THINK_CLOSING)} /\\s*/)? "
        return f"start: {thought}({' | '.join(bodies)})\n" + "\n".join(self._rules) + "\n"

    def _answer(self) -> str:
        shape = self._shape
        if shape.schema is not None:
            return _json(shape.schema, _ON_LINES, lenient=not shape.is_strict)
        first = {"json": "{", "pythonic": "["}.get(shape.written.style)
        if first is None:  # marked calls may stand anywhere in a text, see `_calls`
            return '""'
        return rf"/(\s*[^\s\{first}](.|\n)*)?/"

    def _calls(self) -> str:
        """The rule of an answer that calls."""
        shape, required = self._shape, self._shape.use.choice == "required"
        one = self._add("call", " | ".join(self._call(i, f) for i, f in enumerate(shape.use.functions)))
        style = shape.written.style
        if style in ("json", "pythonic"):
            calls = self._several(one, "; ") if style == "json" else f'"[" {self._several(one, ", ")} "]"'
            if PYTHON_TAG in self._tokenizer.special:
                calls = f"({self._mark(PYTHON_TAG)})? {calls}"
            if PYTHON_START in self._tokenizer.special:
                calls = f"{calls} | {self._mark(PYTHON_START)} {calls} {self._mark(PYTHON_END)}"
            return self._add("calls", calls)
        if style in ("hermes", "xml"):
            opening, marked, between = OPENING, f'"\\n" {one} "\\n" {self._mark(CLOSING)}', "\n"
        else:
            opening, marked, between = TOOL_CALLS, one, ""
        if style == "mistral_list":
            marked = self._add("list", f'" "? "[" {self._several(one, ", ")} "]"')
        if not required and shape.schema is None:
            return self._add("calls", f"({self._until('opened', opening)} {marked})* REST")
        marked = self._add("marked", f"{self._mark(opening)} {marked}")
        return self._add("calls", marked if style == "mistral_list" else self._several(marked, between))

    def _several(self, call: str, between: str) -> str:
        another = f"{_quoted(between)} {call}" if between else call
        return f"{call} ({another}){{0,{MAX_CALLS - 1}}}" if self._shape.use.many else call

    def _call(self, i: int, function: Function) -> str:
        is_held = function.is_strict or self._shape.use.choice == "required"
        schema = _closed(function.parameters) if is_held else {"type": "object"}
        lenient = not function.is_strict
        written, name = self._shape.written, function.name
        if written.style == "pythonic":
            return self._add(f"call_{i}", f'{_quoted(name + "(")} {self._keywords(i, schema, lenient)} ")"')
        if written.style == "xml":
            parameters = self._parameters(i, schema, lenient)
            return self._add(f"call_{i}", f"{_quoted(f'{FUNCTION}{name}>')} {parameters} {_quoted(FUNCTION_END)}")
        arguments = _json(schema, _AS_TEMPLATES_WRITE, lenient=lenient)
        if written.style == "mistral_args":
            head = f"{_quoted(name)} ({self._mark(CALL_ID)} {_ID})? ({self._mark(ARGS)})?"
            return self._add(f"call_{i}", f"{head} {arguments}")
        head = _quoted(f'{{"name": {json.dumps(name)}, "{written.key}": ')
        tail = f'(", \\"id\\": \\"" {_ID} "\\"")? "}}"' if written.style == "mistral_list" else '"}"'
        return self._add(f"call_{i}", f"{head} {arguments} {tail}")

    def _keywords(self, i: int, schema: Schema, lenient: bool) -> str:
        """The arguments of a Python call, in the order of the schema, with values as JSON writes them.

        `first_n` is what follows from argument n on where none was written yet, `next_n` where one was.
        """
        named = self._named(i, schema, str.isidentifier, "in Python")
        first = behind = self._add(f"end_{i}", '""')
        for n, (name, value, is_required) in reversed(list(enumerate(named))):
            rule = f"{_quoted(name + '=')} {_json(value, _AS_TEMPLATES_WRITE, lenient=lenient)}"
            pair = self._add(f"pair_{i}_{n}", rule)
            if is_required:
                first, behind = f"{pair} {behind}", f'", " {pair} {behind}'
            else:
                first, behind = f"{pair} {behind} | {first}", f'(", " {pair})? {behind}'
            first, behind = self._add(f"first_{i}_{n}", first), self._add(f"next_{i}_{n}", behind)
        return first

    def _parameters(self, i: int, schema: Schema, lenient: bool) -> str:
        """The parameters of a call in tags, in the order of the schema; any where it names none and is open."""
        line_end = _quoted("\n")
        if schema == {"type": "object"}:
            rules = ["NAME: /[^<>\\n]+/", f"VALUE: {_text_value()}"]
            self._rules += [rule for rule in rules if rule not in self._rules]
            return f'{line_end} ({_quoted(PARAMETER)} NAME ">\\n" VALUE)*'
        rules = [line_end]
        for n, (name, value, is_required) in enumerate(self._named(i, schema, _is_tag, "in tags")):
            rule = f"{_quoted(f'{PARAMETER}{name}>')} {line_end} {self._tagged_value(i, n, value, lenient)}"
            pair = self._add(f"pair_{i}_{n}", rule)
            rules.append(pair if is_required else f"({pair})?")
        return " ".join(rules)

    def _tagged_value(self, i: int, n: int, schema: Any, lenient: bool) -> str:
        """A value up to and with the end of its tag: what a string says as it stands, all else as JSON."""
        end = _quoted(f"\n{PARAMETER_END}\n")
        types = types_of(schema, schema if isinstance(schema, dict) else {})
        if types is not None and "string" not in types:
            return f"{_json(schema, _AS_TEMPLATES_WRITE, lenient=lenient)} {end}"
        schema = schema if isinstance(schema, dict) else {}
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
            return f"({' | '.join(map(_quoted, texts))}) {end}"
        if not lenient and not schema.keys() <= _HELD_IN_TEXT:
            param = self._shape.use.functions[i].param
            raise invalid(param, "more than a text's length cannot be enforced where the model writes calls in tags")
        self._rules.append(f"VALUE_{i}_{n}: {_text_value(schema.get('minLength'), schema.get('maxLength'))}")
        return f"VALUE_{i}_{n}"

    def _named(self, i: int, schema: Schema, can_write: Callable[[str], bool], how: str) -> list[tuple[str, Any, bool]]:
        """`(name, schema, is_required)` of each argument that can be written with its name before it."""
        properties = schema.get("properties") or {}
        required = schema.get("required") or []
        shared = {key: schema[key] for key in _SHARED if key in schema}
        names = [name for name in properties if can_write(name)]
        beyond = set(schema) & {"$ref", "allOf", "anyOf", "oneOf", "patternProperties", "minProperties"}
        unnamed = [name for name in required if name not in names]
        if beyond or unnamed:
            what = f"its {min(beyond)}" if beyond else f"the argument {unnamed[0]!r}"
            message = f"{what} cannot be enforced where the model writes calls {how}"
            raise invalid(self._shape.use.functions[i].param, message)
        schemas = [{**shared, **properties[n]} if isinstance(properties[n], dict) else properties[n] for n in names]
        return [(name, value, name in required) for name, value in zip(names, schemas, strict=True)]

    def _until(self, name: str, mark: str) -> str:
        """Any text up to the first `mark`, and that."""
        if mark in self._tokenizer.special:
            return f"REST {self._mark(mark)}"
        self._rules.append(f"{name}[lazy]: {_REST} {_quoted(mark)}")
        return name

    def _mark(self, mark: str) -> str:
        """A mark as the tokenizer has it: a special token stands for no text."""
        token_id = self._tokenizer.special.get(mark)
        return _quoted(mark) if token_id is None else f"<[{token_id}]>"

    def _add(self, name: str, rule: str) -> str:
        self._rules.append(f"{name}: {rule}")
        return name


def _is_tag(name: str) -> bool:
    return bool(name) and not set(name) & set("<>\n")


def _text_value(least: float | None = None, most: float | None = None) -> str:
    """The terminal of a text in a tag, of so many characters, and what ends it."""
    bounds = f"{int(least or 0)},{'' if most is None else int(most)}"
    inner = rf"/(.|\n){{{bounds}}}/ & ~/(.|\n)*<\/parameter>(.|\n)*/"
    return f"({inner}) {_quoted(chr(10) + PARAMETER_END + chr(10))}"


def _quoted(text: str) -> str:
    return json.dumps(text)


def _json(schema: Any, space: dict[str, Any], *, lenient: bool) -> str:
    """JSON of a schema. `lenient`: what cannot be enforced of it is left aside."""
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": {**space, "lenient": lenient}}
    try:
        return f"%json {json.dumps(schema)}"
    except RecursionError:
        raise invalid("tools", "a schema is nested too deeply") from None


def _closed(schema: Schema) -> Schema:
    """The schema without arguments that it does not name, unless it says that there may be others."""
    says = {"additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"}
    return schema if says & set(schema) else {**schema, "additionalProperties": False}
