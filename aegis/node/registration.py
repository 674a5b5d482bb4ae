"""Registers models beside serving: one registrar process for any number of sources, ended when it is done."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from typing import BinaryIO, Protocol

import msgspec

from aegis.core.errors import ModelRefused
from aegis.core.ids import ModelId
from aegis.core.model import ModelSpec
from aegis.models.failures import one_line, refused
from aegis.models.registrar import Answer, Job, Progress, Refused, Registered, Waits
from aegis.models.sources import Source
from aegis.models.terms import Terms
from aegis.process.forked_processes import ForkedProcess, ForkServer

START_S = 180.0
"""Until the first word of a registrar, which imports much."""

_LAST_WORDS_S = 0.5
"""Until what a registrar that has ended wrote to standard error is read."""

_RELAYED_BYTES = 1 << 16

_MODULE = "aegis.node.registrar_process"
_LINE_BYTES_MAX = 1 << 26

Report = Callable[[ModelId, str], None]


class RegistrationCancelled:
    """Models that nobody wants any more while they are registered; it ends the registrar that is at them."""

    def __init__(self) -> None:
        self._models = set[ModelId]()
        self._added = asyncio.Event()
        self._process: ForkedProcess | None = None

    def __contains__(self, model: ModelId) -> bool:
        return model in self._models

    @property
    def count(self) -> int:
        return len(self._models)

    def add(self, model: ModelId) -> None:
        self._models.add(model)
        self._added.set()
        self._end()

    async def all_of(self, models: Collection[ModelId]) -> None:
        """Returns when nobody wants any of them."""
        while not self._models.issuperset(models):
            self._added.clear()
            await self._added.wait()

    def follow(self, process: ForkedProcess, models: Iterable[ModelId]) -> None:
        """It is the one to end; at once, where one of its models became unwanted while it was started."""
        self._process = process
        if not self._models.isdisjoint(models):
            self._end()

    def _end(self) -> None:
        if self._process:
            self._process.kill()


class RegistrationTurns:
    """How many registrations are under way at a time: each has a process that may take much. Others wait, first come,
    first served."""

    def __init__(self, at_once: int) -> None:
        self._turns = asyncio.Semaphore(at_once)

    @contextlib.asynccontextmanager
    async def turn(self, models: Collection[ModelId], unwanted: RegistrationCancelled) -> AsyncIterator[None]:
        """A registration's. It waits no more once nobody wants any of its models."""
        coming = asyncio.ensure_future(self._turns.acquire())
        leaving = asyncio.ensure_future(unwanted.all_of(models))
        try:
            await asyncio.wait((coming, leaving), return_when=asyncio.FIRST_COMPLETED)
            yield
        finally:
            leaving.cancel()
            if coming.done():
                self._turns.release()
            coming.cancel()


class RegistrarNotStarted(ModelRefused):
    """This machine lacked what a registrar takes: the checkpoint may be well, and asking again may do."""

    def __init__(self, source: Source, reason: str) -> None:
        super().__init__(refused(source.root, f"its registrar cannot be started: {reason}").message, status=503)


def was_unloaded(model: ModelId) -> ModelRefused:
    return ModelRefused(f"'{model}' was unloaded while it was registered", status=409)


class Register(Protocol):
    """A function that makes models of checkpoints: `register`, here."""

    def __call__(
        self,
        sources: Sequence[Source],
        terms: Terms,
        *,
        report: Report = ...,
        unwanted: RegistrationCancelled | None = ...,
        renew: bool = False,
        wanted: bool = ...,
        base: ModelSpec | None = ...,
    ) -> AsyncIterator[tuple[Source, ModelSpec | ModelRefused | None]]: ...


