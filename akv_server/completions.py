"""Running completions: from a checked body to reply bodies, whole or in chunks, on a session or on none.

Owns what joins the parts: the body's fields, the prompt it makes, the generation, and the `akv` object of the reply.
Knows no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Protocol

from akv_sdk import types
from akv_server import auto_drop, replies, streams
from akv_server.attention import Attention
from akv_server.call_formats import parser_of
from akv_server.calls import Parser
from akv_server.chat import Chat
from akv_server.edits import Management
from akv_server.errors import AkvError
from akv_server.generation import Generation, Runs, Work
from akv_server.grammar import Constraint, Grammars
from akv_server.journal import Journal
from akv_server.metrics import RequestMetrics, exposition
from akv_server.model import ModelConfig
from akv_server.prompts import ChatPrompt, Prompt, TextPrompt, render
from akv_server.requests import ChatBody, CompletionBody
from akv_server.sessions import DAY_S, MAX_SESSIONS, Cache, Sessions, Turn
from akv_server.streams import Stream
from akv_server.tokenizer import Tokenizer

MakeConstraint = Callable[[], Constraint]


class RunningEngine(Runs, Cache, Protocol):
    """The engine, as this layer and those above use it."""

    def stats(self) -> dict[str, Any]: ...


class PoolSize(Protocol):
    """What is asked of the engine's config."""

    @property
    def num_pages(self) -> int: ...

    @property
    def page_size(self) -> int: ...


