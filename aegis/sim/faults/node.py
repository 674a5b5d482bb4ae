"""One incarnation of an instance: its core, and a device made of dictionaries that performs the core's effects.

Memory is modelled so that a broken rule shows: a copy reads its source and writes its target at its very end, a page's
content is lost when another owner maps it, only granted pages are mapped and only wiped ones given back, an engine
computes the next token from what it finds in the KV blocks, and a step runs only on weights that are there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from aegis.core.block_runs import BlockCopy, block_ids
from aegis.core.effects import (
    AbandonLoad,
    AcceptPages,
    Bind,
    CopyBlocks,
    DecodeRow,
    Effect,
    EndRun,
    LoadWeights,
    MapKv,
    MapWeights,
    MoveBlocks,
    RevokePages,
    RunDecode,
    RunPrefill,
    Send,
    StreamName,
    Track,
    Unbind,
    UnmapKv,
    UnmapWeights,
    Untrack,
    WipePages,
)
from aegis.core.events import InstanceEvent, LoadFailed, Progress, StepFailed, Stepped, Tick
from aegis.core.ids import BlockId, InstanceId, ModelId, PageRun, RequestId, SlabId
from aegis.core.messages import FromInstance, ToInstance
from aegis.core.model import KvShape
from aegis.core.request import EventHandle, Token
from aegis.sim.faults.decode_run import DecodeRun
from aegis.sim.faults.pretended import BLOCK_TOKENS, next_token
from aegis.sim.faults.state import Action, Content, FaultWorldState, slab_of
from decode.core import DecodeCore
from memory.balloon import OWING_NS
from prefill.core import PrefillCore


@dataclass(slots=True)
class _Copy:
    event: EventHandle
    after: EventHandle | None
    duration_ns: int
    finish: Action
    unreadable: ModelId | None = None  # this model's image, which it is a load of


Pages = tuple[int, ...]


class Node:
    """`hear` receives what the instance says, `moved` is told when a shared word has moved.

    A process that is stopped (SIGSTOP) does nothing meanwhile, nor do its copies; then it goes on where it was. Of one
    that is dead nothing more comes.
    """

    def __init__(
        self,
        ground: FaultWorldState,
        instance: InstanceId,
        core: PrefillCore | DecodeCore,
        words: Mapping[StreamName, int],
        *,
        hear: Callable[[Node, FromInstance], None],
        moved: Action,
        parted: bool,
        slowness: int,
    ) -> None:
        self.instance = instance
        self.core = core
        self.words = words
        self.alive = True
        self.slowness = slowness  # of its copies
        self.bound: set[ModelId] = set()
        self.tracked: set[RequestId] = set()
        self._ground = ground
        self._hear = hear
        self._moved = moved
        self._parted = parted  # proxy and node are
        self._kv: dict[tuple[KvShape, BlockId], Content] = {}
        self._slab_pages: dict[SlabId, Pages] = {}
        self._weight_pages: dict[ModelId, Pages] = {}
        self._loaded: dict[int, ModelId] = {}
        self._queues: dict[StreamName, list[_Copy]] = {name: [] for name in StreamName}
        self._copying: dict[StreamName, bool] = dict.fromkeys(StreamName, False)
        self._inbox: list[InstanceEvent] = []
        self._stepping = False
        self._heard = 0  # events so far, those of a run under way excepted
        self._stopped_until_ns = 0

    def stop(self, for_ns: int) -> None:
        if self._ground.now_ns >= self._stopped_until_ns:
            self._stopped_until_ns = self._ground.now_ns + for_ns

    def receive(self, message: ToInstance) -> None:
        self._when_running(lambda: self.feed(message))

    def after(self, delay_ns: int, action: Action) -> None:
        """In this process."""
        self._ground.after(delay_ns, lambda: self._when_running(action))

    def _when_running(self, action: Action) -> None:
        if not self.alive:
            return
        left_ns = self._stopped_until_ns - self._ground.now_ns
        if left_ns > 0:
            self._ground.after(left_ns, lambda: self._when_running(action))
        else:
            action()

    def feed(self, event: InstanceEvent) -> None:
        """A stepping instance looks at messages when its step is over, as a real one does."""
        if self._stepping and not isinstance(event, Stepped | StepFailed):
            self._inbox.append(event)
            return
        events = [event]
        if isinstance(event, Stepped | StepFailed):
            self._stepping = False
            events, self._inbox = [event, *self._inbox], []
        while events and not self._stepping:
            self._perform(self.core.on(events.pop(0), self._ground.now_ns))
            self.core.ledger.check()
        self._inbox += events
        self._heard += 1
        if self.core.ledger.balloon.owes and not self._stepping:
            self.after(OWING_NS, partial(self._tick, self._heard))

    def _tick(self, heard: int) -> None:
        """Sends a tick to a core that owes pages and has got no other event since."""
        if heard == self._heard:
            self.feed(Tick())

    def listen(self) -> bool:
        """Tells the core between two steps what is new; whether that ends the run."""
        while self._inbox:
            effects = self.core.on(self._inbox.pop(0), self._ground.now_ns)
            self._perform(effects)
            self.core.ledger.check()
            if EndRun() in effects:
                return True
        return False

    def say(self, message: FromInstance) -> None:
        self._note(message)
        self._hear(self, message)

    def pump(self) -> None:
        """Starts the copies whose events have passed."""
        for stream in StreamName:
            self._pump(stream)

    # --- effects ------------------------------------------------------------------------------------------------------

    def _perform(self, effects: Sequence[Effect]) -> None:
        assert not any(isinstance(effect, RunPrefill | RunDecode) for effect in effects[:-1]), "a step is not the last"
        for effect in effects:
            match effect:
                case EndRun():
                    pass
                case Send(message):
                    self.say(message)
                case RunPrefill() | RunDecode():
                    self._note(effect)
                    self._step(effect)
                case Track(job, _):
                    self.tracked.add(job.request)
                case Untrack(request):
                    self.tracked.discard(request)
                case Bind(spec):
                    assert spec.model not in self.bound
                    self.bound.add(spec.model)
                case Unbind(model):
                    assert model not in self._weight_pages, f"{model} is unbound while it is mapped"
                    self.bound.remove(model)
                case _:
                    self._memory(effect)

    def _note(self, what: object) -> None:
        self._ground.note(f"{self.instance} {what}")

    def _step(self, effect: RunPrefill | RunDecode) -> None:
        assert not self._stepping
        self._stepping = True
        fails = self._ground.draw.uniform() < self._ground.failing_share
        if isinstance(effect, RunPrefill):
            self.tracked.add(effect.job.request)
        if isinstance(effect, RunDecode):
            DecodeRun(self, self._ground, effect, fails=fails).step()
            return
        stepped = self._prefill(effect)
        answer = StepFailed("drawn") if fails else stepped
        self.after(stepped.duration_ns, lambda: self.feed(answer))

    def _memory(self, effect: Effect) -> None:
        draw = self._ground.draw
        match effect:
            case MapKv(slab, runs):
                self._slab_pages[slab] = self._claim(runs)
            case UnmapKv(slab):
                del self._slab_pages[slab]
                for key in [key for key in self._kv if slab_of(*key) == slab]:
                    del self._kv[key]
            case MapWeights(model, runs):
                self._weight_pages[model] = self._claim(runs)
            case UnmapWeights(model):
                del self._weight_pages[model]
            case LoadWeights():
                self._submit(effect.stream, self._load(effect))
            case AbandonLoad(event):
                self._abandon(event)
            case MoveBlocks(shape, copies):
                assert not self._stepping
                for source, target in _pairs(copies):
                    self._mapped(shape, source)
                    self._mapped(shape, target)
                    self._kv[shape, target] = list(self._kv.get((shape, source), []))
            case AcceptPages(runs):
                self._accept(_pages(runs))
            case WipePages(runs, event):
                self._submit(StreamName.SCRUB, _Copy(event, None, 50_000, lambda: self._wipe(_pages(runs))))
            case RevokePages(runs):
                self._revoke(_pages(runs))
            case CopyBlocks():
                duration_ns = 20_000 * len(_pairs(effect.copies)) + draw.below(3_000_000)
                finish = partial(self._copy, effect, self._leases(effect))
                self._submit(effect.stream, _Copy(effect.event, effect.after, duration_ns, finish))

    def _claim(self, runs: tuple[PageRun, ...]) -> Pages:
        """Mapped at one place at a time; whatever was in the pages is gone."""
        pages = _pages(runs)
        assert not self._mapped_pages() & set(pages), "a page is mapped twice"
        assert all(self._ground.pages.get(page) == self.instance for page in pages), "a page that was not granted"
        self._ground.dirty.update(pages)
        for page in pages:
            self._loaded.pop(page, None)
        return pages

    def _mapped_pages(self) -> set[int]:
        return {page for held in (self._slab_pages, self._weight_pages) for run in held.values() for page in run}

    def _accept(self, pages: Pages) -> None:
        assert not self._ground.dirty & set(pages), "another one's bytes come into reach"
        assert not self._ground.pages.keys() & set(pages), "a page has two owners"
        self._ground.pages.update(dict.fromkeys(pages, self.instance))

    def _wipe(self, pages: Pages) -> None:
        assert not self._mapped_pages() & set(pages), "wiped while it is mapped"
        self._ground.dirty.difference_update(pages)

    def _revoke(self, pages: Pages) -> None:
        assert not self._mapped_pages() & set(pages) and not self._ground.dirty & set(pages)
        for page in pages:
            del self._ground.pages[page]

    def _abandon(self, event: EventHandle) -> None:
        for copy in (copy for queue in self._queues.values() for copy in queue):
            if copy.event == event:
                copy.finish, copy.unreadable = lambda: None, None

    # --- streams ------------------------------------------------------------------------------------------------------

    def _submit(self, stream: StreamName, copy: _Copy) -> None:
        self._queues[stream].append(copy)
        self._pump(stream)

    def _pump(self, stream: StreamName) -> None:
        queue = self._queues[stream]
        if not self.alive or self._copying[stream] or not queue:
            return
        copy = queue[0]
        if copy.after is None or self._ground.passed(copy.after):
            self._copying[stream] = True
            duration_ns = copy.duration_ns * self.slowness
            if copy.unreadable is not None:
                self.after(duration_ns // 2, lambda: self._unreadable(copy))
            self.after(duration_ns, lambda: self._completed(stream, copy))

    def _unreadable(self, copy: _Copy) -> None:
        if copy.unreadable is not None:
            copy.finish = lambda: None
            self._note(f"cannot read {copy.unreadable}")
            self.feed(LoadFailed(copy.unreadable, "its image is damaged"))

    def _completed(self, stream: StreamName, copy: _Copy) -> None:
        copy.finish()
        self._queues[stream].pop(0)
        self._copying[stream] = False
        self._ground.signal(copy.event)
        self._moved()
        self.feed(Progress(stream, copy.event.value))

    def _load(self, effect: LoadWeights) -> _Copy:
        """From the model cache or, where the image is not there, from disk."""
        draw, model = self._ground.draw, effect.model
        pages, extents = self._weight_pages[model], _pages(effect.cached)

        def finish() -> None:
            assert self._weight_pages.get(model) == pages, f"{model} was unmapped while it was loading"
            found = {self._ground.images.get(extent) for extent in extents}
            assert found <= {model}, f"{model} was loaded from where {found} is cached"
            self._loaded.update(dict.fromkeys(pages, model))

        share = self._ground.unreadable_share
        unreadable = model if share and not extents and draw.uniform() < share else None
        return _Copy(effect.event, None, 200_000 * len(pages) + draw.below(500_000), finish, unreadable)

    def _leases(self, effect: CopyBlocks) -> dict[SlabId, int]:
        """Leases of the host slabs that a copy reads or writes: they may not change hands under it. There are two
        exceptions: an instance may read KV that it was to adopt from a lost one until the proxy, which ignores the
        result, takes that back; and kept KV for later prompts is read at the reader's own risk."""
        out = effect.stream is StreamName.SWAP_OUT
        if self._parted and not out:
            return {}
        slabs = {slab_of(effect.shape, b if out else a) for a, b in _pairs(effect.copies)}
        slabs = slabs if out else slabs.difference(self._ground.kept())
        return {slab: self._ground.leased[slab] for slab in sorted(slabs)}

    def _copy(self, effect: CopyBlocks, leases: dict[SlabId, int]) -> None:
        now = {slab: self._ground.leased[slab] for slab in leases}
        assert leases == now, "a host slab has another owner, and is still copied"
        out = effect.stream is StreamName.SWAP_OUT
        source, target = (self._kv, self._ground.host) if out else (self._ground.host, self._kv)
        for a, b in _pairs(effect.copies):
            self._mapped(effect.shape, a if out else b)
            target[effect.shape, b] = list(source.get((effect.shape, a), []))

    # --- the pretended engine -----------------------------------------------------------------------------------------

    def _weights_there(self, model: ModelId) -> KvShape:
        assert all(self._loaded.get(page) == model for page in self._weight_pages[model]), f"{model} is not loaded"
        return self.core.ledger.specs[model].manifest.kv

    def _mapped(self, shape: KvShape, block: BlockId) -> None:
        assert slab_of(shape, block) in self._slab_pages, "unmapped memory is touched"

    def _block(self, shape: KvShape, block: BlockId) -> Content:
        self._mapped(shape, block)
        content = self._kv.setdefault((shape, block), [])
        content += [None] * (BLOCK_TOKENS - len(content))
        return content

    def _prefill(self, effect: RunPrefill) -> Stepped:
        shape, start, stop = self._weights_there(effect.job.model), effect.start, effect.stop
        sequence, blocks = (*effect.job.prompt, *effect.job.sent), list(block_ids(effect.blocks))
        for position, token in enumerate(sequence[start:stop], start):
            self._block(shape, blocks[position // BLOCK_TOKENS])[position % BLOCK_TOKENS] = token
        duration_ns = 1_000_000 + 10_000 * (stop - start) + self._ground.draw.below(1_000_000)
        if not effect.ends:
            return Stepped((), duration_ns)
        found = [token for block in blocks for token in self._block(shape, block)]
        return Stepped(((Token(next_token(found[:stop])),),), duration_ns)

    def decode(self, model: ModelId, rows: Sequence[DecodeRow]) -> tuple[Token, ...]:
        """One step."""
        shape = self._weights_there(model)
        tokens = []
        for row in rows:
            blocks = list(block_ids(row.blocks))[: row.position // BLOCK_TOKENS + 1]
            self._block(shape, blocks[-1])[row.position % BLOCK_TOKENS] = row.token
            found: Content = []
            for block in blocks:
                found += self._block(shape, block)
            tokens.append(Token(next_token(found[: row.position + 1])))
        return tuple(tokens)


def _pairs(copies: Sequence[BlockCopy]) -> list[tuple[BlockId, BlockId]]:
    return [(BlockId(a + at), BlockId(b + at)) for a, b, count in copies for at in range(count)]


def _pages(runs: Sequence[PageRun]) -> Pages:
    return tuple(page for run in runs for page in range(run.start, run.stop))
