"""Runs of prefills of one model each, in an order that saves as many first tokens as can be saved.

Moore-Hodgson (Prism §6.2, Algorithm 2) over jobs whose models may have to be loaded first: the earliest deadline comes
first, and a job joins others of its model if that makes no other job late. If a job is late all the same, the longest
one is sacrificed. With one model this is Moore-Hodgson, which sacrifices as few as possible; with several the problem
is NP-hard, and this is a heuristic. A job that a schedule saves is on time if the estimates are true.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from aegis.core.ids import ModelId
from aegis.core.views import PrefillJob

HEAD = 256
"""The number of jobs, those due first, that are considered if not all can be on time with one run of each model: each
of them may move all the others, and the order is made whenever a job comes or goes."""


@dataclass(slots=True, eq=False)
class Run:
    """Jobs of one model in a row, as positions among those that wait. `load_ns` 0: the model is there."""

    model: ModelId
    jobs: list[int] = field(default_factory=list)
    prefill_ns: int = 0
    latest_ns: int = 0  # the latest start with which none of its jobs is late
    load_ns: int = 0
    start_ns: int = 0

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.prefill_ns


class Schedule:
    """Runs one after the other. Models without loaded weights are loaded meanwhile, one after the other as well."""

    def __init__(self, line: Sequence[PrefillJob], load_ns: Mapping[ModelId, int], now_ns: int) -> None:
        """`load_ns` of models whose weights are not loaded."""
        self.runs: list[Run] = []
        self.sacrificed: list[int] = []
        self._line = line
        self._load_ns = load_ns
        self._now_ns = now_ns
        self._beyond: list[int] = []  # jobs after the first `HEAD`, which are not considered
        self._last: dict[ModelId, Run] = {}  # of each model

    def save(self, *, all_or_none: bool = False) -> bool:
        """Whether all considered jobs are saved. With `all_or_none` it ends as soon as one is not."""
        by_deadline = sorted(range(len(self._line)), key=self._by_deadline)
        hopeful = [at for at in by_deadline if self._soonest_ns(at) <= self._line[at].due_ns]
        if len(hopeful) < len(by_deadline):
            if all_or_none:
                return False
            self.sacrificed = sorted(set(by_deadline) - set(hopeful))
        if self._saves_with_a_run_each(hopeful):
            return not self.sacrificed
        self._beyond = hopeful[HEAD:]
        for at in hopeful[:HEAD]:
            self._save(at)
            if self.sacrificed and all_or_none:
                return False
        return not self.sacrificed

    def order(self) -> list[int]:
        """The order of all jobs. Jobs whose model is loaded need not wait for other models. Jobs that were not
        considered or were sacrificed run beside others of their model, unless that makes another job late; else after
        all the rest."""
        self._bring_forward()
        rest: dict[ModelId, list[int]] = {}
        others = self._beyond + sorted(self.sacrificed, key=self._by_deadline)
        for number, at in enumerate(others):
            if number >= HEAD or not self._squeeze_in(at):
                rest.setdefault(self._line[at].model, []).append(at)
        return [at for jobs in (*[run.jobs for run in self.runs], *rest.values()) for at in jobs]

    # --- who is saved -------------------------------------------------------------------------------------------------

    def _saves_with_a_run_each(self, jobs: Sequence[int]) -> bool:
        """Whether all can be saved with one run of each model, as is most often the case."""
        for at in jobs:
            model = self._line[at].model
            self._put(at, self._last.get(model) or self._add_run(model))
        self._time()
        if not self._somebody_is_late():
            return True
        self.runs.clear()
        self._last.clear()
        return False

    def _save(self, at: int) -> None:
        if self._join_last_run(at):
            return
        model = self._line[at].model
        goes_on = bool(self.runs) and self.runs[-1].model == model
        self._put(at, self.runs[-1] if goes_on else self._add_run(model))
        self._time()
        while self._somebody_is_late():
            self._sacrifice()

    def _join_last_run(self, at: int) -> bool:
        """Puts the job into the last run of its model if nobody is late by that; whether it did."""
        job = self._line[at]
        run = self._last.get(job.model)
        if run is None or run.end_ns + job.prefill_ns > job.due_ns or not self._can_grow(run, job.prefill_ns):
            return False
        self._put(at, run)
        self._time()
        return True

    def _sacrifice(self) -> None:
        """Sacrifices, of the jobs with the least priority, the longest one; of equally long ones, the one with the
        latest deadline."""
        everybody = [(*self._expendable(at, run), number) for number, run in enumerate(self.runs) for at in run.jobs]
        _, _, _, job, number = max(everybody)
        run = self.runs[number]
        left = [at for at in run.jobs if at != job]
        run.jobs, run.prefill_ns = [], 0
        for at in left:
            self._put(at, run)
        if not left:
            del self.runs[number]
            self._last = {run.model: run for run in self.runs}
        self.sacrificed.append(job)
        self._time()

    def _expendable(self, at: int, run: Run) -> tuple[int, int, int, int]:
        job = self._line[at]
        takes_ns = job.prefill_ns + (run.load_ns if len(run.jobs) == 1 else 0)
        priority = (job.urgent_ns - job.due_ns) // job.ttft_ns  # shifts are deadlines of its own model
        return priority, takes_ns, job.due_ns, at

    # --- and what else there is time for ------------------------------------------------------------------------------

    def _bring_forward(self) -> None:
        for at, run in enumerate(self.runs):
            to = at
            while to and not run.load_ns and self.runs[to - 1].load_ns and self._can_wait(to - 1, at, run.prefill_ns):
                to -= 1
            if to < at:
                self.runs.insert(to, self.runs.pop(at))
                self._time()

    def _squeeze_in(self, at: int) -> bool:
        job = self._line[at]
        run = self._last.get(job.model)
        if run is None or not self._can_grow(run, job.prefill_ns):
            return False
        run.jobs.append(at)
        run.prefill_ns += job.prefill_ns
        self._time()
        return True

    # ------------------------------------------------------------------------------------------------------------------

    def _by_deadline(self, at: int) -> tuple[int, int]:
        return self._line[at].urgent_ns, at

    def _soonest_ns(self, at: int) -> int:
        job = self._line[at]
        return self._now_ns + self._load_ns.get(job.model, 0) + job.prefill_ns

    def _add_run(self, model: ModelId) -> Run:
        run = self._last[model] = Run(model)
        self.runs.append(run)
        return run

    def _put(self, at: int, run: Run) -> None:
        job = self._line[at]
        run.prefill_ns += job.prefill_ns
        latest_ns = job.due_ns - run.prefill_ns
        run.latest_ns = min(run.latest_ns, latest_ns) if run.jobs else latest_ns
        run.jobs.append(at)

    def _can_grow(self, run: Run, by_ns: int) -> bool:
        return self._can_wait(self.runs.index(run) + 1, len(self.runs), by_ns)

    def _can_wait(self, start: int, stop: int, delay_ns: int) -> bool:
        """Whether no job in these runs is late if so much more is done before them. A run that waits for its model
        anyway is delayed by less."""
        end_ns = self.runs[start - 1].end_ns if start else self._now_ns
        for run in self.runs[start:stop]:
            delay_ns -= run.start_ns - end_ns
            if delay_ns <= 0:
                return True
            if run.start_ns + delay_ns > run.latest_ns:
                return False
            end_ns = run.end_ns
        return True

    def _somebody_is_late(self) -> bool:
        return any([run.start_ns > run.latest_ns for run in self.runs])

    def _time(self) -> None:
        """The start of each run: the previous run has ended and its model is loaded."""
        end_ns = loaded_ns = self._now_ns
        before: set[ModelId] = set()
        for run in self.runs:
            again = run.model in before
            run.load_ns = self._line[run.jobs[0]].switch_ns if again else self._load_ns.get(run.model, 0)
            before.add(run.model)
            loaded_ns += run.load_ns
            run.start_ns = max(end_ns, loaded_ns) if run.load_ns else end_ns
            end_ns = run.end_ns
