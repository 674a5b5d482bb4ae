"""The times of decode steps: what an instance learns of them, and how often it reports them."""

from __future__ import annotations

from math import exp
from typing import Final

from aegis.core.clock import NS_PER_S
from aegis.core.estimators import Hardware, Latency
from aegis.core.ids import ModelId
from aegis.core.messages import StepsTook
from aegis.core.model import ModelSpec

_NEWEST_SHARE: Final = 1 / 8
_STALL_SHARE: Final = 1 / 64
_LEAST_NS: Final = 5_000_000  # less makes no difference to turns, and may be noise


class ChangeTimes:
    """What changes cost one instance, as it learns it. `ns`: the time of a change of models besides its copies, which
    passed before a run although nothing had to be waited for, and that its steps do not account for, compared with runs
    without a change. `stall_ns`: the time without a run before the first one of another batch than the last one's, with
    all that it waited for, be it weights or KV; what came in during the run before is not in it. None: there was none.
    `steps_share`: the part of the time in which there was work that steps account for, by their estimates, and
    `work_share` that of steps and prompts. The rest went into changes, rows that were not there, and what no estimate
    knows. Where two batches go on at a time they may be more than all. `abreast`: of the time of the turns' runs, the
    part in which another batch had steps beside them.
    """

    def __init__(self) -> None:
        self.ns = 0
        self.stall_ns: int | None = None
        self._stalls = 0
        self._usual_ns = 0.0
        self._changed_ns = 0.0
        self._batch = -1
        self.begun_ns = 0
        self._changes = False
        self._ended_ns: int | None = None
        self.steps_share = 1.0
        self.work_share = 1.0
        self._steps_ns = 0.0
        self._prompts_ns = 0.0
        self.abreast = 0.0
        self._beside_ns = 0
        self._beside_share = 0.0
        self._run_share = 0.0

    def begins(self, batch: int, now_ns: int, *, changes: bool, pause: bool) -> None:
        """A run. It `changes` the model."""
        if not pause and batch != self._batch:
            if self._ended_ns is not None:
                stall_ns, before_ns = now_ns - self._ended_ns, self.stall_ns
                self._stalls += 1
                share = max(_STALL_SHARE, 1 / self._stalls)
                self.stall_ns = stall_ns if before_ns is None else round(before_ns + (stall_ns - before_ns) * share)
            self._batch = batch
        self.begun_ns, self._changes = now_ns, changes

    def counts(self, steps_ns: float, prompts_ns: float = 0.0) -> None:
        """Of a run that has ended, by their estimates."""
        self._steps_ns += steps_ns
        self._prompts_ns += prompts_ns

    def ran_beside(self, duration_ns: int) -> None:
        """Steps of another batch than the turn's, in a run that has ended."""
        self._beside_ns += duration_ns

    def ended(self, duration_ns: int, now_ns: int, window_ns: int) -> None:
        """The run, of which its steps took that long. Shares are averages over the window."""
        spent_ns = max(now_ns - (self.begun_ns if self._ended_ns is None else self._ended_ns), 1)
        steps_ns, work_ns = self._steps_ns, self._steps_ns + self._prompts_ns
        self._steps_ns = self._prompts_ns = 0.0
        beside_ns = min(self._beside_ns, spent_ns)
        self._beside_ns -= beside_ns  # the rest was beside runs before this one
        newest = 1 - exp(-spent_ns / max(window_ns, 1))
        self.steps_share += (min(steps_ns, spent_ns + beside_ns) / spent_ns - self.steps_share) * newest
        if self._ended_ns is not None:  # after a rest there may be work that went on beside nothing
            self.work_share += (work_ns / spent_ns - self.work_share) * newest
        self._beside_share += (beside_ns / spent_ns - self._beside_share) * newest
        self._run_share += (min(duration_ns / spent_ns, 1.0) - self._run_share) * newest
        self.abreast = min(self._beside_share / self._run_share, 1.0) if self._run_share else 0.0
        lost_ns = now_ns - self.begun_ns - duration_ns
        if self._changes:
            self._changed_ns += (lost_ns - self._changed_ns) * _NEWEST_SHARE
        else:
            self._usual_ns += (lost_ns - self._usual_ns) * _NEWEST_SHARE
        learned_ns = round(self._changed_ns - self._usual_ns)
        self.ns = learned_ns if learned_ns >= _LEAST_NS else 0
        self._ended_ns = now_ns

    def idle(self) -> None:
        """There is no work: until there is, nobody waits."""
        self._ended_ns = None


_AGAIN_NS: Final = NS_PER_S
"""The least time between two reports about one model. A report is repeated even if nothing has changed, because a proxy
may be new."""


class StepTimes:
    """The step times of one instance."""

    def __init__(self, hardware: Hardware, change_times: ChangeTimes) -> None:
        self.latency: dict[ModelId, Latency] = {}
        self._hardware = hardware
        self._change_times = change_times
        self._reported_ns: dict[ModelId, int] = {}

    def add(self, spec: ModelSpec) -> None:
        self.latency[spec.model] = Latency(spec.manifest, self._hardware)

    def saw(self, model: ModelId, now_ns: int, *, context_tokens: int, rows: int, step_ns: int) -> StepsTook | None:
        """Teaches the estimates; returns the report for proxies, if it is time. The report is the estimate, in which a
        single slow step counts for little."""
        latency = self.latency[model]
        latency.saw_decode(context_tokens, step_ns, rows)
        reported_ns = self._reported_ns.get(model)
        if reported_ns is not None and now_ns < reported_ns + _AGAIN_NS:
            return None
        self._reported_ns[model] = now_ns
        took_ns, work_share = latency.decode_ns(context_tokens, rows), self._change_times.work_share
        return StepsTook(model, context_tokens, rows, took_ns, work_share)

    def forget(self, model: ModelId) -> None:
        del self.latency[model]
        self._reported_ns.pop(model, None)
