"""The process of one instance: initialises its engine once, then its core decides and its executor performs.

Started as `python -m aegis.instance.process` with its settings as JSON on standard input.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import deque
from collections.abc import Callable
from functools import partial

import msgspec

from aegis.control.progress import LoopProgress
from aegis.core.clock import NS_PER_MS
from aegis.core.effects import Effect, EndRun
from aegis.core.errors import UserError
from aegis.core.events import InstanceEvent, Tick
from aegis.core.ids import InstanceId
from aegis.core.messages import DropProxy, Greeting, ImageCached, MeetProxy, Ping, Pong, Ready, Shutdown
from aegis.engine.parallel.group import RanksLost
from aegis.instance.executor import EffectExecutor
from aegis.instance.grammar_wait import GrammarWait
from aegis.instance.heartbeats import HeartbeatAgent
from aegis.instance.lanes import Lanes
from aegis.instance.model_binder import ModelBinder
from aegis.instance.parts import InstanceParts, open_parts
from aegis.instance.run_worker import RunWorker
from aegis.instance.settings import InstanceSettings
from aegis.instance.span_log import SpanLog
from aegis.process import garbage_collection
from aegis.telemetry import logs
from aegis.telemetry.instance_reports import Reporter
from aegis.transport.failures import LinkBroken
from memory.balloon import OWING_NS

_IDLE_NS = 100 * NS_PER_MS
_GRAMMAR_POLL_NS = 2 * NS_PER_MS
_NICENESS = 5
"""Where steps take all of a machine's cores, proxies have the next slice of one nevertheless: they want little of it,
and answers, cancels and tokens waited for it."""
_SWITCH_INTERVAL_S = 0.0005  # how long a copy thread may wait for the interpreter beside Python code


class Instance:
    """A core, its executor and its link."""

    def __init__(self, parts: InstanceParts, loop_progress: LoopProgress | None = None) -> None:
        self._parts = parts
        self._loop_progress = loop_progress or LoopProgress()
        self._core = parts.core
        self._clock = parts.clock
        self._link = parts.link
        self._memory_executor = parts.memory_executor
        self._binder = ModelBinder(parts.engine)
        self._grammars = GrammarWait(parts.engine)
        self._spans = SpanLog(parts.instance, self._clock, parts.processor, ahead_ns=parts.clock_ahead_ns)
        worker = RunWorker(parts.engine, self._clock, self._link.send, self._between_steps)
        self._lanes = Lanes(
            parts.device,
            parts.lane_shares,
            parts.engine,
            self._clock,
            self._link.send,
            self._spans,
            self._loop_progress,
        )
        if self._lanes.wakeup:
            self._link.heed(self._lanes.wakeup.fileno())
        self._executor = EffectExecutor(
            parts.engine, self._memory_executor, self._link, worker, self._lanes, self._spans
        )
        self._pending: deque[InstanceEvent] = deque()  # the next events for the core
        self._reporter = Reporter(self._core, lanes=2 if self._lanes.divisible else 1)
        self._tick_ns = 0

    def serve(self) -> None:
        """Runs until `Shutdown`, one event at a time: messages first, then what the streams and lanes completed, then
        the end of a run on the whole device. Raises LinkBroken."""
        self._link.send([Ready(os.getpid())])
        self._loop_progress.up = True
        answers: list[InstanceEvent] = []
        while True:
            self._listen(waiting=not self._pending and not answers)
            self._pending += answers
            if not self._pending and self._core.ledger.balloon.owes and self._clock.now_ns() >= self._tick_ns:
                self._pending.append(Tick())
            answers = []
            while self._pending and not answers:  # events during a run come before its result
                event = self._pending.popleft()
                if isinstance(event, Shutdown):
                    return
                answers = self._executor.perform(self._run_core(event))
            self._report()

    def _between_steps(self) -> bool:
        """Tells the core what happened during the last step. Whether that ends the run."""
        self._report()
        self._listen(waiting=False)
        while self._pending:
            if isinstance(self._pending[0], Shutdown):
                return True
            effects = self._run_core(self._pending.popleft())
            self._pending += self._executor.perform(effects)
            if EndRun() in effects:
                return True
        return False

    def _listen(self, *, waiting: bool) -> None:
        """Messages first, then models and grammars that are prepared, then what the streams and lanes completed."""
        self._loop_progress.passes += 1
        busy = self._core.queued + self._core.running > 0
        messages = [m for m in self._receive(waiting=waiting) if not self._binder.defer(m, busy=busy)]
        heard = [passed for message in messages for passed in self._grammars.passed(message)]
        self._pending += [*heard, *self._grammars.ready(), *self._binder.ready(), *self._memory_executor.progress()]
        self._pending += self._lanes.drain()
        if waiting and not busy and not self._pending:
            garbage_collection.collect_while_idle()

    def _run_core(self, event: InstanceEvent) -> list[Effect]:
        match event:
            case ImageCached():
                self._parts.images.touch(event.extents)
            case MeetProxy(proxy, address):  # its turn has come: all models before it are there
                self._link.meet(proxy, address, Greeting(self._parts.role))
                return []
            case DropProxy(proxy):
                self._link.leave(proxy)
        now_ns = self._clock.now_ns()
        effects = self._core.on(event, now_ns)
        self._reporter.note_event()
        self._tick_ns = now_ns + OWING_NS
        if self._parts.decisions:
            self._parts.decisions.did(self._parts.instance, effects, now_ns)
        if self._parts.check_laws:
            self._core.ledger.check()
        return effects

    def close(self) -> None:
        """Ends the threads; the parts of the instance stay open."""
        self._lanes.close()
        self._binder.close()

    def _receive(self, *, waiting: bool) -> list[InstanceEvent]:
        now_ns = self._clock.now_ns()
        until_ns = self._wake_ns(now_ns) if waiting else now_ns
        in_flight = self._memory_executor.in_flight
        messages = self._link.receive(0 if in_flight else max(until_ns - now_ns, 0))
        if in_flight and waiting and not messages:
            self._parts.pause(until_ns)
        if Ping() in messages:
            if not self._loop_progress.hangs:  # else this loop gets on, and the instance does not
                self._link.send([Pong()])
            messages = [message for message in messages if message != Ping()]
        return list(messages)

    def _wake_ns(self, now_ns: int) -> int:
        """The time at which there will be something to do, whatever messages come until then."""
        wake_ns = now_ns + (_GRAMMAR_POLL_NS if self._grammars.waiting else _IDLE_NS)
        if self._core.ledger.balloon.owes:
            wake_ns = min(wake_ns, self._tick_ns)
        due_ns = self._reporter.due_ns
        return wake_ns if due_ns is None else min(wake_ns, due_ns)

    def _report(self) -> None:
        now_ns, parts = self._clock.now_ns(), self._parts
        if not self._reporter.due(now_ns):
            return
        self._spans.copied(self._memory_executor.copied())
        if written := self._spans.drain():
            self._link.send(written)
        report = self._reporter.report(
            now_ns,
            engine_initialisations=parts.initialisations(),
            device_wide_waits=parts.device.device_wide,
            peer_load_bytes=self._memory_executor.peer_load_bytes,
        )
        if report:
            self._loop_progress.report = report
            self._link.send([report])


def exit_code(instance: InstanceId, serve: Callable[[], None]) -> int:
    """The exit code of a process that does nothing but `serve`; where that fails it says why."""
    try:
        serve()
    except UserError as error:
        sys.stderr.write(f"aegis: {instance}: {error.message}\n")
        return 2
    except LinkBroken as error:
        sys.stderr.write(f"aegis: {instance}: {error}; it is started again\n")
        return 3
    except RanksLost:
        return 3
    return 0


def main() -> int:
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides when it ends
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=InstanceSettings)
    logs.guard_streams(settings.logs)
    logs.setup(settings.logs)
    return exit_code(settings.instance, partial(_serve, settings))


def _serve(settings: InstanceSettings) -> None:
    """Raises UserError, LinkBroken and RanksLost."""
    loop_progress = LoopProgress()
    agent = HeartbeatAgent(
        settings.bus,
        loop_progress,
        instance=settings.instance,
        incarnation=settings.incarnation,
        role=settings.role,
    )
    agent.start()
    os.nice(_NICENESS)  # of this thread and those that it starts
    with open_parts(settings) as parts:
        instance = Instance(parts, loop_progress)
        garbage_collection.collect_seldom()
        instance.serve()
        instance.close()
    agent.close()


if __name__ == "__main__":
    code = main()
    logs.finish()
    os._exit(code)  # taking torch down in order takes seconds
