"""The lanes of an instance whose device is divided: a thread for each runs what the core asks for, side by side.

The main loop stays the only thread that touches the core, the link, the memory and the engine's requests and models. It
reads what a run needs of the core, and hands it over. A lane's thread hands back the tokens of each step and how the
run ended, and wakes the main loop, which sends the tokens on, and tells the core. So the core hears news at any moment,
also while steps are under way, and what it answers is done at once; only what a lane's steps still need is kept until
its run has ended.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from msgspec.structs import replace
from setproctitle import setthreadtitle

from aegis.control.progress import LaneProgress, LoopProgress
from aegis.core.clock import Clock
from aegis.core.effects import Run
from aegis.core.events import StepFailed, Stepped
from aegis.core.ids import RequestId
from aegis.device.divisions import WHOLE, Shares
from aegis.device.protocol import Device, Lane
from aegis.engine.lane_threads import compute_in
from aegis.engine.protocol import Engine, EngineFailed
from aegis.instance.run_worker import BegunRun, Delivered, RunWorker
from aegis.instance.span_log import SpanLog
from aegis.process.clock import ThreadClock
from aegis.process.wakeup import Wakeup
from aegis.telemetry.logs import log

_logger = logging.getLogger(__name__)


def failed(error: EngineFailed, run: Run) -> StepFailed:
    """The engine raised in a step: the requests of that step fail, not the instance. Called where it was caught."""
    log(_logger, logging.ERROR, "step failed", {}, exc_info=True)
    return StepFailed(f"the model failed on this request ({error})", run.lane)


@dataclass(frozen=True, slots=True)
class _Ended:
    run: Run
    answer: Stepped | StepFailed
    stop_ns: int
    processor_ns: int  # for how long its thread had a processor


_Told = list[Delivered] | _Ended | BaseException


class LaneThread:
    """Runs on one lane, one at a time. `tell` hands what it has to say to the main loop. But for `_serve` and what that
    calls, all of it is the main loop's."""

    def __init__(
        self, number: int, lane: Lane, engine: Engine, clock: Clock, tell: Callable[[_Told], None], *, timed: bool
    ) -> None:
        self.run: Run | None = None  # under way
        self._stopped = list[RequestId]()  # its requests that are to be forgotten when it has ended
        self._lane = lane
        self._clock = clock
        self._engine = engine
        self._tell = tell
        self._timed = timed
        self._name = f"lane {number}"
        self._worker = RunWorker(engine, clock, self._deliver, self._interrupted)
        self._runs: SimpleQueue[BegunRun | None] = SimpleQueue()
        self._ending = False
        self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
        self._thread.start()
        assert self._thread.ident is not None
        self.progress = LaneProgress(time.pthread_getcpuclockid(self._thread.ident))

    @property
    def share(self) -> int:
        return self._lane.share

    def begin(self, run: Run) -> None:
        """Raises EngineFailed; then there is no run."""
        assert self.run is None, "one run at a time"
        begun = self._worker.begin(run)
        self.run, self._ending = run, False
        self.progress.began_s = time.monotonic()
        self._runs.put(begun)

    def end_soon(self) -> None:
        """After the step under way."""
        self._ending = True

    def stop(self, request: RequestId) -> bool:
        """Whether it is forgotten later, because the run has it."""
        if self.run is None or all(row.job.request != request for row in self.run.rows):
            return False
        self._stopped.append(request)
        return True

    def ended(self) -> None:
        self.run, self.progress.began_s = None, None
        self.progress.steps += 1
        for request in self._stopped:
            self._engine.stop(request)
        self._stopped.clear()

    def close(self) -> None:
        """Waits for the step under way."""
        self._ending = True
        self._runs.put(None)
        self._thread.join()
        self._lane.close()

    # --- the thread's side

    def _serve(self) -> None:
        setthreadtitle(self._name)  # for readers of the list of threads
        try:
            compute_in(self._lane)
            processor = ThreadClock()
            while (begun := self._runs.get()) is not None:
                began_ns = processor.now_ns()
                answer: Stepped | StepFailed
                try:
                    answer = self._worker.steps(begun)
                except EngineFailed as error:
                    answer = failed(error, begun.run)
                took_ns = processor.now_ns() - began_ns
                if self._timed and isinstance(answer, Stepped):
                    answer = replace(answer, processor_ns=took_ns)
                self._tell(_Ended(begun.run, answer, self._clock.now_ns(), took_ns))
        except BaseException as error:  # noqa: BLE001 - the main loop raises it: without this lane there is no instance
            self._tell(error)

    def _deliver(self, messages: list[Delivered]) -> None:
        self._tell(messages)

    def _interrupted(self) -> bool:
        self.progress.steps += 1
        return self._ending


