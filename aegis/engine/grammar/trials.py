"""Whether grammars compile, and soon enough: asked of a process beside the server, which is killed where they do not.

The process is started by the first grammar. It knows what it was told of vocabularies until it is killed. It tries one
grammar at a time; callers take turns, so nobody waits longer for what others ask than for one grammar of each. Of one
caller's the shortest is first.
"""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from hashlib import blake2b
from math import inf
from threading import Lock, Thread
from time import monotonic
from typing import Any, TypeVar

from aegis.core.errors import UserError
from aegis.core.fair_queue import FairQueue, QueueFull
from aegis.core.model import Manifest
from aegis.core.request import Grammar
from aegis.engine.grammar.trial_messages import Tried, Try, read, write

T = TypeVar("T")

_MAY_BE_SLOW = ("ebnf", "structural_tag")
"""Kinds of grammars that the client writes itself; regular expressions and schemas make quick ones."""

_Job = tuple["Future[Any]", Callable[[], Any]]


class FairThread:
    """One thread that works for several callers, by turns. It runs while there are jobs, and keeps no process from
    ending. A job whose future is cancelled before it begins is left out."""

    def __init__(self, *, most_waiting: int) -> None:
        """`most_waiting` jobs of one caller, besides the one that runs."""
        self._lock = Lock()
        self._queue = FairQueue[_Job](most_waiting=most_waiting, is_left=lambda job: job[0].cancelled())
        self._running = False

    def submit(self, caller: str, size: int, work: Callable[[], T]) -> Future[T]:
        """Raises QueueFull."""
        future: Future[T] = Future()
        with self._lock:
            self._queue.put(caller, size, (future, work))
            if not self._running:
                self._running = True
                Thread(target=self._run, daemon=True).start()
        return future

    def _run(self) -> None:
        while job := self._next():
            future, work = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - it is for who waits
                future.set_exception(error)

    def _next(self) -> _Job | None:
        with self._lock:
            job = self._queue.take()
            self._running = job is not None
            return job


COMPILE_S = 5.0
START_S = 60.0
KNOWN_MAX = 16384
SLOW_KNOWN_S = 60.0  # another time it may be faster
VOCABULARIES_MAX = 16
SLOW_MAX = 2
"""Outputs of a caller that are given up within a minute because of their grammars, before its next ones are refused."""

SLOW_WITHIN_S = 60.0
SLOW_CALLERS_MAX = 4096
WAITING_MAX = 256  # grammars of one caller: what a program may ask at once


