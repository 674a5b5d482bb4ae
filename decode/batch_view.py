"""The view of a batch that a policy of turns gets when it makes a plan."""

from __future__ import annotations

from math import exp
from typing import Final, NamedTuple

from aegis.core.effects import Row
from aegis.core.estimators import Latency
from aegis.core.events import Stepped
from aegis.core.model import Slo
from aegis.core.views import BatchView, worth_of
from decode.answer_lengths import AnswerLengths
from decode.batch_requests import BatchRequests
from decode.sequences import HOST, NOWHERE, Sequence
from decode.step_times import ChangeTimes, StepTimes
from decode.worklist import PLAN_NS, Batch, WorkList
from memory.instance_models import InstanceModels
from memory.ledger import Ledger


class BatchViews:
    """Makes the views of one instance's batches that its policy sees."""

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
        self.answers = AnswerLengths()
        self._models = models
        self._change_times = change_times

    def ran(self, stepped: tuple[Sequence, ...], prompts: tuple[Row, ...], event: Stepped, now_ns: int) -> None:
        """A run has ended. The first of the sequences that `stepped` had the rows of `prompts`, the others decoded;
        their tokens are not counted yet. Where only some rows of a batch had a decode step, it counts as that part of a
        step of all."""
        turn, streams = self.work.turn, stepped[len(prompts) :]
        if prompts:
            latency = self.step_times.latency[stepped[0].job.model]
            self._change_times.counts(0, sum([latency.prefill_ns(row.stop, row.start) for row in prompts]))
        if streams:
            model, rows, of = streams[0].job.model, len(streams), len(streams)
            if turn and turn.batch.model == model and not event.lane:
                of = max(len(turn.batch.sequences) - turn.batch.waiting - turn.batch.beside, rows)
            context_tokens = sum([sequence.cached for sequence in streams]) * of // rows
            step_ns = self.step_times.latency[model].decode_ns(context_tokens, of)
            self._change_times.counts(len(event.steps) * step_ns * rows / of)
            if event.lane:
                self._change_times.ran_beside(event.duration_ns)
        if not event.lane:
            window_ns = self.ledger.specs[turn.batch.model].slo.ttft_ns if turn else event.duration_ns
            self._change_times.ended(event.duration_ns, now_ns, window_ns)

    def of(self, batch: Batch, now_ns: int) -> BatchView:
        """Only values that the rules of the policy ask for are computed. Sequences in a run on the second lane are left
        out. The view of a batch that rests is kept for as long as a plan may be: of what it says, only estimates and
        what depends on time change meanwhile."""
        model, weights = batch.model, self.ledger.weights
        active, there = model == self._models.active, weights.is_resident(model)
        resident = there or weights.is_loading(model)
        had_turn_ns = self.work.had_turn_ns(batch, now_ns)
        defers = self.work.rules.defers_refused and had_turn_ns is None
        seen = self._seen(batch, self.ledger.specs[model].slo, defers=defers)
        kept = seen.view
        if kept and now_ns < seen.view_until_ns and _is_as_then(kept, active, there, resident):
            return kept
        view = self._view(batch, seen, active, there, resident, had_turn_ns, now_ns)
        if seen is batch.resting:
            seen.view, seen.view_until_ns = view, now_ns + len(self.work.batches) * PLAN_NS
        return view

    def _view(
        self,
        batch: Batch,
        seen: BatchRequests,
        active: bool,
        there: bool,
        resident: bool,
        had_turn_ns: int | None,
        now_ns: int,
    ) -> BatchView:
        rules, model, slo = self.work.rules, batch.model, seen.slo
        latency, cuts = self.step_times.latency[model], rules.chunk_tokens is not None
        change_ns, switch_ns = self._change_times.ns, latency.switch_ns()
        waiting, decoding, following = seen.waiting, seen.decoding, seen.following
        step_ns = latency.decode_ns(seen.context_tokens, len(seen.requests))
        lead_ns = step_ns + (0 if resident else switch_ns) + (0 if active else change_ns)
        prefill_ns = latency.prefills_ns(seen.prompts, seen.tokens, seen.squares) if seen.prompts else 0
        savable_due_ns, prompt_rank_ns, prompt_ns, piece_ns = None, None, 0, 0
        worth = _worth(seen, lead_ns, prefill_ns, step_ns, self.answers.mean(model), now_ns) if rules.sheds else _NONE
        if cuts and decoding:
            savable_due_ns = min([due for due, _ in decoding if due + slo.tbt_ns > now_ns], default=None)
        if cuts and following:
            prompt_rank_ns = following.rank_ns
            prompt_ns, piece_ns = _next_prompt(following, latency, slo, rules.chunk_tokens or 0)
        return BatchView(  # by position: names would take most of the time of a view
            batch.batch,
            model,
            step_ns,
            slo.tbt_ns,
            switch_ns,
            change_ns,
            tuple(seen.requests),
            seen.prompts,
            prefill_ns,
            min([urgent for _, urgent in waiting]) if waiting else None,
            active,
            batch.decoded_ns,
            batch.ran_ns,
            min([urgent for _, urgent in decoding]) if decoding else None,
            savable_due_ns,
            slo.ttft_ns,
            resident,
            had_turn_ns,
            worth.in_time_by_ns,
            worth.of_requests,
            there and (had_turn_ns is not None or now_ns >= batch.stuck_until_ns),
            slo.gap_ns,
            seen.stream_ns if cuts else None,
            prompt_ns,
            piece_ns,
            prompt_rank_ns,
            self._change_times.stall_ns,
            self._change_times.steps_share,
            worth.late_ns,
            self._change_times.abreast,
            worth.on_time,
            prefill_ns * seen.again_tokens // seen.tokens if seen.again_tokens else 0,
        )

    def _seen(self, batch: Batch, slo: Slo, *, defers: bool) -> BatchRequests:
        """Under overload, looking at each request that waits took most of the time of a plan. While a batch has no turn
        and nothing on the device, nothing about its requests changes but the time."""
        seen = batch.resting
        if seen is not None and seen.slo is slo:
            return seen
        turn, sequences = self.work.turn, batch.sequences
        just_had = turn is not None and turn.batch is batch
        seen = BatchRequests(sequences, slo, defers_refused=defers, defers_arriving=defers and just_had)
        has_turn = batch is self.work.holder or (turn is not None and batch is turn.batch)
        if not has_turn and all([_rests(each) for each in sequences]):
            batch.resting = seen
        return seen