class Completions:
    """The service around a running engine: everything the routes need. `window` is the model's number of positions."""

    def __init__(
        self,
        engine: RunningEngine,
        tokenizer: Tokenizer,
        config: ModelConfig,
        *,
        pool: PoolSize,
        journal: Journal | None = None,
        session_ttl_s: float = DAY_S,
        max_sessions: int = MAX_SESSIONS,
        auto_drop: Callable[[str], bool] = lambda tenant: False,
    ) -> None:
        self.engine = engine
        self._auto_drop = auto_drop  # whether the server drops by itself for a tenant whose request does not say
        self.tokenizer = tokenizer
        self.model = config.name
        self.window = config.max_positions
        self.pool_tokens = pool.num_pages * pool.page_size
        self.chat = Chat(tokenizer)
        self.requests = RequestMetrics()
        self._num_vocab = config.vocab_size
        self._grammars = Grammars(tokenizer, config.vocab_size, self.chat.end_ids if tokenizer.chat_template else ())
        self.sessions = Sessions(
            engine,
            window=self.window,
            page_size=pool.page_size,
            journal=journal,
            ttl_s=session_ttl_s,
            max_sessions=max_sessions,
        )

    def check_model(self, name: str | None) -> None:
        """Raises `model_not_found` unless `name` is the loaded model's id, "default", or left out."""
        if name not in (None, "default", self.model):
            message = f"the model {name[:200]!r} is not loaded; this server has {self.model!r}"
            raise AkvError("model_not_found", message, param="model")

    @asynccontextmanager
    async def run(
        self, tenant: str, header_session: str | None, body: ChatBody | CompletionBody, preparing: AsyncExitStack
    ) -> AsyncIterator[Completion]:
        """A completion that runs until the block ends; leaving it early aborts the work. `preparing` is closed as soon
        as the body has become a prompt. Raises AkvError, with nothing changed, for whatever can be known before."""
        arrived_s = self.requests.clock()
        self.check_model(body.model)
        akv = body.akv or types.AkvRequest()
        prompt, constraint = await asyncio.to_thread(self._prompt, body)  # rendering a long one takes a while
        async with self.sessions.turn(
            tenant,
            akv.session or _checked_name(header_session) or body.prompt_cache_key,
            prompt.continued,
            cache_salt=body.cache_salt,
            ops=akv.ops,
            on_miss=akv.on_miss,
            edit=self._management(body, akv).apply,
            num_asked=body.max_new_tokens or 0,
        ) as turn:
            await preparing.aclose()
            dropping = self._auto_dropping(tenant, akv, turn)
            attention = Attention(len(turn.stream.tokens)) if dropping else None
            work = self._work(body, prompt, turn, constraint, attention)
            generation = Generation(self.engine, self.tokenizer, work, self.requests, arrived_s)
            try:
                generation.start()
                self.sessions.keep_prompt(turn)
                yield Completion(self, body, prompt, turn, generation, dropping)
            except Exception as error:
                self.sessions.take_back(turn)
                if isinstance(error, AkvError) and error.param == "messages":  # the engine cannot know the field
                    error.param = "messages" if isinstance(body, ChatBody) else "prompt"
                raise
            finally:
                generation.abort()

    def _prompt(self, body: ChatBody | CompletionBody) -> tuple[Prompt, MakeConstraint | None]:
        """The prompt, and what holds an answer to it to a grammar, if one has to."""
        edits = isinstance(body, ChatBody) and body.context_management and body.context_management.edits
        makes_room = bool(edits or (body.akv and body.akv.ops))  # new tokens may be forgotten before they are computed
        num_fitting = None if makes_room else self.window
        if not isinstance(body, ChatBody):
            return TextPrompt(body, self.tokenizer, self._num_vocab, num_fitting), None
        prompt = ChatPrompt(body, self.chat, num_fitting)
        return prompt, self._grammars.constraint(prompt.shape)

    def _management(self, body: ChatBody | CompletionBody, akv: types.AkvRequest) -> Management:
        num_fitting = min(self.window, self.pool_tokens) - 1  # and one for the answer
        if isinstance(body, ChatBody):
            return Management(body.messages, akv.marks or (), body.context_management, num_fitting)
        return Management((), akv.marks or (), None, num_fitting)

    def _auto_dropping(self, tenant: str, akv: types.AkvRequest, turn: Turn) -> types.AutoDrop | None:
        """How the server drops by itself behind this answer, if it does: only a session has turns to count."""
        asked = self._auto_drop(tenant) if akv.auto_drop is None else akv.auto_drop
        if akv.auto_drop and turn.session is None:
            turn.warnings.append("akv.auto_drop: without a session there are no turns to count, left aside")
        if not asked or turn.session is None:
            return None
        return types.AutoDrop() if asked is True else asked

    def _work(
        self,
        body: ChatBody | CompletionBody,
        prompt: Prompt,
        turn: Turn,
        constraint: MakeConstraint | None,
        attention: Attention | None,
    ) -> Work:
        use, written, is_thinking = prompt.shape.use, prompt.shape.written, prompt.shape.is_thinking

        def parser() -> Parser:
            is_held = use.choice == "required"
            return parser_of(written, use.functions, many=use.many, is_thinking=is_thinking, is_held=is_held)

        is_scored = isinstance(body, CompletionBody) and body.echo and body.logprobs is not None
        stop_ids = set(body.stop_token_ids or ()) | (set() if body.ignore_eos else prompt.stop_ids)
        layout = turn.stream.layout
        room = max(min(self.window - layout.next_position, self.pool_tokens - layout.num_visible), 1)
        return Work(
            salt=turn.salt,
            tokens=turn.stream.tokens,
            timeline=turn.stream.timeline,
            num_known=turn.stream.num_known,
            sampling=body.sampling,
            max_tokens=room if body.max_new_tokens is None else body.max_new_tokens,
            stops=tuple(body.stops),
            stop_token_ids=frozenset(stop_ids),
            num_choices=body.num_choices,
            num_logprobs=body.num_logprobs,
            num_prompt_logprobs=body.num_logprobs if is_scored else None,
            # What is new to a session is scored, whether or not another one had computed it before.
            scores_from=turn.stream.num_known if turn.session else None,
            attention=attention,
            parser=None if use.choice == "none" else parser,
            constraint=constraint,
            shown=self.chat.marker_ids,
        )

    def stats(self, tenant: str | None = None) -> types.CacheStats:
        """`sessions` are those of the tenant, or of all; everything else counts what all tenants did."""
        self.sessions.expire()
        sessions, num_expired = self.sessions.count(tenant), self.sessions.num_expired
        return types.CacheStats(sessions=sessions, sessions_expired=num_expired, **self.engine.stats())

    def metrics(self) -> str:
        """Everything that is counted and timed, as Prometheus reads it."""
        return exposition(self.stats(), self.requests, self.model)

    def render(self, body: types.RenderRequest) -> types.RenderReply:
        """The stream that a chat request would have, without running it."""
        self.check_model(body.model)
        stream = render(body, self.chat)
        text = self.tokenizer.decode(stream.tokens, skip_special=False)
        return types.RenderReply(tokens=stream.tokens, text=text, spans=stream.spans())

    def count(self, body: ChatBody) -> tuple[int, int]:
        """Tokens that a chat request would have on a new session: those that the model would see once its edits are
        carried out, and all."""
        self.check_model(body.model)
        stream = ChatPrompt(body, self.chat).continued(Stream()).stream
        edited, _ = self._management(body, body.akv or types.AkvRequest()).apply(stream, 0)
        return edited.layout.num_visible, len(stream.tokens)

    def tokenize(self, body: types.TokenizeRequest) -> types.TokenizeReply:
        self.check_model(body.model)
        tokens = self.tokenizer.encode(body.prompt, parse_special=body.parse_special)
        if body.add_special_tokens and self.tokenizer.bos_token_id is not None and self.tokenizer.add_bos:
            tokens = [self.tokenizer.bos_token_id, *tokens]
        return types.TokenizeReply(tokens=tokens, count=len(tokens), max_model_len=self.window)

    def detokenize(self, body: types.DetokenizeRequest) -> types.DetokenizeReply:
        self.check_model(body.model)
        return types.DetokenizeReply(prompt=self.tokenizer.decode(body.tokens, skip_special=False))


