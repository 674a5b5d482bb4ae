"""The first rank's engine and memory: what they are asked to do, all ranks do, and it is done when all have done it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from aegis.core.effects import AbandonLoad, Bind, LoadWeights, StreamName
from aegis.core.events import LoadFailed, Progress
from aegis.core.ids import ModelId, PageRun, RequestId
from aegis.core.model import ModelSpec
from aegis.core.request import EventHandle, Sampling
from aegis.device.cached_images import CachedImages
from aegis.device.memory_executor import CopyDone, MemoryEffect, MemoryExecutor
from aegis.engine.block_table import BlockTable
from aegis.engine.protocol import Engine, Sampled, StepRow
from aegis.instance.rank_wire import (
    Command,
    Discard,
    FollowerLinks,
    Prepare,
    Report,
    SendCommand,
    Step,
    Touch,
    packed,
)


class FirstRankEngine:
    """Implements `Engine`. Only this rank samples. `attach` and `detach` go without saying: followers do both where
    they are told of `Bind` and `Unbind`."""

    def __init__(self, engine: Engine, followers: FollowerLinks) -> None:
        self._engine = engine
        self._followers = followers
        self._send = followers.send
        self._reporting: set[RequestId] = set()  # their prompts' logprobs
        self._tables: list[BlockTable] = []  # the blocks of each row of the last step

    def prepare(self, spec: ModelSpec) -> None:
        self._send(Prepare(spec))
        self._engine.prepare(spec)

    def discard(self, spec: ModelSpec) -> None:
        self._send(Discard(spec))
        self._engine.discard(spec)

    def attach(self, spec: ModelSpec, weights_base: int) -> None:
        self._engine.attach(spec, weights_base)

    def detach(self, model: ModelId) -> None:
        self._engine.detach(model)

    def ready(self, model: ModelId, sampling: Sampling) -> bool:
        return self._engine.ready(model, sampling)

    def start(
        self,
        model: ModelId,
        request: RequestId,
        prompt: Sequence[int],
        generated: Sequence[int],
        sampling: Sampling,
    ) -> None:
        if sampling.prompt_logprobs is not None and not generated:
            self._reporting.add(request)
        self._engine.start(model, request, prompt, generated, sampling)

    def stop(self, request: RequestId) -> None:
        self._reporting.discard(request)
        self._engine.stop(request)

    def extends(self, model: ModelId) -> bool:
        return self._engine.extends(model)

    def step(self, model: ModelId, rows: Sequence[StepRow]) -> list[Sampled | None]:
        tables = [row.blocks for row in rows]
        known = len(tables) == len(self._tables) and all(map(_same, tables, self._tables))
        self._tables = tables
        blocks = None if known else [packed(table) for table in tables]
        tokens, starts, samples = zip(*[(tuple(row.tokens), row.start, row.samples) for row in rows], strict=True)
        reports = starts[0] == 0 and rows[0].request in self._reporting
        with self._together(Step(model, list(tokens), list(starts), list(samples), blocks, reports)):
            return self._engine.step(model, rows)

    @contextmanager
    def _together(self, step: Command) -> Iterator[None]:
        """If it fails, the progress of the other ranks is unknown, so the ranks part."""
        self._send(step)
        try:
            yield
        except Exception:
            self._followers.part()
            raise


@dataclass(slots=True, eq=False)
class _Load:
    effect: LoadWeights
    ended: bool = False  # told to have failed, or abandoned


class _Loads:
    """The loads under way, so that one that fails on several ranks fails once."""

    def __init__(self) -> None:
        self._open: list[_Load] = []

    def begin(self, effect: LoadWeights) -> None:
        self._open.append(_Load(effect))

    def abandon(self, event: EventHandle) -> None:
        for load in self._open:
            load.ended = load.ended or load.effect.event == event

    def fails(self, model: ModelId, done: Mapping[StreamName, int]) -> bool:
        """Whether it is news that a load of the model failed on a rank that has `done` so much."""
        for load in self._open:
            if load.effect.model == model and load.effect.event.value > done[load.effect.stream]:
                completed, load.ended = not load.ended, True
                return completed
        return False

    def done(self, by_all: Mapping[StreamName, int]) -> None:
        self._open = [load for load in self._open if load.effect.event.value > by_all[load.effect.stream]]


class FirstRankMemory:
    """A `MemoryExecutor` whose copies are done when those of all ranks are."""

    def __init__(self, memory_executor: MemoryExecutor, followers: FollowerLinks) -> None:
        self._memory_executor = memory_executor
        self._followers = followers
        self._done = [dict.fromkeys(StreamName, 0) for _ in range(followers.ranks)]  # this one first
        self._reported = dict.fromkeys(StreamName, 0)
        self._loads = _Loads()
        self.kv = memory_executor.kv

    @property
    def words(self) -> Mapping[StreamName, int]:
        return self._memory_executor.words

    @property
    def in_flight(self) -> bool:
        return self._memory_executor.in_flight or any(done != self._reported for done in self._done)

    @property
    def peer_load_bytes(self) -> int:
        return 0  # ranks load over their own links

    def weights_base(self, bind: Bind) -> int:
        return self._memory_executor.weights_base(bind)

    def perform(self, effect: MemoryEffect) -> None:
        match effect:
            case LoadWeights():
                self._loads.begin(effect)
            case AbandonLoad(event):
                self._loads.abandon(event)
        self._followers.send(effect)
        self._memory_executor.perform(effect)

    def progress(self) -> list[Report]:
        """A load that failed on any rank failed. Failures come before completions."""
        failures = list[LoadFailed]()
        for done, events in zip(
            self._done, [self._memory_executor.progress(), *self._followers.reports()], strict=True
        ):
            for event in events:
                if isinstance(event, Progress):
                    done[event.stream] = event.value
                elif self._loads.fails(event.model, done):
                    failures.append(event)
        return [*failures, *self._completed()]

    def copied(self) -> list[CopyDone]:
        return self._memory_executor.copied()

    def _completed(self) -> list[Progress]:
        """The count that all ranks have completed by now."""
        now = {name: min(done[name] for done in self._done) for name in StreamName}
        completed = [Progress(name, value) for name, value in now.items() if value != self._reported[name]]
        self._reported = now
        self._loads.done(now)
        return completed


class FirstRankImages:
    """The model cache, touched by all ranks."""

    def __init__(self, images: CachedImages, send: SendCommand) -> None:
        self._images = images
        self._send = send

    def touch(self, extents: Sequence[PageRun]) -> None:
        self._send(Touch(tuple(extents)))
        self._images.touch(extents)


def _same(one: BlockTable, other: BlockTable) -> bool:
    return one is other