class _Worth(NamedTuple):
    """The latest start with which the first token that can be on time is, what the requests are worth, how many of them
    are on time, and by how much tokens of streams will be late, on average of all requests."""

    in_time_by_ns: int | None
    of_requests: float
    on_time: float
    late_ns: int


_NONE: Final = _Worth(None, 0.0, 0.0, 0)


def _is_as_then(view: BatchView, active: bool, there: bool, resident: bool) -> bool:
    return view.active == active and view.there == there and view.resident == resident


def _rests(sequence: Sequence) -> bool:
    where = sequence.where
    return (where is HOST or where is NOWHERE) and not sequence.prefix and not sequence.beside


def _next_prompt(sequence: Sequence, latency: Latency, slo: Slo, chunk_tokens: int) -> tuple[int, int]:
    """The estimated time of its prefill, as far as it is still to be done, and of the least part of it that is run."""
    stop = sequence.cached
    start = stop - sequence.lacks
    prompt_ns = latency.prefill_ns(stop, start)
    if prompt_ns <= slo.gap_ns // 2 or not chunk_tokens:
        return prompt_ns, prompt_ns
    return prompt_ns, latency.prefill_ns(min(start + chunk_tokens, stop), start)


def _worth(
    seen: BatchRequests, lead_ns: int, prefill_ns: int, step_ns: int, answer_tokens: float, now_ns: int
) -> _Worth:
    """A request that is on time is worth what its priority says. One that is late makes no token on time before it has
    caught up, which takes `late / (TBT - step)` tokens. Lengths of answers being about exponential, it makes more than
    that with a chance of `exp(-tokens / answer_tokens)`, and is worth that part."""
    in_time_by_ns: int | None = None
    worth, on_time, streams_late_ns, slo = 0.0, 0.0, 0, seen.slo
    lost_per_ns = 1.0 / (max(slo.tbt_ns - step_ns, 1) * answer_tokens)
    for deadlines, ahead_ns in ((seen.waiting, lead_ns + prefill_ns), (seen.decoding, lead_ns)):
        for due_ns, urgent_ns in deadlines:
            late_ns = now_ns - due_ns + ahead_ns
            value = 1.0 if urgent_ns == due_ns else worth_of((urgent_ns - due_ns) // slo.ttft_ns)
            if late_ns > 0:
                chance = exp(-late_ns * lost_per_ns)
                worth += value * chance
                on_time += chance
                streams_late_ns += late_ns if deadlines is seen.decoding else 0
                continue
            worth += value
            on_time += 1.0
            begin_by_ns = urgent_ns - ahead_ns
            if in_time_by_ns is None or begin_by_ns < in_time_by_ns:
                in_time_by_ns = begin_by_ns
    return _Worth(in_time_by_ns, worth, on_time, streams_late_ns // max(len(seen.requests), 1))
