"""The proxy's end of a process that works on texts (`worker`), which is killed when a job takes too long."""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Sequence, Set
from threading import Thread

import msgspec

from aegis.models.text.text_model import TextModel
from aegis.models.text.worker import PROGRESS_BYTES, READY
from aegis.models.text.worker_messages import (
    ANSWERS_BYTES_MAX,
    KNOWN_MAX,
    LENGTH_BYTES,
    Answer,
    Know,
    Known,
    framed,
    read_answers,
)

START_S = 60.0
LOAD_S = 20.0
"""Before the first job of a model: the process has to load the tokenizer, as this one did."""

_FRAME_BYTES = 16  # of a message, beside its answers


class TextProcess:
    """Does some jobs at a time, one after the other; the caller sees to that. Started by the first, and anew after each
    that had to be killed. Event loops may use it one after the other."""

    def __init__(self, *, memory_bytes: int, niceness: int = 0, load_s: float = LOAD_S) -> None:
        """`memory_bytes` beyond what its libraries take; `load_s` for the tokenizer of a model."""
        self._load_s = load_s
        self._command = [sys.executable, "-m", "aegis.models.text.worker", str(memory_bytes), str(niceness)]
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._link: _Link | None = None
        self._progress: mmap.mmap | None = None
        self._sent_models: OrderedDict[int, None] = (
            OrderedDict()
        )  # models that the process knows, as they were last used

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def ask(self, jobs: Sequence[tuple[TextModel, msgspec.Raw]], within_s: float) -> tuple[Answer, ...] | int:
        """The answers to `jobs`, each of which is `encoded`, or the index of the one that took too much time or memory;
        then none of the others is answered either. They are of `KNOWN_MAX` models at most."""
        needed, at = {text.key for text, _ in jobs}, 0
        assert len(needed) <= KNOWN_MAX
        try:
            link = await self._linked()
            self._set_begun(0)  # as after each model that it is told
            for index, (text, _) in enumerate(jobs):
                if text.key not in self._sent_models:
                    at = index
                    await self._send_model(link, text, needed)
                self._sent_models.move_to_end(text.key)
            at = 0
            return await link.ask(framed([job for _, job in jobs]), within_s)
        except (OSError, EOFError, TimeoutError):
            return min(max(at, self._begun()), len(jobs) - 1)
        except BaseException:  # the process may be in the middle of a job
            self.close()
            raise

    async def _send_model(self, link: _Link, text: TextModel, needed: Set[int]) -> None:
        """In place of the model that was used the longest ago, and that is not `needed` now, where there are many."""
        source, forget = await asyncio.to_thread(text.source), None
        if len(self._sent_models) >= KNOWN_MAX:
            forget = next(key for key in self._sent_models if key not in needed)
            del self._sent_models[forget]
        if await link.ask(framed([Know(text.key, source, forget)]), self._load_s) != (Known(),):
            raise EOFError
        self._sent_models[text.key] = None

    def _set_begun(self, index: int) -> None:
        """So that a process which ends before its first job is not taken for one that ended at a former message's."""
        assert self._progress
        self._progress[:] = index.to_bytes(PROGRESS_BYTES, "little")

    def _begun(self) -> int:
        """The job it is at, of which it is relieved for good."""
        begun = int.from_bytes(self._progress[:], "little") if self._progress else 0
        self.close()
        return begun

    async def start(self) -> None:
        """Before there is a job. Raises OSError, EOFError or TimeoutError."""
        if self._socket is None:
            await self._linked()

    def close(self) -> None:
        """Ends the process, if there is one."""
        if self._process:
            self._process.kill()
            Thread(target=self._process.wait, daemon=True).start()  # a process with much memory takes a moment to end
        if self._link:
            self._link.close()
        if self._socket:
            self._socket.close()
        if self._progress:
            self._progress.close()
        self._process = self._socket = self._link = self._progress = None
        self._sent_models.clear()

    def _is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def _linked(self) -> _Link:
        """The link to a process that is alive, on this event loop."""
        loop, link = asyncio.get_running_loop(), self._link
        if link is None or self._socket is None or link.ended or not self._is_alive():
            self._socket = await self._start()
        elif link.loop is loop:
            return link
        else:
            link.close()
        self._link = _Link(self._socket, loop)
        return self._link

    async def _start(self) -> socket.socket:
        self.close()
        ours, theirs = socket.socketpair()
        progress = os.memfd_create("progress")
        os.ftruncate(progress, PROGRESS_BYTES)
        with theirs, os.fdopen(progress):
            ours.setblocking(False)
            self._socket = ours
            self._progress = mmap.mmap(progress, PROGRESS_BYTES)
            self._process = subprocess.Popen(
                [*self._command, str(progress)],
                pass_fds=[progress],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # libraries write a hundred lines when they break
                env={"OMP_NUM_THREADS": "1", **os.environ, "TOKENIZERS_PARALLELISM": "false"},
                process_group=0,  # Ctrl-C in a terminal is not for it
            )
        async with asyncio.timeout(START_S):
            if await asyncio.get_running_loop().sock_recv(ours, len(READY)) != READY:
                raise EOFError
        return ours


