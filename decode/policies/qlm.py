"""Request groups, swapped by deadline: like QLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aegis.core.ids import InstanceId
from aegis.core.views import BatchView, DecodeView, Renewal, Turn, TurnRules, Work
from decode.policies.serverlessllm import idle_instance

_RULES = TurnRules(renewal=Renewal.ARRIVAL)


@dataclass(frozen=True, slots=True)
class Qlm:
    """Requests of one model form a group, which waits in the virtual queue of one instance.

    A request joins a group of its model; without one, it makes a group on an idle instance, else on the shortest queue.
    A group runs until it is done; then the group whose next token is due first follows. If it `preempts`, a group is
    swapped out, its KV kept, when the first token of another one would be late otherwise, and only then: nobody is
    swapped out for what is late anyway.

    QLM plans all queues together, by estimates of waiting times. Here a queue is as long as it has groups.
    """

    preempts: bool = True
    rules: TurnRules = _RULES

    def place(self, work: Work, lists: DecodeView) -> InstanceId:
        for share in lists.shares(work.model):
            if share.room_tokens >= work.tokens:
                return share.instance
        return idle_instance(work.model, lists) or lists.by_length[0].instance

    def plan(self, batches: Sequence[BatchView], now_ns: int) -> list[Turn]:
        order = sorted(batches, key=_due)
        running = next((batch for batch in order if batch.turn_ns is not None), None)
        if running is None:
            return [Turn(batch.batch, None) for batch in order]
        urgent, begin_ns = self._next_head(order, running, now_ns) if self.preempts else (None, None)
        first, quota_ns = (urgent, None) if urgent else (running, begin_ns and begin_ns - now_ns)
        others = [Turn(batch.batch, None) for batch in order if batch is not first]
        return [Turn(first.batch, quota_ns), *others]

    def _next_head(
        self, order: Sequence[BatchView], running: BatchView, now_ns: int
    ) -> tuple[BatchView | None, int | None]:
        """The group that has to begin now, or when the next one has to; a step of the running one earlier."""
        begins = [
            (batch.first_due_ns - batch.switch_ns - batch.prefill_ns, batch.batch, batch)
            for batch in order
            if batch.first_due_ns is not None and batch.model != running.model
        ]
        timely = [each for each in begins if each[0] >= now_ns]
        if not timely:
            return None, None
        latest_ns, _, batch = min(timely, key=lambda each: each[:2])
        begin_ns = latest_ns - running.step_ns
        return (batch, None) if begin_ns <= now_ns else (None, begin_ns)


def _due(batch: BatchView) -> tuple[bool, int, int]:
    """The deadline of the next token of any of its requests."""
    deadlines = [due_ns for due_ns in (batch.first_due_ns, batch.due_ns) if due_ns is not None]
    return (not deadlines, min(deadlines, default=0), batch.batch)
