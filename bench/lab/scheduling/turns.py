"""Turns on one instance with many models, timed: the plan alone, and the whole of the decision that the core takes.

Prefills and steps take no time of ours; every run makes one step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from aegis.core.effects import CopyBlocks, Effect, LoadWeights, Run, StreamName
from aegis.core.estimators import Hardware
from aegis.core.events import InstanceEvent, Progress, Stepped
from aegis.core.ids import InstanceId, PageRun, RequestId
from aegis.core.messages import AddModel, Cancel, GrantPages, Submit
from aegis.core.request import Job, Sampling, Token
from aegis.core.views import BatchView, RoundPolicy, Turn, TurnRules
from bench.lab.scheduling.placements import make_spec
from decode.core import DecodeCore
from memory.budget import Budget
from memory.ledger import Ledger

_PAGE_BYTES, _SLAB_BYTES = 2 << 20, 1 << 30
_PROMPT = tuple(range(100))
_STEP_NS = 20_000_000
_HARDWARE = Hardware(copy_bytes_per_s=2e10, memory_bytes_per_s=2e12, flops_per_s=3e14)


class TimedPolicy:
    """A policy whose plans are timed: `durations_ns` are those of plans of `batches` batches."""

    def __init__(self, policy: RoundPolicy, batches: int) -> None:
        self.durations_ns: list[int] = []
        self._policy = policy
        self._batches = batches

    @property
    def rules(self) -> TurnRules:
        return self._policy.rules

    def plan(self, batches: Sequence[BatchView], now_ns: int) -> list[Turn]:
        start_ns = time.perf_counter_ns()
        turns = self._policy.plan(batches, now_ns)
        if len(batches) == self._batches:
            self.durations_ns.append(time.perf_counter_ns() - start_ns)
        return turns


class Turns:
    """A mixed instance that holds all of `models` models, with a request of each. `durations_ns` are those from the end
    of a run to the next run, a request having come meanwhile: a plan over all batches is made in each."""

    def __init__(self, policy: RoundPolicy, models: int) -> None:
        self.durations_ns: list[int] = []
        self._specs = [make_spec(index) for index in range(models)]
        weights = sum(-(-spec.manifest.image_bytes // _PAGE_BYTES) for spec in self._specs)
        pages = weights + models * _SLAB_BYTES // _PAGE_BYTES
        budget = Budget(pages=pages, page_bytes=_PAGE_BYTES, slab_bytes=_SLAB_BYTES, host_slabs=models, instances=1)
        words = {stream: word for word, stream in enumerate(StreamName)}
        ledger = Ledger(budget, words, address_pages=pages)
        self._core = DecodeCore(InstanceId("mixed-0"), ledger, policy, _HARDWARE)
        self._now_ns = 0
        self._rows = 0  # of the run under way
        self._tell(GrantPages((PageRun(0, pages),)))
        for number, spec in enumerate(self._specs):
            self._tell(AddModel(spec))
            self._arrive(number)

    def measure(self, turns: int) -> None:
        models = len(self._specs)
        for number in range(models, models + turns):
            self._arrive(number)
            self._now_ns += _STEP_NS
            stepped = Stepped(((Token(0),) * self._rows,), _STEP_NS)
            start_ns = time.perf_counter_ns()
            effects = self._core.on(stepped, self._now_ns)
            self.durations_ns.append(time.perf_counter_ns() - start_ns)
            self._perform(effects)
            self._tell(Cancel(RequestId(number), 1))

    def _arrive(self, number: int) -> None:
        model = self._specs[number % len(self._specs)].model
        job = Job(RequestId(number), 1, model, _PROMPT, Sampling(max_tokens=1 << 20), self._now_ns)
        self._tell(Submit(job))

    def _tell(self, event: InstanceEvent) -> None:
        self._perform(self._core.on(event, self._now_ns))

    def _perform(self, effects: list[Effect]) -> None:
        """Performs the effects at once, but for a decode run."""
        for effect in effects:
            match effect:
                case LoadWeights() | CopyBlocks():
                    self._tell(Progress(effect.stream, effect.event.value))
                case Run() if effect.prompts:
                    self._now_ns += _STEP_NS
                    made = tuple([Token(0) for row in effect.rows if row.samples])
                    self._tell(Stepped((made,) if made else (), _STEP_NS))
                case Run():
                    self._rows = len(effect.rows)
