"""When tokens are made, without an event for each."""

from __future__ import annotations

from aegis.sim.costs import StepCosts
from aegis.sim.pace import Pace


class Times:
    """When the steps of a run end: `of(k)` for step k, from 0. Without a pace it runs alone."""

    __slots__ = ("_batch", "_context", "_costs", "_pace", "start_ns", "steps")

    def __init__(
        self, costs: StepCosts, start_ns: int, context: int, batch: int, steps: int, pace: Pace | None = None
    ) -> None:
        self._costs = costs
        self.start_ns = start_ns
        self._context = context
        self._batch = batch
        self._pace = pace
        self.steps = steps

    def of(self, step: int) -> int:
        work_ns = self._costs.run_ns(self._context, self._batch, step + 1)
        return self._pace.at(work_ns) if self._pace else self.start_ns + work_ns

    @property
    def steady(self) -> bool:
        """Whether each step takes at least as long as the one before."""
        return self._pace is None

    def boundary(self, now_ns: int) -> int:
        """After how many steps the run is when the step under way at `now_ns` ends; at least one."""
        elapsed_ns = self._pace.done(now_ns) if self._pace else now_ns - self.start_ns
        whole = self._costs.steps_within(self._context, self._batch, elapsed_ns)
        if whole == 0:
            return 1
        return whole if self.of(whole - 1) == now_ns else whole + 1


class Once(Times):
    """One step that ends at a time."""

    __slots__ = ()

    def __init__(self, at_ns: int) -> None:
        self.start_ns, self.steps, self._pace = at_ns, 1, None

    def of(self, step: int) -> int:
        return self.start_ns