class _Link:
    """The socket to the process, on one event loop. There is one message at a time, and `ask` waits for its answers.

    A reader stays registered for the life of the link: most messages are short, and for each one tasks, timeouts and
    changes of what the loop polls would cost more than the answer.
    """

    def __init__(self, end: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self._end = end
        self.loop = loop
        self._unsent = memoryview(b"")
        self._data = bytearray(LENGTH_BYTES)
        self._came = 0
        self._in_length = True
        self._answered: asyncio.Future[bytearray] | None = None
        self.ended = False  # the process has closed its end
        loop.add_reader(end, self._readable)

    def close(self) -> None:
        """The socket is the caller's to close."""
        if not self.loop.is_closed():
            self.loop.remove_reader(self._end)
            self.loop.remove_writer(self._end)
        self._fail(EOFError())

    async def ask(self, message: bytes, within_s: float) -> tuple[Answer, ...]:
        """Raises TimeoutError, EOFError, OSError."""
        answered = self._answered = self.loop.create_future()
        late = self.loop.call_later(within_s, self._fail, TimeoutError())
        try:
            self._unsent = memoryview(message)
            self._writable()
            return read_answers(await answered)
        finally:
            late.cancel()
            self._answered = None

    def _fail(self, error: Exception) -> None:
        if self._answered and not self._answered.done():
            self._answered.set_exception(error)

    def _writable(self) -> None:
        """Sends what the socket takes; the rest when it takes more."""
        waits = bool(self._unsent)
        try:
            while self._unsent:
                self._unsent = self._unsent[self._end.send(self._unsent) :]
        except BlockingIOError:
            self.loop.add_writer(self._end, self._writable)
            return
        except OSError as error:
            self._fail(error)
        if waits:
            self.loop.remove_writer(self._end)

    def _readable(self) -> None:
        try:
            with memoryview(self._data) as view:
                nbytes = self._end.recv_into(view[self._came :])
        except BlockingIOError:
            return
        except OSError as error:
            self.ended = True
            self._fail(error)
            return
        self._came += nbytes
        if not nbytes:
            self.ended = True
            self.loop.remove_reader(self._end)  # which would be called again and again
            self._fail(EOFError())
        elif self._came == len(self._data):
            self._complete()

    def _complete(self) -> None:
        """All of a length, or of the answers that follow it. A length is refused if no process may send as much."""
        data, was_length = self._data, self._in_length
        length = int.from_bytes(data, "little") if was_length else LENGTH_BYTES
        self._in_length, self._came = not was_length, 0
        if was_length and not 0 < length <= ANSWERS_BYTES_MAX + _FRAME_BYTES:
            self._fail(EOFError())
            return
        self._data = bytearray(length)
        if was_length:
            self._readable()
        elif self._answered and not self._answered.done():
            self._answered.set_result(data)
