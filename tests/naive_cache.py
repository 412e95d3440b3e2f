"""A cache driven at random, its KV simulated, beside a naive model of what every token saw.

Owns the model (`Truth`) and the driver (`World`). The model knows no run, signature, edge or page: it goes token by
token through a whole stream with its history. The driver knows the cache's interface alone, does with it what a
scheduler does and more (any order, any chunk, an abort at any point), and after each step compares every slot that
somebody may read with the model.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest

from akv_server.errors import AkvError
from akv_server.planning import Span
from tests.test_ops import Naive

MAX_TOKENS = 40
SALTS = ("a", "b")


class Written(NamedTuple):
    """What a slot holds."""

    salt: str
    number: int  # of all that its token saw
    shift: int  # that its key is rotated by
    is_turned: bool = False  # once more since it was written


class Story:
    """One stream and its history: what each token saw when it was computed, and what is visible at each length."""

    def __init__(self, tokens: bytes, views: list[Naive], numbers: dict[Any, int]) -> None:
        self.views = views  # [num_tokens + 1]: under views[i] token i is computed
        self.kv: list[tuple[int, int] | None] = []  # (number, shift) of each token; None: forgotten, never computed
        for i, token in enumerate(tokens):
            view = views[i]
            if view.state[i] == "f":
                self.kv.append(None)
                continue
            assert view.state[i] == "v"
            seen = tuple((self.kv[j], j + view.shift[j]) for j in range(i) if view.state[j] == "v")
            self.kv.append((numbers.setdefault((token, i + view.shift[i], seen), len(numbers)), view.shift[i]))

    def sees(self, num_tokens: int) -> list[int]:
        """Indexes that are visible to token `num_tokens`, itself not among them."""
        return [j for j in range(num_tokens) if self.views[num_tokens].state[j] == "v"]


class Truth:
    """From whole symbol sequences, tokens and raw ops, to stories."""

    def __init__(self) -> None:
        self._stories: dict[tuple[bytes, tuple], Story] = {}
        self._views: dict[tuple, Naive | None] = {(): Naive()}
        self._numbers: dict[Any, int] = {}
        self._meanings: dict[Any, int] = {}

    def meaning(self, story: Story, num_tokens: int) -> tuple[int, ...]:
        """Equal for streams whose first tokens were computed under equal layouts, in whatever words."""
        found: list[int] = []
        for i in range(num_tokens):
            view = story.views[i]
            if not i or view is not story.views[i - 1]:
                number = self._meanings.setdefault((tuple(view.state), tuple(view.shift)), len(self._meanings))
            found.append(number)
        return tuple(found)

    def view(self, history: tuple) -> Naive | None:
        """The layout after all ops of a history; None where one of them cannot hold."""
        if history not in self._views:
            before = self.view(history[:-1])
            self._views[history] = before and before.apply(history[-1])
        return self._views[history]

    def story(self, tokens: bytes, history: tuple) -> Story:
        if (tokens, history) not in self._stories:
            if len(self._stories) > 2000:
                self._stories.clear()
            views: list[Naive] = []
            num_ops = 0
            for i in range(len(tokens) + 1):
                changes = sum(op.at == i for op in history[num_ops:])
                num_ops += changes
                view = views[-1] if views and not changes else self.view(history[:num_ops])
                assert view is not None
                views.append(view)
            assert num_ops == len(history)
            self._stories[tokens, history] = Story(tokens, views, self._numbers)
        return self._stories[tokens, history]


@dataclass
class Stream:
    """What a client has: text that only grows, and ops."""

    salt: str
    tokens: list[int]
    history: tuple = ()


@dataclass(eq=False)
class Run:
    """A lease and what is to be done with it."""

    lease: Any
    plan: Any
    stream: Stream
    todo: list[Any]
    outputs: str  # that the plan wanted
    opened: int  # evictions before it
    pending: list[tuple[Any, int, int]] = field(default_factory=list)  # reserved, not yet computed
    before: tuple[int, Any] = (-1, None)  # version and slots one step ago

    @property
    def tokens(self) -> bytes:
        return bytes(self.lease.tokens[: self.lease.num_tokens].tolist())

    @property
    def unwritten(self) -> set[int]:
        return {i for span, start, end in self.pending if not span.resident for i in range(start, end)}


class Tier:
    """Blocks by key, as the cache sees a tier; and what it holds under each."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.is_faster = True
        self.blocks: dict[bytes, list[tuple[Written, int]]] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self.blocks

    def store(self, key: bytes, slots: Any, written: Any) -> None:
        assert key not in self.blocks
        kv = self._world.kv
        self.blocks[key] = [(kv[slot], shift) for slot, shift in zip(slots.tolist(), written.tolist(), strict=True)]
        self._world.happened["stored"] += 1