async def register(
    sources: Sequence[Source],
    terms: Terms,
    *,
    report: Report = lambda _model, _text: None,
    unwanted: RegistrationCancelled | None = None,
    renew: bool = False,
    wanted: bool = True,
    base: ModelSpec | None = None,
    fork_server: ForkServer,
    start_s: float = START_S,
    module: str = _MODULE,
) -> AsyncIterator[tuple[Source, ModelSpec | ModelRefused | None]]:
    """Yields what became of each source, in order but for those that became `unwanted`. A registrar that dies, does not
    get further in the time it said, or cannot be started, refuses the source it was at. With `renew` images that are
    there already are made again. If it is not `wanted`, None becomes of a lazy source that has no image yet. With a
    `base`, the sources are adapters of it. Registrars are forked by `fork_server`."""
    unwanted = unwanted or RegistrationCancelled()
    waiting = list(sources)
    while waiting:
        for source in [source for source in waiting if source.model in unwanted]:
            waiting.remove(source)
            yield source, was_unloaded(source.model)
        jobs = [Job(source, terms, renew, source.lazy and not wanted, base) for source in waiting]
        doing, known = "starting", unwanted.count
        try:
            async for answer in _run(jobs, unwanted, start_s, fork_server, module):
                match answer:
                    case Progress(model, text):
                        doing = text
                        report(model, text)
                    case Registered(spec):
                        doing = "starting"
                        yield waiting.pop(0), spec
                    case Waits():
                        doing = "starting"
                        yield waiting.pop(0), None
                    case Refused(_, reason):
                        doing = "starting"
                        yield waiting.pop(0), ModelRefused(reason)
        except _Stalled as stalled:
            if not waiting:  # it has said all, and does not end
                return
            source = waiting.pop(0)
            yield source, refused(source.root, f"{doing} took more than {stalled.within_s:.0f} s; it was given up")
            continue
        except _NotStarted as failed:
            source = waiting.pop(0)
            yield source, RegistrarNotStarted(source, failed.reason)
            continue
        if waiting and unwanted.count == known:
            source = waiting.pop(0)
            why = f"the process that read it ended abruptly while {doing} (out of memory?)"
            yield source, refused(source.root, why)


class _Stalled(Exception):
    def __init__(self, within_s: float) -> None:
        super().__init__()
        self.within_s = within_s


class _NotStarted(Exception):
    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.reason = error.strerror or one_line(error)


async def _line(answers: asyncio.StreamReader, within_s: float) -> bytes:
    """Raises _Stalled."""
    try:
        async with asyncio.timeout(within_s):
            return await answers.readline()
    except TimeoutError:
        raise _Stalled(within_s) from None


async def _run(
    jobs: Sequence[Job], unwanted: RegistrationCancelled, start_s: float, fork_server: ForkServer, module: str
) -> AsyncIterator[Answer]:
    """Raises _Stalled, and _NotStarted."""
    if not jobs:
        return
    async with contextlib.AsyncExitStack() as pipes:
        try:
            answers, stdout = await pipes.enter_async_context(_pipe())
            errors, stderr = await pipes.enter_async_context(_pipe())
            process = await fork_server.start(
                module,
                environment={"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
                stdin=b"".join(msgspec.json.encode(job) + b"\n" for job in jobs),
                stdout=stdout.fileno(),
                stderr=stderr.fileno(),
            )
        except OSError as error:
            raise _NotStarted(error) from None
        stdout.close()
        stderr.close()
        relaying = asyncio.create_task(_relay(errors))
        within_s = start_s
        try:
            unwanted.follow(process, [job.source.model for job in jobs])
            while line := await _line(answers, within_s):
                answer = msgspec.json.decode(line, type=Answer)
                within_s = answer.within_s if isinstance(answer, Progress) else start_s
                yield answer
            await process.wait()
        finally:
            process.kill()
            await process.wait()
            await asyncio.wait((relaying,), timeout=_LAST_WORDS_S)
            relaying.cancel()


@contextlib.asynccontextmanager
async def _pipe() -> AsyncIterator[tuple[asyncio.StreamReader, BinaryIO]]:
    """A reader, and the end that a process writes to, which is to be closed once it has that."""
    readable, writable = os.pipe()
    with os.fdopen(writable, "wb") as end:
        reader = asyncio.StreamReader(limit=_LINE_BYTES_MAX)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(readable, "rb")
        )
        try:
            yield reader, end
        finally:
            transport.close()


async def _relay(errors: asyncio.StreamReader) -> None:
    """What the process writes to standard error goes to this one's, which keeps nobody waiting if it is guarded: a
    reader of the log that stalls does not stop a registration."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while data := await errors.read(_RELAYED_BYTES):
        sys.stderr.write(decoder.decode(data))
        sys.stderr.flush()
