"""The reasons why weights and KV leave the device of a decode or mixed instance, and which batches stay in their
place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aegis.core.decision import Decision, DecisionKind, Why
from aegis.core.estimators import Latency
from aegis.core.ids import InstanceId, ModelId
from aegis.core.wording import UNWANTED, count, given_up, leaves, request_of, stays, when
from decode.reasons import slack_ns
from decode.sequences import Sequence as Request
from decode.worklist import Batch, WorkList


class EvictionReasons:
    """The reasons of one instance. `now_ns` is the time of the current event."""

    def __init__(self, instance: InstanceId, work: WorkList, latency: Mapping[ModelId, Latency]) -> None:
        self.now_ns = 0
        self._instance = instance
        self._work = work
        self._latency = latency

    def weights(self, victim: ModelId, spared: ModelId | None, needed: ModelId | None) -> Decision:
        """The weights have left for the `needed` model; None: for another instance. `spared` would have been next to
        go."""
        batch, other = self._first(victim), self._first(spared)
        because = self._next_use(batch)
        if spared is not None:
            because = stays(because, spared, self._next_use(other))
        why = Why(
            because,
            self._slack_ns(batch),
            self._latency[victim].switch_ns(),
            spared,
            self._slack_ns(other),
            None if spared is None else self._latency[spared].switch_ns(),
        )
        what = leaves(f"weights of {victim} leave", needed)
        return self._decision(victim, batch.sequences if batch else (), what, why)

    def kv(self, moved: Sequence[Request], batch: Batch, spared: Batch | None, needed: ModelId | None) -> Decision:
        """The KV is on its way to host memory; `spared` would have been next."""
        because = f"of what is on the device it is needed last, {self._next_use(batch)}"
        if spared is not None:
            because = stays(because, f"that of {spared.model}", self._next_use(spared))
        lost = spared.model if spared else None
        why = Why(because, self._slack_ns(batch), lost=lost, lost_slack_ns=self._slack_ns(spared))
        what = leaves(f"KV of {count(len(moved), 'request')} of {batch.model} moves to host memory", needed)
        return self._decision(batch.model, moved, what, why)

    def youngest(self, sequence: Request) -> Decision:
        """The KV of its own batch's youngest sequence is on its way to host memory."""
        job, model = sequence.job, sequence.job.model
        what = f"KV of {request_of(job.request, model, job.priority)} moves to host memory for the rest of its batch"
        why = Why("it is the youngest there, and nothing of others is left to move")
        return self._decision(model, (sequence,), what, why)

    def rotated(self, last: Request, first: Request) -> Decision:
        """KV of the `last` request goes to host memory, to make room for that of the `first` one of its batch."""
        job, model = last.job, last.job.model
        what = f"KV of {request_of(job.request, model, job.priority)} moves to host memory for another of its batch"
        why = Why(
            f"it is furthest ahead of its deadlines, and {request_of(first.job.request, model)} is about to be late"
        )
        return self._decision(model, (last,), what, why)

    def gave_up(self, sequence: Request, because: str) -> Decision:
        """The request is given up here; its proxy places it anew, and it is prefilled again."""
        job = sequence.job
        what = given_up(job.request, job.model, sequence.generated, job.priority)
        why = Why(f"{because}; it is to be prefilled again")
        return Decision(self.now_ns, self._instance, DecisionKind.REFUSE, job.model, (job.request,), what, why)

    def _decision(self, model: ModelId, requests: Sequence[Request], what: str, why: Why) -> Decision:
        names = tuple([each.job.request for each in requests])
        return Decision(self.now_ns, self._instance, DecisionKind.EVICT, model, names, what, why)

    def _first(self, model: ModelId | None) -> Batch | None:
        """The model's batch whose turn comes first."""
        return next((batch for batch in self._work.upcoming() if batch.model == model), None)

    def _next_use(self, batch: Batch | None) -> str:
        if batch is None:
            return UNWANTED
        upcoming, own_ns = self._work.upcoming(), self._slack_ns(batch)
        place = f"its turn is number {upcoming.index(batch) + 1} of {len(upcoming)}"
        return place if own_ns is None else f"{place} and has to begin {when(own_ns)}"

    def _slack_ns(self, batch: Batch | None) -> int | None:
        """The slack, seen from now, by the last plan; None if the batch was not in it."""
        views = self._work.plan.batches
        view = next((view for view in views if batch is not None and view.batch == batch.batch), None)
        return slack_ns(view, self.now_ns) if view else None