class World:
    """One cache and everybody who uses it."""

    def __init__(
        self, seed: int, ops: ModuleType, cache: ModuleType, *, num_pages: int, page_size: int, self_check: bool = True
    ) -> None:
        self.random = random.Random(seed)
        self.ops = ops
        self.page_size, self.self_check = page_size, self_check
        self.is_calm = self.random.random() < 0.4  # few streams have anything in common, and there is room
        self.num_pages = num_pages = 2 * num_pages if self.is_calm else num_pages
        self.tier = Tier(self)
        self.cache = cache.Cache(
            num_pages, page_size, self._copy_page, compact_above=self.random.choice([0, 0.3]), tier=self.tier
        )
        self.block_names: dict[Any, bytes] = {}  # what a block is, and the key it goes by
        self.truth = Truth()
        self.kv: dict[int, Written] = {}
        self.streams: list[Stream] = [self._new_stream() for _ in range(3)]
        self.runs: list[Run] = []
        self.num_evictions = 0
        self.happened: Counter[str] = Counter()
        self._take, self.cache.pool.take = self.cache.pool.take, self._take_pages
        self._evict, self.cache.tree.evict = self.cache.tree.evict, self._evict_pages

    def step(self) -> None:
        """Anything that anybody could do next, and then everything is compared."""
        actions = {
            self._advance: 50,
            self._open: 14,
            self._write_text: 8,
            self._edit: 16,
            self._fork: 1 if self.is_calm else 8,
            self._close_some: 5,
            self._evict_some: 2 if self.is_calm else 4,
            self._compact: 8,
            self._thin_out: 6,
            self._disturb_tier: 2,
        }
        self.random.choices(list(actions), list(actions.values()))[0]()
        self.check()

    def finish(self) -> None:
        """All leave; not a page may stay behind."""
        while self.runs:
            self._close(self.runs[0])
            self.check()
        self.cache.evict_all()
        self.cache.check()
        assert self.cache.pool.num_free == self.num_pages
        assert self.cache.tree.num_edges == 0

    # The simulated device ------------------------------------------------------------------------------------------

    def _copy_page(self, source: int, target: int, num_slots: int) -> None:
        self.happened["copied"] += 1
        for offset in range(num_slots):
            written = self.kv.get(source * self.page_size + offset)
            if written:
                self._write(target * self.page_size + offset, written)

    def _write(self, slot: int, written: Written) -> None:
        assert slot not in self.kv, f"slot {slot} is written twice"
        self.kv[slot] = written

    def _wipe(self, page: int) -> None:
        for slot in range(page * self.page_size, (page + 1) * self.page_size):
            self.kv.pop(slot, None)

    def _take_pages(self, num_pages: int) -> list[int] | None:
        pages = self._take(num_pages)
        for page in pages or ():
            for run in self.runs:
                assert page not in run.lease.slots // self.page_size, f"page {page} is given out while leased"
            for edge in self.cache.tree.edges():
                assert page not in edge.slots // self.page_size, f"page {page} is given out while in the tree"
            self._wipe(page)
        return pages

    def _evict_pages(self, num_pages: int) -> int:
        self.num_evictions += 1
        return self._evict(num_pages)

    # What is compared ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        if self.self_check:
            self.cache.check()
        pool = self.cache.pool
        for page in range(self.num_pages):
            if not pool.leases[page] and not pool.edges[page]:
                self._wipe(page)
        reserved: list[int] = []
        for run in self.runs:
            lease = run.lease
            slots = lease.slots[: lease.num_tokens].copy()
            written = lease.written[: lease.num_tokens].tolist()
            story, unwritten = self._story(run), run.unwritten
            for i in np.flatnonzero(slots >= 0).tolist():
                if i in unwritten:
                    assert int(slots[i]) not in self.kv
                    reserved.append(int(slots[i]))
                else:
                    self._compare(int(slots[i]), written[i], lease.salt, story, i)
            version, before = run.before
            if version == lease.version:
                stayed = (before >= 0) & (slots[: len(before)] >= 0)
                assert (before[stayed] == slots[: len(before)][stayed]).all(), "a token moved unnoticed"
            run.before = (lease.version, slots)
        assert len(reserved) == len(set(reserved)), "a slot has two writers"
        self._probe()

    def _compare(self, slot: int, written: int, salt: str, story: Story, index: int) -> None:
        truth = story.kv[index]
        assert truth is not None, f"forgotten token {index} has KV"
        assert slot in self.kv, f"token {index}: slot {slot} is empty"
        found = self.kv[slot]
        assert found[:2] == (salt, truth[0]), f"token {index}: slot {slot} was computed otherwise"
        assert found.is_turned or found.shift == truth[1], f"token {index}: written for {found.shift}, not {truth[1]}"
        assert written == found.shift, f"token {index}: its key stands at shift {found.shift}, not {written}"

    def _probe(self) -> None:
        """Plans some stream, or one that nearly is it, without running it."""
        stream = self.random.choice(self.streams)
        history = list(stream.history)
        if history and self.random.random() < 0.3:
            history.pop(self.random.randrange(len(history)))
        tokens = stream.tokens[: self.random.randint(1, len(stream.tokens))]
        salt = stream.salt if self.random.random() < 0.9 else self.random.choice(SALTS)
        history = [op for op in history if op.at <= len(tokens)]
        if self.truth.view(tuple(history)) is not None:
            self._plan(Stream(salt, tokens, tuple(history)), self.random.choice(["last", "none", "all"]))

    def _story(self, run: Run) -> Story:
        return self.truth.story(run.tokens, run.stream.history)

    def _plan(self, stream: Stream, outputs: str) -> Any:
        """A plan, compared with the naive closure of what is needed; None where all is forgotten."""
        n = len(stream.tokens)
        story = self.truth.story(bytes(stream.tokens), stream.history)
        sources = [i for i in range(n) if story.kv[i] is not None]
        timeline = self.ops.Timeline(stream.history)
        try:
            plan = self.cache.plan(stream.salt, np.array(stream.tokens, np.int32), timeline, outputs=outputs)
        except AkvError as error:
            if error.code == "invalid_request" and not sources and outputs != "none":
                return None
            raise
        resident = set()
        for i in np.flatnonzero(plan.match.slots >= 0).tolist():
            self._compare(int(plan.match.slots[i]), int(plan.match.written[i]), stream.salt, story, i)
            resident.add(i)
        wanted = set() if outputs == "none" else {sources[-1]}
        if outputs == "all":
            wanted |= set(sources) - resident
        loadable = self._loadable(stream, story, plan, resident) - wanted
        stack, needed = sorted(wanted | set(story.sees(n)) - resident), set()
        while stack:
            i = stack.pop()
            if i not in needed:
                needed.add(i)
                if i not in loadable:
                    stack += set(story.sees(i)) - resident
        assert {(i, i in resident, i in loadable) for i in needed} == {
            (i, span.resident, span.loads) for span in plan.todo for i in range(span.start, span.end)
        }, "the plan computes other tokens than are needed"
        assert plan.num_computed == len(needed - resident - loadable)
        assert plan.num_loaded == len(needed & loadable)
        assert plan.num_forgotten == sum(s == "f" for s in story.views[n].state[:n])
        return plan

    def _loadable(self, stream: Stream, story: Story, plan: Any, resident: set[int]) -> set[int]:
        """Tokens that the tier can bring back. A block has one key in whatever words its history is told, and a key
        stands for one block."""
        size, loadable = self.page_size, set()
        if not self.tier.is_faster:
            assert plan.keys == {}
            return loadable
        for block in range(len(stream.tokens) // size):
            inside = set(range(block * size, (block + 1) * size)) - resident
            end = (block + 1) * size
            name = (stream.salt, bytes(stream.tokens[:end]), self.truth.meaning(story, end))
            if key := plan.keys.get(block):
                assert inside
                assert self.block_names.setdefault(name, key) == key, "a block goes by two keys"
                for (written, shift), truth in zip(self.tier.blocks[key], story.kv[end - size : end], strict=True):
                    assert truth is None or written[:2] == (stream.salt, truth[0]), "another block goes by this key"
                    assert truth is None or written.shift == shift, "a block is kept with another shift"
                loadable |= inside
            elif inside:
                assert self.block_names.get(name) not in self.tier.blocks, "a block is not found"
        return loadable

    def _is_all_there(self, run: Run) -> None:
        """A stream that was just computed and published is found whole, whatever words its history is told in."""
        lease = run.lease
        outputs = ["none"]
        if run.outputs != "none" and self.num_evictions == run.opened:
            outputs.append("last")  # what only the last token's phase saw is there, too
        for history in (run.stream.history, self._in_other_words(run.stream.history)):
            stream = Stream(lease.salt, list(run.tokens), history)
            for wanted in outputs:
                plan = self._plan(stream, wanted)
                if plan is not None:
                    assert plan.num_computed == 0, "what was just published is not found"
                    self.happened["found again"] += 1
        if history != run.stream.history:
            self.happened["found in other words"] += 1

    def _in_other_words(self, history: tuple) -> tuple:
        """An equivalent history written with other raw ops."""
        told: list[Any] = []
        for op in history:
            at, view = op.at, self.truth.view(tuple(told))
            assert view is not None
            if self.random.random() < 0.4:
                spot = self.random.randint(0, at)
                told.append(self.ops.Op("drop", at, spot, spot, repos=True))
            if op.mode == "forget" or self.random.random() < 0.2:
                told.append(op)
            elif op.kind == "repos":
                told += [self.ops.Op("repos", at, op.start, op.end, op.delta - 1)]
                told += [self.ops.Op("repos", at, op.start, op.end, 1)]
            else:
                cut = self.random.randint(op.start, op.end)
                parts = [self.ops.Op(op.kind, at, op.start, cut), self.ops.Op(op.kind, at, cut, op.end)]
                state = view.state[op.start : op.end]
                if op.kind == "drop":
                    move = [self.ops.Op("repos", at, op.end, None, -state.count("v"))]
                    told += self.random.sample(parts, 2) + (move if op.repos else [])
                else:
                    move = [self.ops.Op("repos", at, op.end, None, state.count("d"))]
                    told += (move if op.repos else []) + parts
            if self.truth.view(tuple(told)) is None:
                return history  # the same end by a way that is not open
        return tuple(told)

    # What clients do -----------------------------------------------------------------------------------------------

    def _some_tokens(self, most: int) -> list[int]:
        return self.random.choices((0, 1), k=self.random.randint(1, most))

    def _new_stream(self) -> Stream:
        return Stream(self.random.choice(SALTS), self._some_tokens(12))

    def _some_stream(self) -> Stream:
        """Any, but rather the one that came last, so that much happens to one stream."""
        return self.streams[-1] if self.random.random() < 0.4 else self.random.choice(self.streams)

    def _write_text(self) -> None:
        stream = self._some_stream()
        if len(stream.tokens) + 6 <= MAX_TOKENS:
            stream.tokens = stream.tokens + self._some_tokens(6)
        else:
            self.streams[self.streams.index(stream)] = self._new_stream()

    def _edit(self) -> None:
        """An op, or the refusal of one."""
        stream = self._some_stream()
        n = len(stream.tokens)
        start = self.random.randint(0, n)
        end = self.random.randint(start, self.random.choice([min(n, start + 2), n]))
        repos = self.random.random() < 0.6
        kind = self.random.choice(["drop", "drop", "drop", "repos", "restore", "restore", "forget"])
        if kind == "forget":
            op = self.ops.Op("drop", start, start, end, 0, repos, "forget")
        elif kind == "restore" and self.random.random() < 0.5:
            op = self.ops.Op(kind, n, 0, n, 0, repos)
        elif kind == "repos":
            op = self.ops.Op("repos", n, start, self.random.choice([None, end]), self.random.randint(-6, 6))
        else:
            op = self.ops.Op(kind, n, start, end, 0, repos)
        history = tuple(sorted((*stream.history, op), key=lambda op: op.at))
        if self.truth.view(history) is None:
            with pytest.raises(AkvError, match="would get position"):
                self.ops.Timeline(history)
        elif len(history) <= 10:
            self.ops.Timeline(history)
            stream.history = history
            self.happened[kind] += 1

    def _thin_out(self) -> None:
        """Many small drops, which leave a little to see in every page, for a while or for good; once more, perhaps, of
        what was gathered."""
        stream = self._some_stream()
        n = len(stream.tokens)
        if n < 12 or len(stream.history) > 3:
            return
        for _ in range(self.random.randint(1, 2)):
            width, repos = self.random.randint(1, 3), self.random.random() < 0.8
            starts = range(self.random.randint(0, 3), n - 4, 4)
            stream.history += tuple(self.ops.Op("drop", n, start, start + width, 0, repos) for start in starts)
            before = list(self.runs)
            self._open(stream)
            for run in [run for run in self.runs if run not in before]:
                while run in self.runs and (run.pending or run.todo):
                    self._go_on(run)
            for _ in range(self.random.randint(0, 3)):
                self._compact()

    def _fork(self) -> None:
        """A second stream with the beginning of another, under its history or less of it, with another salt, or with
        another first token."""
        stream = self.random.choice(self.streams)
        cut = self.random.choice([len(stream.tokens), self.random.randint(1, len(stream.tokens))])
        history = tuple(op for op in stream.history if op.at <= cut)
        fork = Stream(stream.salt, stream.tokens[:cut], history)
        if self.random.random() < 0.5:
            fork.history = history[: self.random.randint(0, len(history))]
        if self.random.random() < 0.1:
            fork.salt = self.random.choice(SALTS)
        if self.random.random() < 0.15:
            fork.tokens = [1 - fork.tokens[0], *fork.tokens[1:]]
        if len(self.streams) >= 6:
            self.streams.remove(self.random.choice(self.streams))
        self.streams.append(fork)
        for go_on in (self._edit, self._write_text, self._open):
            if self.random.random() < 0.7:
                go_on()

    # What a scheduler does -----------------------------------------------------------------------------------------

    def _open(self, stream: Stream | None = None) -> None:
        stream = stream or self._some_stream()
        outputs = self.random.choice(["last", "last", "last", "none", "all"])
        plan = self._plan(stream, outputs)
        if len(self.runs) >= 5 or plan is None or not self.cache.fits_alone(plan):
            return
        has_room = self.cache.room_for(plan)
        copy = Stream(stream.salt, stream.tokens, stream.history)
        run = Run(self.cache.open(plan), plan, copy, list(plan.todo), outputs, self.num_evictions)
        self.runs.append(run)
        self.happened["hit"] += plan.match.length > 0
        computed = plan.computed_indexes
        self.happened["hole computed"] += len(computed) > 0 and int(computed[0]) < plan.match.length
        first = next((span for span in run.todo if not span.resident), None)
        if has_room and first is not None and first is run.todo[0]:
            assert self._reserve(run, first, first.start, first.end), "there was said to be room"
            run.pending.append((first, first.start, first.end))
        if self.random.random() < 0.1:
            self.cache.evict_all()  # the lease alone keeps what it found

    def _reserve(self, run: Run, span: Any, start: int, end: int) -> bool:
        lease = run.lease
        shift = span.layout.position(start) - start
        story = self._story(run)
        for i in range(start, end):
            assert story.kv[i] is not None and story.kv[i][1] == shift, "a span with two shifts"
        before = lease.slots.copy()
        if self.cache.reserve(lease, start, end, shift):
            return True
        assert (lease.slots == before).all()
        assert self.cache.pool.num_evictable == 0, "there was something to evict"
        self.happened["no room"] += 1
        return False

    def _advance(self) -> None:
        """Some sequence comes a bit further: its next chunks are reserved, or computed, or it gets a token."""
        if self.runs:
            self._go_on(self.random.choice(self.runs))

    def _go_on(self, run: Run) -> None:
        if run.pending:
            self._commit(run)
            return
        if not run.todo and not self._generate(run):
            self._close(run)
            return
        budget = self.random.randint(1, 10)
        for span in run.todo:
            end = min(span.end, span.start + budget)
            if budget == 0 or not (span.resident or self._reserve(run, span, span.start, end)):
                break
            run.pending.append((span, span.start, end))
            budget -= end - span.start
        if not run.pending:
            if self.random.random() < 0.7:
                self._close(run)  # preempted
        elif self.random.random() < 0.6:
            self._commit(run)

    def _generate(self, run: Run) -> bool:
        lease, n = run.lease, run.lease.num_tokens
        if n >= MAX_TOKENS or self._story(run).views[n].state[n] == "f" or self.random.random() < 0.15:
            return False
        token = self.random.choice((0, 1))
        self.cache.append(lease, token)
        for stream in self.streams:
            if (stream.salt, stream.tokens, stream.history) == (lease.salt, run.stream.tokens, run.stream.history):
                stream.tokens = [*stream.tokens, token]
        run.stream.tokens = [*run.stream.tokens, token]
        run.todo.append(Span(n, n + 1, lease.timeline.layout_at(n), run.plan.num_phases, False))
        return True

    def _commit(self, run: Run) -> None:
        """Computes what is pending from what is really in the slots, or loads it, then publishes and releases."""
        lease, story = run.lease, self._story(run)
        done, is_lost = [], False
        for span, start, end in run.pending:
            if span.loads:
                came = self._load(run, start, end)
                is_lost = came < end
                done += [(span, came)] if came > start else []
                if is_lost:
                    break
                continue
            for i in range(start, end):
                for j in [*story.sees(i), *([i] if span.resident else [])]:
                    assert lease.slots[j] >= 0, f"token {j}, seen by token {i}, is not held"
                    self._compare(int(lease.slots[j]), int(lease.written[j]), lease.salt, story, j)
                if not span.resident:
                    truth = story.kv[i]
                    assert truth is not None
                    self._write(int(lease.slots[i]), Written(lease.salt, *truth))
            done.append((span, end))
        publishes = is_lost or self.random.random() < 0.85
        run.pending = []
        version = lease.version
        for span, end in done:
            if end < span.end:
                run.todo[0] = replace(span, start=end)
            else:
                run.todo.pop(0)
            if publishes:
                self.cache.publish(lease, end)
                self.cache.release(lease, run.todo[0].phase if run.todo else run.plan.num_phases)
                self._is_released(run, story)
        self.happened["adopted"] += lease.version > version
        if is_lost:  # it would be planned anew
            self.happened["load failed"] += 1
            self.runs.remove(run)
            self.cache.close(lease)
        elif publishes and not run.todo and end == lease.num_tokens:
            self._is_all_there(run)

    def _load(self, run: Run, start: int, end: int) -> int:
        """Copies what the tier has, as long as it has it; returns the index it came to."""
        lease = run.lease
        for i in range(start, end):
            block = self.tier.blocks.get(run.plan.keys[i // self.page_size])
            if block is None:
                return i
            written, lease.written[i] = block[i % self.page_size]
            self._write(int(lease.slots[i]), written)
            self.happened["loaded"] += 1
        return end

    def _is_released(self, run: Run, story: Story) -> None:
        """Nothing is held that neither the end nor a span still to be run sees."""
        lease = run.lease
        needed = set(story.sees(lease.num_tokens)) | {lease.num_tokens - 1}
        for span in run.todo:
            needed |= set(story.sees(span.end - 1)) | set(range(span.start, span.end))
        prompt = lease.slots[: len(lease.last_need)]
        assert set(np.flatnonzero(prompt >= 0).tolist()) <= needed, "pages are held that nobody will read"

    def _close_some(self) -> None:
        if self.runs:
            self._close(self.random.choice(self.runs))

    def _close(self, run: Run) -> None:
        """Ends a sequence wherever it is, with or without a last word to the tree."""
        if self.random.random() < 0.6:
            self.cache.publish(run.lease, run.todo[0].start if run.todo else run.lease.num_tokens)
            if not run.todo:
                self._is_all_there(run)
        self.runs.remove(run)
        self.cache.close(run.lease)

    def _evict_some(self) -> None:
        held = [run.lease.slots.copy() for run in self.runs]
        pool = self.cache.pool
        free, evictable = pool.num_free, pool.num_evictable
        if self.random.random() < 0.1:
            assert self.cache.evict_all() == evictable == pool.num_free - free
        else:
            num_pages = self.random.randint(1, 4)
            freed = self.cache.tree.evict(num_pages)
            assert freed == pool.num_free - free >= min(num_pages, evictable)
        for before, run in zip(held, self.runs, strict=True):
            assert (run.lease.slots == before).all()
        self.happened["evicted"] += pool.num_free > free

    def _compact(self) -> None:
        """A few pieces of compaction, as between steps."""
        for _ in range(self.random.randint(1, 5)):
            max_tokens = self.random.randint(2, 6) * self.page_size
            found = self.cache.plan_compaction(max_tokens)
            if found is None:
                self.cache.settle()
                return
            if any(run.pending and found.owner is run.lease for run in self.runs):
                return  # it has slots that nothing was written to yet
            assert 0 < len(found.slots) <= max_tokens
            assert -(-len(found.slots) // self.page_size) == found.num_new < found.num_pages
            self.cache.compact(found, self._move)
            for edge in self.cache.tree.edges():
                assert not set(edge.slots.tolist()) & set(found.slots.tolist()), "the tree was not told of a move"
            self.happened["compacted"] += 1

    def _move(self, sources: Any, targets: Any, deltas: Any) -> None:
        for source, target, delta in zip(sources.tolist(), targets.tolist(), deltas.tolist(), strict=True):
            written = self.kv[source]
            assert not (delta and written.is_turned), "a key is turned twice"
            self.happened["turned"] += delta != 0
            turned = written._replace(shift=written.shift + delta, is_turned=written.is_turned or delta != 0)
            self._write(target, turned)

    def _disturb_tier(self) -> None:
        """It loses blocks, or is slow for a while."""
        for key in self.random.sample(sorted(self.tier.blocks), len(self.tier.blocks) // 3):
            del self.tier.blocks[key]
        self.tier.is_faster = self.random.random() < 0.8


def drive(seed: int, num_steps: int, ops: ModuleType, cache: ModuleType, *, self_check: bool = True) -> Counter[str]:
    """Runs one world from its beginning to its end; raises where the cache is wrong. Returns what happened in it."""
    page_size = (2, 4, 1, 4)[seed % 4]
    num_pages = random.Random(seed).randint(10, 24)
    world = World(seed, ops, cache, num_pages=num_pages, page_size=page_size, self_check=self_check)
    for _ in range(num_steps):
        world.step()
    world.finish()
    return world.happened
