"""The process of one more rank of an instance: does what the first rank says, and decides nothing.

Started as `python -m aegis.instance.follower_rank` with its settings as JSON on standard input.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import msgspec

from aegis.core.clock import NS_PER_S
from aegis.core.effects import Bind, Unbind
from aegis.core.errors import UserError
from aegis.core.ids import ModelId, RequestId
from aegis.core.model import ModelSpec
from aegis.engine.block_table import BlockTable
from aegis.engine.engines import Engines
from aegis.engine.parallel.first_rank_sampler import FirstRankSampler
from aegis.engine.parallel.group import RanksLost
from aegis.engine.protocol import EngineFailed, StepRow, engine_at_work
from aegis.instance.parts import RankMemory, open_rank_memory, poll
from aegis.instance.rank_wire import Command, Discard, LeaderLink, Prepare, Step, Touch, unpacked
from aegis.instance.settings import InstanceSettings
from aegis.process import garbage_collection
from aegis.telemetry import logs
from aegis.telemetry.logs import log

_NOBODY = RequestId(0)
_IDLE_NS = NS_PER_S
_GRACE_S = 1.0
"""A step that failed here has likely failed on the first rank too, which reports whose requests fail."""

_logger = logging.getLogger(__name__)


class Follower:
    """Performs commands in order."""

    def __init__(self, body: RankMemory, engine: Engines, sampler: FirstRankSampler, lead: LeaderLink) -> None:
        self._body = body
        self._memory_executor = body.memory_executor
        self._engine = engine
        self._sampler = sampler
        self._lead = lead
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="build")
        self._building: dict[tuple[ModelId, str], Future[None]] = {}
        self._tables: list[BlockTable] = []

    def serve(self) -> None:
        """Runs until the process is ended."""
        while True:
            in_flight = self._memory_executor.in_flight
            command = self._lead.receive(0 if in_flight else _IDLE_NS)
            if command is not None:
                self._perform(command)
            elif in_flight:
                poll(0)
            self._lead.report(self._memory_executor.progress())

    def _perform(self, command: Command) -> None:
        match command:
            case Step():
                with engine_at_work():
                    self._step(command)
            case Touch(extents):
                self._body.images.touch(extents)
            case Prepare(spec):
                self._building[_key(spec)] = self._thread.submit(self._prepare, spec)
            case Discard(spec):
                self._built(spec)
                self._engine.discard(spec)
            case Bind(spec):
                self._memory_executor.perform(command)
                self._attach(command)
            case Unbind(model):
                self._engine.detach(model)
                self._memory_executor.perform(command)
            case _:
                self._memory_executor.perform(command)

    def _step(self, step: Step) -> None:
        if step.blocks is not None:
            self._tables = [unpacked(blocks) for blocks in step.blocks]
        self._sampler.reports = step.reports
        rows = zip(step.tokens, step.starts, self._tables, step.samples, strict=True)
        self._engine.step(step.model, [StepRow(_NOBODY, *row) for row in rows])

    def _attach(self, bind: Bind) -> None:
        """A model that is refused here is refused by the first rank too, which then sends `Unbind`."""
        self._built(bind.spec)
        with suppress(UserError):
            self._engine.attach(bind.spec, self._memory_executor.weights_base(bind))

    def _prepare(self, spec: ModelSpec) -> None:
        with suppress(UserError):
            self._engine.prepare(spec)

    def _built(self, spec: ModelSpec) -> None:
        if building := self._building.pop(_key(spec), None):
            building.result()


def _key(spec: ModelSpec) -> tuple[ModelId, str]:
    return spec.model, spec.manifest.fingerprint


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=InstanceSettings)
    logs.guard_streams(settings.logs)
    logs.setup(settings.logs)
    sampler = FirstRankSampler()
    try:
        body = open_rank_memory(settings)
        engine = body.engines(settings, sampler)
        garbage_collection.collect_seldom()
        Follower(body, engine, sampler, LeaderLink(settings.rendezvous, settings.rank)).serve()
    except UserError as error:
        sys.stderr.write(f"aegis: {settings.instance}: {error.message}\n")
        return 2
    except RanksLost:
        return 3
    except EngineFailed:
        log(_logger, logging.ERROR, "rank failed", {"rank": settings.rank}, exc_info=True)
        time.sleep(_GRACE_S)
        return 3
    return 0


if __name__ == "__main__":
    code = main()
    logs.finish()
    os._exit(code)