class GrammarTrials:
    """Event loops and threads may share it."""

    def __init__(self, compile_s: float = COMPILE_S) -> None:
        self._compile_s = compile_s
        self._thread = FairThread(most_waiting=WAITING_MAX)
        self._process: subprocess.Popen[bytes] | None = None
        self._sent_vocabularies: OrderedDict[str, None] = OrderedDict()  # vocabularies that the process knows
        self._slow: OrderedDict[str, tuple[float, ...]] = OrderedDict()  # when outputs of a caller were given up
        self._known: OrderedDict[bytes, tuple[str | None, float]] = OrderedDict()  # problems, and until when

    async def problem(
        self, manifest: Manifest, tokenizer_json: Callable[[], str], grammar: Grammar, caller: str = ""
    ) -> str | None:
        """The objection to the grammar for this model, if there is one, from a verb on. Waits for the trial, and before
        that for the trials of other callers. A grammar that no request waits for any more is not tried.

        Raises UserError if it cannot be tried, the caller has many waiting, or some of its were slow.
        """
        if grammar.kind in _MAY_BE_SLOW and len(self._lately_slow(caller)) >= SLOW_MAX:
            message = f"{SLOW_MAX} grammars of yours took too long to follow; send another {SLOW_WITHIN_S:.0f} s later"
            raise UserError(message, status=429, code="slow_grammar", kind="rate_limit_error")
        key = _key(manifest, grammar)
        if known := self._remembered(key):
            return known[0]
        try:
            work = partial(self._found, key, manifest, tokenizer_json, grammar)
            trying = self._thread.submit(caller, len(grammar.text), work)
        except QueueFull:
            message = f"{WAITING_MAX} grammars of yours are waiting to be tried out; try again when they were"
            raise UserError(message, status=429, code="too_many_grammars", kind="rate_limit_error") from None
        return await asyncio.wrap_future(trying)

    def was_slow(self, caller: str) -> None:
        """An output of the caller was given up because of its grammar, which the trial had passed. Each of them has
        cost everybody on its instance some tenths of a second."""
        self._slow[caller] = (*self._lately_slow(caller), monotonic())[-SLOW_MAX:]
        self._slow.move_to_end(caller)
        if len(self._slow) > SLOW_CALLERS_MAX:
            self._slow.popitem(last=False)

    def _lately_slow(self, caller: str) -> tuple[float, ...]:
        since_s = monotonic() - SLOW_WITHIN_S
        return tuple(at_s for at_s in self._slow.get(caller, ()) if at_s > since_s)

    def _remembered(self, key: bytes) -> tuple[str | None, float] | None:
        known = self._known.get(key)
        return known if known and monotonic() < known[1] else None

    def _found(self, key: bytes, manifest: Manifest, tokenizer_json: Callable[[], str], grammar: Grammar) -> str | None:
        if known := self._remembered(key):  # the same was tried for another request
            return known[0]
        tried = self._ask(manifest, tokenizer_json, grammar)
        if tried:
            problem, until_s = tried.problem, inf
        else:
            problem = f"takes more than {self._compile_s:g} s or too much memory to compile"
            until_s = monotonic() + SLOW_KNOWN_S
        self._known[key] = problem, until_s
        if len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)
        return problem

    def close(self) -> None:
        """Ends the process."""
        if self._process:
            self._process.kill()
            self._process.communicate()
        self._process = None
        self._sent_vocabularies.clear()

    def _ask(self, manifest: Manifest, tokenizer_json: Callable[[], str], grammar: Grammar) -> Tried | None:
        """None if it takes too long."""
        if self._process and self._process.poll() is not None:
            self.close()
        process = self._process or self._start()
        if manifest.fingerprint not in self._sent_vocabularies:
            self._send_vocabulary(process, manifest, tokenizer_json())
        tried = self._asked(process, manifest, grammar, None, self._compile_s)
        if tried is None:
            self.close()
        return tried

    def _send_vocabulary(self, process: subprocess.Popen[bytes], manifest: Manifest, tokenizer_json: str) -> None:
        """Before its first grammar, whose time is not to be spent on it. Raises UserError."""
        if self._asked(process, manifest, None, tokenizer_json, START_S) is None:
            raise self._unavailable()
        self._sent_vocabularies[manifest.fingerprint] = None
        if len(self._sent_vocabularies) > VOCABULARIES_MAX:
            self._sent_vocabularies.popitem(last=False)

    def _asked(
        self,
        process: subprocess.Popen[bytes],
        manifest: Manifest,
        grammar: Grammar | None,
        tokenizer_json: str | None,
        timeout_s: float,
    ) -> Tried | None:
        """Raises UserError if the process has died before."""
        assert process.stdin
        name, ends = manifest.fingerprint, manifest.eos_token_ids
        try:
            write(process.stdin, Try(name, grammar, tokenizer_json, manifest.vocab_size, ends))
        except OSError:  # not None: the grammar would count as one that takes too long
            raise self._unavailable() from None
        return self._answer(process, timeout_s)

    def _unavailable(self) -> UserError:
        """The process is of no use, and is ended."""
        self.close()
        return UserError("structured output is not available now", status=503, code="grammar_unavailable")

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "aegis.engine.grammar.trial_process"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a reader of the log that stalls must not stop it
            env={"OMP_NUM_THREADS": "1", **os.environ},
            process_group=0,  # Ctrl-C in a terminal is not for it
        )
        if self._answer(self._process, START_S) is None:
            raise self._unavailable()
        return self._process

    def _answer(self, process: subprocess.Popen[bytes], timeout_s: float) -> Tried | None:
        """None if it does not come in time, or the process has died."""
        assert process.stdout
        waiting = select.poll()  # `select` itself knows no descriptors beyond 1024
        waiting.register(process.stdout, select.POLLIN)
        return read(process.stdout, Tried) if waiting.poll(timeout_s * 1e3) else None


def _key(manifest: Manifest, grammar: Grammar) -> bytes:
    return blake2b("\0".join((manifest.fingerprint, grammar.kind, grammar.text)).encode(), digest_size=16).digest()