class Completion:
    """One completion under way. Ask once for `whole()` or `chunks()`."""

    def __init__(
        self,
        service: Completions,
        body: ChatBody | CompletionBody,
        prompt: Prompt,
        turn: Turn,
        generation: Generation,
        dropping: types.AutoDrop | None,
    ) -> None:
        self._service = service
        self._body = body
        self._prompt = prompt
        self._turn = turn
        self._generation = generation
        self._dropping = dropping
        self.num_visible_prompt_tokens = turn.stream.layout.num_visible
        self.is_thinking = prompt.shape.is_thinking  # the template opened the answer with the beginning of reasoning
        self._replies = replies.Replies(
            service.tokenizer,
            service.model,
            chat=isinstance(body, ChatBody),
            token_ids=bool(body.return_token_ids),
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
        )

    async def whole(self) -> replies.Body:
        """The reply body, once all is generated."""
        async for _ in self._generation.pieces():
            pass
        prompt = None
        if isinstance(self._body, CompletionBody) and self._body.echo:
            outcome = self._generation.choices[0].outcome
            tokens = self._turn.stream.tokens
            prompt = replies.Echo(self._service.tokenizer, tokens, outcome)
        more = await self._finish()
        bodies = [self._replies.choice(c, prompt, self._body.num_logprobs) for c in self._generation.choices]
        return self._replies.whole(bodies, self._usage(), more)

    async def chunks(self) -> AsyncIterator[replies.Body]:
        """The reply in chunks, as it is generated. The last one carries `akv`; `usage` comes with it if asked for."""
        body, build = self._body, self._replies
        is_chat = isinstance(body, ChatBody)
        wants_tokens = body.num_logprobs is not None or bool(body.return_token_ids)
        has_calls = self._prompt.shape.use.choice != "none"
        begun: set[int] = set()
        num_running = body.num_choices
        async for piece in self._generation.pieces():
            choice = self._generation.choices[piece.choice]
            tokens = [piece.token] if piece.token else []
            has_part = bool(piece.text or (tokens and wants_tokens))
            # one that may begin with a call is opened by what it does begin with
            opens = not has_calls or has_part or (piece.outcome is not None and not piece.deltas)
            if is_chat and opens and piece.choice not in begun:
                begun.add(piece.choice)
                yield build.chunk([build.first(piece.choice)])
            if has_part:
                offset = len(choice.text) - len(piece.text)
                yield build.chunk([build.part(piece.choice, piece.text, tokens, offset, body.num_logprobs)])
            for delta in piece.deltas:
                yield build.chunk([build.calls(piece.choice, delta, is_first=piece.choice not in begun)])
                begun.add(piece.choice)
            if piece.outcome:
                num_running -= 1
                last = build.last(choice)
                if num_running:
                    yield build.chunk([last])
                    continue
                more = await self._finish()
                if body.stream_options and body.stream_options.include_usage:
                    yield build.chunk([last])
                    yield build.chunk([], usage=self._usage(), **more)
                else:
                    yield build.chunk([last], **more)

    async def _finish(self) -> replies.Body:
        """The session goes on with the first choice, durably. Returns what the reply has besides OpenAI's fields."""
        choice = self._generation.choices[0]
        outcomes = [c.outcome for c in self._generation.choices if c.outcome]
        turn = self._turn
        after = self._prompt.answered(turn.stream, choice.token_ids, choice.text, choice.calls)
        judged = self._judged(after)
        await self._service.sessions.keep_answer(turn, judged.stream)
        layout = turn.stream.layout
        akv = types.AkvReply(
            session=turn.session.name if turn.session else None,
            stream_tokens=len(turn.stream.tokens),
            visible_tokens=layout.num_visible,
            dropped_tokens=len(turn.stream.tokens) - layout.num_visible,
            prefilled_tokens=sum(outcome.prefilled_tokens for outcome in outcomes),
            replayed_tokens=sum(outcome.replayed_tokens for outcome in outcomes),
            next_position=layout.next_position,
            spans=turn.stream.spans(),
            ops=[streams.wire_of(op) for op in turn.stream.timeline.history],
            applied_edits=turn.applied_edits + judged.applied_edits,
            warnings=self._body.warnings() + turn.warnings + judged.warnings,
        ).model_dump(mode="json")
        if not isinstance(self._body, ChatBody) or self._body.context_management is None:
            return {"akv": akv}
        # Where Anthropic's Messages API answers, so that a client of it finds what it looks for.
        return {"akv": akv, "context_management": {"applied_edits": akv["applied_edits"][: len(turn.applied_edits)]}}

    def _judged(self, after: Stream) -> auto_drop.Judged:
        """The answered stream once the server has dropped by itself, where it does."""
        attention = self._generation.attention
        if self._dropping is None or attention is None:
            return auto_drop.Judged(after, [], [])
        messages = self._body.messages if isinstance(self._body, ChatBody) else ()
        marks = (self._body.akv and self._body.akv.marks) or ()
        return auto_drop.judge(after, attention, self._dropping, messages, marks)

    def _usage(self) -> replies.Body:
        return replies.usage(self.num_visible_prompt_tokens, self._generation.choices)


def _checked_name(name: str | None) -> str | None:
    """The session of the header, held to the same length as in a body. An empty header is none."""
    if name and len(name) > 200:
        raise AkvError("invalid_request", "X-AKV-Session: at most 200 characters", param="X-AKV-Session")
    return name or None
