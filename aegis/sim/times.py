"""The times at which tokens are made, without an event for each."""

from __future__ import annotations

from aegis.sim.processor_sharing import RunProgress
from aegis.sim.step_costs import StepCosts


class Times:
    """The ends of the steps of a run: `of(k)` for step k, from 0. Without a `progress` it runs alone."""

    __slots__ = ("_batch", "_context", "_costs", "_progress", "start_ns", "steps")

    def __init__(
        self, costs: StepCosts, start_ns: int, context: int, batch: int, steps: int, progress: RunProgress | None = None
    ) -> None:
        self._costs = costs
        self.start_ns = start_ns
        self._context = context
        self._batch = batch
        self._progress = progress
        self.steps = steps

    def of(self, step: int) -> int:
        work_ns = self._costs.run_ns(self._context, self._batch, step + 1)
        return self._progress.at(work_ns) if self._progress else self.start_ns + work_ns

    def in_time(self, due_ns: int, each_ns: int) -> int:
        """The number of steps that end by their deadlines, that of step k being `due_ns + k * each_ns`."""
        if self._progress:
            return sum([self.of(step) <= due_ns + step * each_ns for step in range(self.steps)])
        budget_ns = due_ns - each_ns - self.start_ns
        return self._costs.steps_in_time(self._context, self._batch, self.steps, budget_ns=budget_ns, each_ns=each_ns)

    def boundary(self, now_ns: int) -> int:
        """How many steps the run will have made when the step under way at `now_ns` ends: at least one, at most all."""
        if now_ns >= self.of(self.steps - 1):
            return self.steps
        elapsed_ns = self._progress.done(now_ns) if self._progress else now_ns - self.start_ns
        whole = self._costs.steps_within(self._context, self._batch, elapsed_ns)
        if whole == 0:
            return 1
        return whole if self.of(whole - 1) == now_ns else whole + 1


class OneStep(Times):
    """The times of a run of one step, which takes `work_ns`."""

    __slots__ = ("_work_ns",)

    def __init__(self, start_ns: int, work_ns: int, progress: RunProgress | None = None) -> None:
        self.start_ns, self.steps, self._progress = start_ns, 1, progress
        self._work_ns = work_ns

    def of(self, step: int) -> int:
        return self._progress.at(self._work_ns) if self._progress else self.start_ns + self._work_ns

    def in_time(self, due_ns: int, each_ns: int) -> int:
        return int(self.of(0) <= due_ns)

    def boundary(self, now_ns: int) -> int:
        return 1
