"""The view of a batch that a policy of turns gets when it makes a plan."""

from __future__ import annotations

from aegis.core.estimators import Latency
from aegis.core.model import Slo
from aegis.core.views import BatchView, TurnRules
from decode.sequences import Sequence, Where
from decode.step_times import ChangeTimes, StepTimes
from decode.worklist import Batch, WorkList
from memory.instance_models import InstanceModels
from memory.ledger import Ledger


class BatchViews:
    """Of the batches of one instance."""

    def __init__(
        self,
        ledger: Ledger,
        work: WorkList,
        models: InstanceModels,
        step_times: StepTimes,
        change_times: ChangeTimes,
    ) -> None:
        self.ledger = ledger
        self.work = work
        self.step_times = step_times
        self._models = models
        self._change_times = change_times

    def of(self, batch: Batch, now_ns: int) -> BatchView:
        model, weights = batch.model, self.ledger.weights
        return view_of(
            batch,
            self.step_times.latency[model],
            self.ledger.specs[model].slo,
            self.work.rules,
            now_ns,
            change_ns=self._change_times.ns,
            active=model == self._models.active,
            resident=weights.is_resident(model) or weights.is_loading(model),
            there=weights.is_resident(model),
            turn_ns=self.work.had_turn_ns(batch, now_ns),
        )


def view_of(
    batch: Batch,
    latency: Latency,
    slo: Slo,
    rules: TurnRules,
    now_ns: int,
    *,
    change_ns: int,
    active: bool,
    resident: bool,
    there: bool,
    turn_ns: int | None,
) -> BatchView:
    """`latency` and `slo` are its model's. Only values that the rules of the policy ask for are computed. Sequences in
    a run on the second lane are left out."""
    sequences = [s for s in batch.sequences if not s.beside] if batch.beside else batch.sequences
    waiting = [s for s in sequences if s.lacks] if batch.waiting else []
    decoding = [s for s in sequences if not s.lacks] if waiting else sequences
    squares = sum([s.cached**2 - (s.cached - s.lacks) ** 2 for s in waiting])
    step_ns = latency.decode_ns(sum([s.cached for s in sequences]), len(sequences))
    switch_ns = latency.switch_ns()
    prefill_ns = latency.prefills_ns(len(waiting), sum([s.lacks for s in waiting]), squares)
    cuts = rules.chunk_tokens is not None
    savable = decoding if cuts else []
    dues = [slo.due_ns(s.job.arrival_ns, s.generated) for s in savable]
    following = batch.next_waiting() if cuts and waiting else None
    streams = [s.last_ns for s in savable if s.last_ns is not None and s.where is Where.DEVICE]
    lead_ns = step_ns + (0 if resident else switch_ns) + (0 if active else change_ns)
    return BatchView(
        batch.batch,
        batch.model,
        step_ns,
        slo.tbt_ns,
        switch_ns,
        change_ns,
        tuple([s.job.request for s in sequences]),
        waiting=len(waiting),
        prefill_ns=prefill_ns,
        first_due_ns=min([s.job.urgent_ns(slo, s.generated) for s in waiting], default=None),
        active=active,
        decoded_ns=batch.decoded_ns,
        due_ns=min([s.job.urgent_ns(slo, s.generated) for s in decoding], default=None),
        savable_due_ns=min([due for due in dues if due + slo.tbt_ns > now_ns], default=None),
        ttft_ns=slo.ttft_ns,
        resident=resident,
        turn_ns=turn_ns,
        relaxed_by_ns=_relaxed_by_ns(
            sequences, slo, now_ns, lead_ns=lead_ns, prefill_ns=prefill_ns, later_ttfts=rules.later_ttfts
        ),
        there=there and now_ns >= batch.stuck_until_ns,
        gap_ns=slo.gap_ns,
        stream_ns=min(streams, default=None),
        prompt_ns=latency.prefill_ns(following.cached, following.cached - following.lacks) if following else 0,
        prompt_rank_ns=following.rank_ns if following else None,
    )


def _relaxed_by_ns(
    sequences: list[Sequence], slo: Slo, now_ns: int, *, lead_ns: int, prefill_ns: int, later_ttfts: float
) -> int | None:
    """The time by which the batch has to begin, if deadlines that cannot be met any more count later."""
    later_ns = round(later_ttfts * slo.ttft_ns)
    if not later_ns:
        return None
    by_ns = []
    for sequence in sequences:
        ahead_ns = lead_ns + (prefill_ns if sequence.lacks else 0)
        late = slo.due_ns(sequence.job.arrival_ns, sequence.generated) - ahead_ns < now_ns
        by_ns.append(sequence.job.urgent_ns(slo, sequence.generated) - ahead_ns + (later_ns if late else 0))
    return min(by_ns)
