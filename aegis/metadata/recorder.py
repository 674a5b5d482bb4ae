"""Claims calls for this proxy, and writes their progress, in batches and off the path of the tokens.

Nothing waits for a write. Calls in flight are in memory anyway; calls that have ended and cannot be written yet are
kept while there is room for them. A call whose id its client gave is claimed before it begins, which is the one moment
that waits for the server. One with a new id, which no other proxy can know yet, is not: its record is written with all
others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from functools import partial
from itertools import islice

import msgspec
from redis.asyncio import Redis
from redis.commands.core import AsyncScript

from aegis.core.errors import UserError
from aegis.metadata.batches import Sequence, assemble
from aegis.metadata.claims import Claims, fields
from aegis.metadata.connection import FAILURES, why
from aegis.metadata.keys import Keys
from aegis.metadata.lua_scripts import APPEND, CREATE
from aegis.metadata.membership import Membership
from aegis.metadata.recording import Batch, CallState, Recording
from aegis.telemetry.logs import log
from proxy.http.call_records import RecordedCall

_logger = logging.getLogger(__name__)

_ROUND_S = 0.1
_FEW = 8  # requests in one command, of which each costs some 0.4 ms, as long as that makes few commands
_AT_ONCE = 32  # requests in one command, at most: what is asked meanwhile waits for it
_COMMANDS_MAX = 8  # in a round: of very many requests each is written more seldom
_AT_LAST = 256  # requests in one command when no request is served any more
_ENDED_MAX = 4096  # that wait to be written


class Counters(msgspec.Struct):
    """Since the start."""

    replayed: int = 0
    taken_over: int = 0
    written_batches: int = 0
    restored: int = 0
    dropped: int = 0
    refused: int = 0


class Recorder:
    """The calls of one proxy. Implements `proxy.http.call_records.Records`."""

    def __init__(
        self, redis: Redis, keys: Keys, membership: Membership, owner: str, *, ttl_s: float, wait_s: float
    ) -> None:
        self.counters = Counters()
        self._keys = keys
        self._membership = membership
        self._owner = owner
        self._ttl_ms = round(ttl_s * 1000)
        self._wait_s = wait_s
        self._append = redis.register_script(APPEND)
        self._create = redis.register_script(CREATE)
        self._claiming: set[str] = set()  # keys of calls
        self._recordings: dict[str, Recording] = {}  # by the same: running, or ended and not all written
        failed, wanted = partial(self._failed, "claim"), self._is_here
        self._claims = Claims(redis, keys, owner, self._ttl_ms, up=membership.up, failed=failed, wanted=wanted)
        self._dirty: dict[Recording, None] = {}
        self._writing = 0  # requests that the present command is about
        self._one_writer = asyncio.Lock()
        self._has_unwritten = asyncio.Event()

    @property
    def unwritten(self) -> int:
        """Requests of which something is still to be written."""
        return len(self._dirty) + self._writing

    # --- claiming -----------------------------------------------------------------------------------------------------

    async def open(self, asked: RecordedCall) -> Recording:
        present = self._recordings.get(asked.key)
        if asked.key in self._claiming or (present and present.state is CallState.RUNNING):
            raise _busy(asked.request)
        if asked.is_new and self._membership.up.is_set():
            return self._begun(asked)
        self._claiming.add(asked.key)
        try:
            async with self._in_time():
                if present:
                    await present.settled.wait()
                return await self._open(asked)
        finally:
            self._claiming.discard(asked.key)

    def _is_here(self, key: str) -> bool:
        return key in self._claiming or key in self._recordings

    def _begun(self, asked: RecordedCall) -> Recording:
        """The record of a call that no other proxy can have claimed. It is written in the next round."""
        recording = Recording(asked, asked.sampling.seed, self._assembled(asked, []), self._changed)
        recording.is_recorded = False
        self._recordings[asked.key] = recording
        self._changed(recording)
        return recording

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """Raises UserError if it takes longer than a call may wait."""
        try:
            async with asyncio.timeout(self._wait_s):
                yield
        except TimeoutError:
            self.counters.refused += 1
            message = f"the metadata store did not answer within {self._wait_s:g} s; try again"
            raise UserError(message, status=503, code="store_unavailable", kind="server_error") from None

    async def _open(self, asked: RecordedCall) -> Recording:
        word, seed, batches = await self._claims.claim(asked)
        known = self._assembled(asked, batches)
        if word == "finished" and any(sequence.finish is None for sequence in known):
            word, seed, batches = await self._claims.claim(asked, "again")
            known = self._assembled(asked, batches)
        _refuse(asked.request, word)
        recording = Recording(asked, int(seed), known, self._changed)
        if word == "finished":
            self.counters.replayed += 1
            recording.state = CallState.FINISHED
            return recording
        self.counters.taken_over += word == "taken"
        self._recordings[asked.key] = recording
        return recording

    def _assembled(self, asked: RecordedCall, batches: list[bytes]) -> list[Sequence]:
        try:
            return assemble(batches, asked.sequences)
        except ValueError:  # the seed is the same: it is generated again
            return assemble((), asked.sequences)

    # --- writing ------------------------------------------------------------------------------------------------------

    async def write_for_ever(self) -> None:
        """Entries that are to be written when a round begins are written in it, evenly."""
        now_s = asyncio.get_running_loop().time
        while True:
            await self._has_unwritten.wait()
            began_s, commands, each = now_s(), *commands_for(len(self._dirty))
            for number in range(1, commands + 1):
                await asyncio.sleep(began_s + _ROUND_S * number / commands - now_s())
                await self._membership.up.wait()
                self._has_unwritten.clear()
                await self._flush(each)
            self._drop_surplus()

    async def keep_for_ever(self) -> None:
        """Records of requests that have no token for long do not expire."""
        while True:
            await asyncio.sleep(self._ttl_ms / 3000)
            for recording in self._recordings.values():
                self._changed(recording)

    async def close(self, timeout_s: float = 1.0) -> None:
        """Writes what is left, for a limited time. Then nothing is claimed any more."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.unwritten and self._membership.up.is_set():
                    await self._flush(_AT_LAST)
        except TimeoutError:
            self.counters.dropped += self.unwritten
        await self._claims.close()

    def _changed(self, recording: Recording) -> None:
        """Something of it is to be written."""
        if recording not in self._dirty and not recording.settled.is_set():
            self._dirty[recording] = None
            self._has_unwritten.set()

    async def _flush(self, most: int) -> None:
        """One command for up to `most` requests; what fails stays to be written."""
        async with self._one_writer:
            recordings = list(islice(self._dirty, most))
            self._writing = len(recordings)
            for recording in recordings:
                del self._dirty[recording]
            if recordings:
                await self._write(recordings)
            self._writing = 0
        if self._dirty:
            self._has_unwritten.set()

    async def _write(self, recordings: list[Recording]) -> None:
        new = [recording for recording in recordings if not recording.is_recorded]
        known = [recording for recording in recordings if recording.is_recorded]
        if new:
            await self._write_new(new)
        if known:
            await self._write_more(known)

    async def _write_more(self, recordings: list[Recording]) -> None:
        batches = [recording.batch() for recording in recordings]
        words = [word for batch in batches for word in (batch.state, batch.data)]
        gone = list[Recording]()
        for recording, batch, answer in zip(
            recordings, batches, await self._run(self._append, recordings, words, "write"), strict=True
        ):
            if answer == "gone":
                recording.forget_written()
                gone.append(recording)
            else:
                self._wrote(recording, batch, answer)
        if gone:
            self.counters.restored += await self._write_new(gone)

    async def _write_new(self, recordings: list[Recording]) -> int:
        """The number of those that the server answers of."""
        batches = [recording.batch() for recording in recordings]
        words = list[str | bytes | int]()
        for recording, batch in zip(recordings, batches, strict=True):
            words += (batch.state, batch.data, "fingerprint", recording.call.fingerprint)
            words += fields(recording.call, recording.seed)
        answers = await self._run(self._create, recordings, words, "restore")
        for recording, batch, answer in zip(recordings, batches, answers, strict=True):
            self._wrote(recording, batch, answer)
        return len(answers) - answers.count("failed")

    async def _run(
        self, script: AsyncScript, recordings: list[Recording], words: Collection[str | bytes | int], what: str
    ) -> list[str]:
        """A word of each; `failed` where the server cannot be reached."""
        calls = [recording.call.key for recording in recordings]
        keys = [key for call in calls for key in (self._keys.request(call), self._keys.tokens(call))]
        try:
            answers = await script(keys=keys, args=[self._owner, self._ttl_ms, *words])
        except FAILURES as error:
            self._failed(what, error)
            return ["failed"] * len(recordings)
        return [answer.decode() for answer in answers]

    def _wrote(self, recording: Recording, batch: Batch, answer: str) -> None:
        match answer:
            case "kept":
                self.counters.written_batches += bool(batch.data)
                if not recording.wrote(batch):
                    self._changed(recording)
                elif recording.state is not CallState.RUNNING:
                    self._settle(recording)
            case "lost":  # another proxy took it over
                self._settle(recording)
            case _:
                self._changed(recording)

    def _settle(self, recording: Recording) -> None:
        recording.settle()
        self._dirty.pop(recording, None)
        if self._recordings.get(recording.call.key) is recording:
            del self._recordings[recording.call.key]

    def _drop_surplus(self) -> None:
        """The oldest of what has ended goes: a retry of it is generated again, from what was written."""
        ended = [r for r in self._dirty if r.state is not CallState.RUNNING]
        for recording in ended[: max(0, len(ended) - _ENDED_MAX)]:
            self.counters.dropped += 1
            self._settle(recording)

    def _failed(self, what: str, error: BaseException) -> None:
        log(_logger, logging.DEBUG, "Redis failed", {"what": what, "why": why(error)})
        self._membership.report_failure()


def commands_for(waiting: int) -> tuple[int, int]:
    """The number of commands that write so many requests in a round, and how many of them each writes at most."""
    commands = min(max(-(-waiting // _FEW), 1), _COMMANDS_MAX)
    return commands, min(max(-(-waiting // commands), _FEW), _AT_ONCE)


def _refuse(request: str, word: str) -> None:
    """Raises UserError if CLAIM says that the request is another's."""
    if word == "different":
        message = f"the request id '{request}' was used for another request; send a new one"
        raise UserError(message, status=422, param="request_id", code="request_id_reused")
    if word == "running":
        raise _busy(request)


def _busy(request: str) -> UserError:
    message = f"the request '{request}' is being answered; retry it when its connection has ended"
    return UserError(message, status=409, param="request_id", code="request_in_flight")