class Lanes:
    """The divisions that an instance's device offers, the one it has now, and the runs on its lanes. `deliver` sends
    tokens to their proxies."""

    def __init__(
        self,
        device: Device,
        offered: Sequence[Shares],
        engine: Engine,
        clock: Clock,
        deliver: Callable[[list[Delivered]], None],
        spans: SpanLog,
        progress: LoopProgress,
    ) -> None:
        self._device = device
        self._engine = engine
        self._clock = clock
        self._deliver = deliver
        self._spans = spans
        self._progress = progress
        self.offered = tuple(offered)
        self.wakeup = Wakeup() if self.divisible else None
        """Rings when there is something for `drain`."""
        self.shares = WHOLE
        self._lanes: tuple[LaneThread, ...] = ()  # of the division of now
        self._threads: dict[Shares, tuple[LaneThread, ...]] = {}  # of every division there was, kept for the next time
        self._told: SimpleQueue[_Told] = SimpleQueue()

    @property
    def divisible(self) -> bool:
        return len(self.offered) > 1

    @property
    def divided(self) -> bool:
        return bool(self._lanes)

    def divide(self, shares: Shares) -> None:
        """No run is under way. Threads are started the first time that a division is asked for."""
        assert shares in self.offered and not any(lane.run for lane in self._lanes)
        self.shares = shares
        if shares != WHOLE and shares not in self._threads:
            lanes = self._device.lanes(shares)
            self._threads[shares] = tuple(
                [
                    LaneThread(number, lane, self._engine, self._clock, self._tell, timed=self._device.lanes_are_timed)
                    for number, lane in enumerate(lanes)
                ]
            )
        self._lanes = self._threads.get(shares, ())
        self._progress.lanes = tuple([lane.progress for lane in self._lanes])

    def begin(self, run: Run) -> list[StepFailed]:
        """Begins the run on its lane, while the device is divided; or says that it failed at once."""
        try:
            self._lanes[run.lane].begin(run)
        except EngineFailed as error:
            return [failed(error, run)]
        return []

    def end_soon(self, lane: int) -> None:
        """The run on this lane ends after the step under way, if there is one."""
        if self._lanes:
            self._lanes[lane].end_soon()

    def stop(self, request: RequestId) -> None:
        """The engine forgets the request: at once, or when the run that has it has ended."""
        if not any([lane.stop(request) for lane in self._lanes]):
            self._engine.stop(request)

    def drain(self) -> list[Stepped | StepFailed]:
        """Sends the tokens that were made on, in order. The results of the runs that ended, for the core. Raises what
        ended a lane's thread."""
        ended = list[Stepped | StepFailed]()
        if self.wakeup is None:
            return ended
        self.wakeup.clear()
        while True:
            try:
                told = self._told.get_nowait()
            except Empty:
                return ended
            if isinstance(told, BaseException):
                raise told
            if isinstance(told, _Ended):
                lane = self._lanes[told.run.lane]
                lane.ended()
                if isinstance(told.answer, Stepped):
                    self._spans.ran_on_lane(told.run, told.answer, told.stop_ns, told.processor_ns, lane.share)
                ended.append(told.answer)
            else:
                self._deliver(told)

    def close(self) -> None:
        """Waits for the steps under way."""
        self._progress.lanes = ()
        for lanes in self._threads.values():
            for lane in lanes:
                lane.close()
        if self.wakeup is not None:
            self.wakeup.close()

    def _tell(self, told: _Told) -> None:
        assert self.wakeup is not None
        self._told.put(told)
        self.wakeup.ring()
