"""That nobody starves under `least-slack`, checked on its instances while they are played.

On instances that decode, as `decode.policies.least_slack` states it:

(W1) in a plan nobody comes before a batch that has to begin earlier, unless that one is late and may be shed still, as
     its last turn, or its deadline if it had none, is less than `1 / shed_share` quanta for each batch ago: but the
     running batch, for the rest of its quantum;
(W2) no run begins in a turn whose quantum and prefills are over, but for one where the plan was made anew, and decode
     steps end then;
(W3) while a request waits, a turn that another batch is given was planned for a token due no later than its own may
     count, and no token gets a second one; besides, each other batch has what is left to it of the round. Not counted
     are turns in which prefills took a whole quantum, with their pauses; those with a piece of a prompt, which brings
     that prompt on, or with a run beside them, of which W7 says whom it may keep waiting; those with a step that failed
     and that prompts shared, since it has made nothing: each of them runs alone from then on, so there is one at most
     for each prompt; those that were taken back before a run of theirs; and those without the token's KV: who is there
     is in every run, but KV is brought in as there is room and in the order of the batch, and no turn is put off until
     it has come;
(W4) so it waits for steps and prefills of no more turns than there are such tokens, and prefills and batches besides,
     each of a quantum, its prefills, a run, and a run for each batch for which turns are paused; and when its own token
     counts, for no more than one for each batch and prefill. Turns that W3 does not
     count are in this time, and so are pauses. A wait ends with a run of a turn of its batch, or with one of a pause
     that it is in itself: a turn that was given and taken back before its first run ends none, but where it was taken
     back for memory;
(W6) besides, turns pause: for a step of streams, and only while such steps take no more than the policy's share of the
     time, or for a prompt that fits in a piece: one of a lower rank, or one that is still in time and has to begin
     before the batch that keeps the turn. A pause is one run, and between two for one batch there is a run of the turn.
     Besides, a turn pauses for streams that are there while its weights are on their way, run after run, and not for a
     step longer. W4 does not count these runs: others would wait for the copy as well;
(W7) what runs on a second lane is what was there, on a division that the device offers, and by the guard's word no step
     beside it takes longer than its time between two tokens or its gap target, but for a tenth beside a prompt that
     leaves the decode the largest share. Nobody waits while it runs there but the
     prompts of the turn: so nothing that has to begin later than these is chosen, and steps there end when the policy's
     time for them is over;
(W8) a turn serves who is in its batch. Who decodes and is there is left out of one run at most, of prompts, before it
     is in one. While a prompt waits that is there, or is to begin, and has room, there is one step at most between two
     runs with prompts, unless something runs beside it. Prompts run in the order of their rank, and one that comes
     later than another one by its length has no lower rank: so in turns of its batch a prompt waits for the pieces of
     those before it, and as many steps.

Waits for memory are bounded by none of these: for pages, for room for KV, and for KV to be copied. So a sequence that
was refused room when its batch had the turn waits for no turn, and none is given for it, until its batch has the next
one; unless its batch has no other sequence. A batch that is passed over, because others of its model would lose their
KV to it, waits for none until a request leaves. No turn follows a turn of the same batch for a sequence whose KV is on
its way: others would wait for the copy, too.

On instances that prefill, as `prefill.policies.least_slack` states it:

(W5) a job before which `k` others came, going by their ranks, waits for at most `k + 1` deadlines, each with two loads
     and two prefills.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from aegis.core.clock import NS_PER_MS
from aegis.core.effects import Effect, Run
from aegis.core.errors import LawBroken
from aegis.core.estimators import Hardware
from aegis.core.events import InstanceEvent, StepFailed, Stepped
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.lane_views import LaneChoice, LanesView
from aegis.core.messages import TakeBack
from aegis.core.request import Job
from aegis.core.views import BatchView, PrefillOrder, RoundPolicy, Turn, TurnRules
from decode.core import DecodeCore
from decode.policies.least_slack import LeastSlack
from decode.second_lane import NO_LANES, LaneOffers
from decode.sequences import Sequence as Decoding
from decode.sequences import Where
from decode.worklist import Batch, RunningTurn
from memory.ledger import Ledger
from prefill.core import PrefillCore
from tests.sim.service import Service

RUN_NS = 5 * NS_PER_MS  # of a fake engine: no step and no prefill lasts longer
LOAD_NS = 3 * NS_PER_MS  # nor does a load
_NEVER_NS = 1 << 62
MISJUDGED_NS = 20 * NS_PER_MS  # estimates of steps, prefills and loads that change between a plan and its turns

Token = tuple[RequestId, int, int]  # request, index, attempt: one that is replayed makes it again
_MARGIN = 1.1  # of the guard's word


class Watched:
    """A policy of turns whose plans are checked (W1)."""

    def __init__(self, policy: RoundPolicy, note: Callable[[int], None]) -> None:
        self.policy = policy
        self.note = note  # that a plan is made
        self.quantum_ns = 0  # of the last plan: a turn without its prefills
        self.shed_ns = 0  # for how long a batch may be shed by the last plan
        self.beside_ns = (
            policy.lane_turn_ns if isinstance(policy, LeastSlack) else 0
        )  # steps on the second lane at most

    @property
    def rules(self) -> TurnRules:
        return self.policy.rules

    def plan(self, batches: Sequence[BatchView], now_ns: int) -> list[Turn]:
        self.note(now_ns)
        plan, views = self.policy.plan(batches, now_ns), {batch.batch: batch for batch in batches}
        turns = [turn for turn in plan if not turn.pause]
        by_ns = [_begin_by_ns(views[turn.batch]) for turn in turns]
        first = views[turns[0].batch]
        quotas = [(turn.quota_ns, views[turn.batch].prefill_ns) for turn in turns]
        self.quantum_ns = max(quota_ns - prefill_ns for quota_ns, prefill_ns in quotas if quota_ns is not None)
        if isinstance(self.policy, LeastSlack):
            self.shed_ns = round(len(batches) * (self.quantum_ns + 1) / self.policy.shed_share)
        self._check_pauses([turn for turn in plan if turn.pause], views, views[turns[0].batch], now_ns)
        latest_ns = [_latest_ns(views[turn.batch], ns, self.shed_ns) for ns, turn in zip(by_ns, turns, strict=True)]
        keeps = first.turn_ns is not None and first.turn_ns < self.quantum_ns
        for at in range(int(keeps), len(turns)):
            if by_ns[at] > min(latest_ns[at:]):
                raise LawBroken(f"W1: {turns[at]} comes before a batch that has to begin earlier")
        return plan

    def beside(self, lanes: LanesView, now_ns: int) -> LaneChoice | None:
        assert isinstance(self.policy, LeastSlack)
        choice = self.policy.beside(lanes, now_ns)
        if choice:
            self._check_beside(lanes, choice)
        return choice

    def _check_beside(self, lanes: LanesView, choice: LaneChoice) -> None:
        own = next((c for c in lanes.companions if c.prefills and c.batch.batch == lanes.decoding.batch), None)
        offered = [
            (companion, division)
            for companion in lanes.companions
            for division in companion.divisions
            if (companion.batch.batch, companion.prefills, division.shares)
            == (choice.batch, choice.prefills, choice.shares)
        ]
        if not offered:
            raise LawBroken(f"W7: {choice} is none of what could run beside {lanes.decoding}")
        companion, division = offered[0]
        if own and companion is not own and _begin_by_ns(companion.batch) > _begin_by_ns(own.batch):
            raise LawBroken(f"W7: {choice} comes before the prompt of {own.batch}, which has to begin earlier")
        steps = [(lanes.decoding, division.step_ns)]
        steps += [] if companion.prefills else [(companion.batch, division.beside_ns)]
        margin = _MARGIN if companion.prefills and division is companion.divisions[-1] else 1
        if any(step_ns > margin * min(batch.tbt_ns, batch.gap_ns) for batch, step_ns in steps):
            raise LawBroken(f"W7: {choice} makes a stream wait for longer than it may")

    def _check_pauses(self, pauses: list[Turn], views: dict[int, BatchView], front: BatchView, now_ns: int) -> None:
        for turn in pauses:
            batch = views[turn.batch]
            if turn.decodes:
                assert isinstance(self.policy, LeastSlack) and batch.stream_ns is not None
                streams = [view for view in views.values() if view.stream_ns is not None and view.there]
                half = self.policy.stream_share
                busy_ns = sum([view.step_ns + 2 * view.change_ns for view in streams])
                period_ns = max(batch.gap_ns // 2, round(busy_ns / half))
                saves = sum([(view.step_ns + 2 * view.change_ns) / view.tbt_ns for view in streams]) <= half
                due_ns = batch.savable_due_ns if saves and batch.savable_due_ns is not None else _NEVER_NS
                by_ns = min(batch.stream_ns + period_ns, due_ns) - batch.step_ns - batch.change_ns
                share_by_ns = batch.stream_ns + round(busy_ns / half) - batch.step_ns - batch.change_ns
                early = by_ns < now_ns + front.piece_ns and share_by_ns <= now_ns + front.step_ns
                allowed = by_ns <= now_ns + front.step_ns or early or _comes(front)
            else:
                rank_ns, of_first_ns = batch.prompt_rank_ns, front.prompt_rank_ns
                allowed = rank_ns is not None and of_first_ns is not None and rank_ns < of_first_ns
                allowed = allowed or self._saves(batch, front, now_ns)
                allowed = allowed and batch.prompt_ns <= front.gap_ns // 2
            if not allowed or not batch.there:
                raise LawBroken(f"W6: {turn} pauses the turn of {front}")

    def _saves(self, batch: BatchView, front: BatchView, now_ns: int) -> bool:
        in_time = batch.first_due_ns is not None and now_ns + batch.prompt_ns <= batch.first_due_ns
        sooner = _begin_by_ns(batch) - batch.change_ns <= _latest_ns(front, _begin_by_ns(front), self.shed_ns)
        return in_time and sooner and front.turn_ns is not None


def _comes(front: BatchView) -> bool:
    """Whether it has the turn, and its weights are on their way."""
    return front.turn_ns is not None and front.resident and not front.there


def _begin_by_ns(batch: BatchView) -> int:
    dues = [batch.due_ns, None if batch.first_due_ns is None else batch.first_due_ns - batch.prefill_ns]
    return min([due for due in dues if due is not None]) - batch.step_ns - (0 if batch.resident else batch.switch_ns)


def _latest_ns(batch: BatchView, by_ns: int, shed_ns: int) -> int:
    return _latest_ns_of(by_ns, batch.ran_ns, shed_ns)


def _latest_ns_of(by_ns: int, ran_ns: int, shed_ns: int) -> int:
    return max(by_ns, (ran_ns if ran_ns >= 0 else by_ns) + shed_ns)


@dataclass(frozen=True, slots=True)
class _Pressing:
    """A sequence, and its next token, due at `urgent_ns`."""

    sequence: Decoding
    token: Token
    urgent_ns: int


@dataclass(slots=True)
class _Given:
    """A turn, and the most pressing token of its batch when it was planned."""

    turn: RunningTurn
    pressing: _Pressing
    quantum_ns: int
    filled_ns: int = 0  # with prefills, and with pauses since its first run
    cut: bool = False  # a piece of a prompt ran in it, or its prompts waited for the second lane
    ran: bool = False  # one that was renewed when it was over has begun before, and need have no run of its own
    missed: bool = False  # a run began without the sequence
    failed: bool = False  # a step that prompts shared, which made nothing
    fills: bool = False  # a pause, while the weights of the turn are on their way


@dataclass(slots=True)
class Wait:
    """Of a request, since it came or its batch last had the turn. For these tokens others were given theirs, and to
    these batches as the round went on."""

    since_ns: int
    latest_ns: int = 0  # when its own token counts, or its batch may be shed no longer
    early_ns: int = 0  # others' tokens count so much sooner for their priority
    tokens: set[Token] = field(default_factory=set)
    batches: set[int] = field(default_factory=set)
    turns: dict[tuple[str, int], int] = field(default_factory=dict)  # at most, for each request and batch seen
    round: set[tuple[str, int]] = field(default_factory=set)  # batches, prefills, and steps that failed
    turn_ns: int = 0  # the longest
    pauses: set[int] = field(default_factory=set)  # batches for which turns were paused
    worked_ns: int = 0

    def longest_ns(self) -> int:
        """For which others can work meanwhile. The quota of a turn goes on in its pauses, but for those before its
        first run, of which there is one for each batch. When its own token counts, one turn of each batch may be left,
        and one for each prefill."""
        turn_ns = self.turn_ns + (1 + len(self.pauses)) * RUN_NS
        shed_ns = max(self.latest_ns + self.early_ns + MISJUDGED_NS - self.since_ns, 0)
        return min(sum(self.turns.values()) * turn_ns, shed_ns + len(self.round) * turn_ns)


class WatchedDecodeCore(DecodeCore):
    """Checks W1 to W4 after each event."""

    def __init__(
        self,
        instance: InstanceId,
        ledger: Ledger,
        policy: RoundPolicy,
        hardware: Hardware,
        *,
        reuses: bool = False,
        lanes: LaneOffers = NO_LANES,
    ) -> None:
        self._watched = Watched(policy, self._note_plan)
        self._planned: dict[int, _Pressing] = {}  # of each batch, when the last plan was made
        self._given: _Given | None = None
        self._paused: _Given | None = None  # the turn that goes on after this one, a pause of it
        self._waits: dict[RequestId, Wait] = {}
        super().__init__(instance, ledger, self._watched, hardware, reuses=reuses, lanes=lanes)
        self._service = Service(self._work, self._eviction.fits)

    def on(self, event: InstanceEvent, now_ns: int) -> list[Effect]:
        if isinstance(event, StepFailed) and not event.lane:
            self._failed()
            self._worked(now_ns - self._change_times.begun_ns)
        if isinstance(event, Stepped) and not event.lane:
            self._worked(event.duration_ns)
        effects = super().on(event, now_ns)
        runs = [effect for effect in effects if isinstance(effect, Run)]
        run = next((run for run in runs if not run.lane), None)
        if run:
            self._check_run(run, now_ns)
        self._check_waits(now_ns)
        if run and self._given:
            self._given.ran = True
        if run and run.prompts and self._given:
            self._given.missed |= self._given.pressing.sequence.where is not Where.DEVICE
        elif run:
            self._check_rows(run)
        for each in runs:
            self._service.begins(each)
            if each.lane and not each.prompts and each.until_ns > now_ns + self._watched.beside_ns:
                raise LawBroken(f"W7: steps on the second lane go on until {each.until_ns}")
        return effects

    def _end_turn(self) -> None:
        """Its batch has had it: what it waits for now is memory."""
        turn, holder = self._work.turn, self._work.holder
        for batch in (turn.batch if turn else None, holder):
            for sequence in batch.sequences if batch else ():
                self._waits.pop(sequence.job.request, None)
        super()._end_turn()

    def _note_plan(self, now_ns: int) -> None:
        for batch in self._work.batches:
            sequence = min(self._counted(batch, now_ns) or batch.sequences, key=self._urgent_ns)
            token = (sequence.job.request, sequence.generated, sequence.job.attempt)
            self._planned[batch.batch] = _Pressing(sequence, token, self._urgent_ns(sequence))

    def _counted(self, batch: Batch, now_ns: int) -> list[Decoding]:
        """Whose deadlines count: of those refused room when the batch had a turn, and of those on their way when it was
        over, only where it has no others. None of a batch that is passed over until a request leaves room."""
        if batch.passed_over:
            return []
        there, turn = [s for s in batch.sequences if not s.beside], self._work.turn
        holds = self._work.had_turn_ns(batch, now_ns) is not None
        had = turn is not None and turn.batch is batch
        return [s for s in there if holds or not (s.refused or (had and s.where is Where.ARRIVING))] or there

    def _check_run(self, run: Run, now_ns: int) -> None:
        turn = self._work.turn
        assert turn is not None and turn.ends_ns is not None
        if turn.pause and turn.decodes and turn.quota_ns != 1 and not self._comes(self._work.awaited):
            raise LawBroken("W6: a run of more than a step begins in a pause, and no weights are on their way")
        over = now_ns >= turn.ends_ns and self._given is not None and turn is self._given.turn
        if over or run.until_ns > turn.ends_ns:
            raise LawBroken(f"W2: a run begins at {now_ns}, and its turn ends at {turn.ends_ns}")
        served = self._work.stepping if turn.pause else turn.batch.sequences
        for sequence in served:
            self._waits.pop(sequence.job.request, None)

    def _comes(self, model: ModelId | None) -> bool:
        return model is not None and self.ledger.weights.is_loading(model)

    def _check_waits(self, now_ns: int) -> None:
        turn, given = self._work.turn, self._given
        if turn is None:
            self._over(self._paused or given)
            self._given = self._paused = None
            return
        if given is not None and _goes_on(given.turn, turn, now_ns):
            given.turn, given.quantum_ns = turn, min(given.quantum_ns, self._watched.quantum_ns)
        elif turn.pause:
            self._paused = self._paused if given is None or given.turn.pause else given
            fills = self._comes(self._work.awaited)
            self._given = _Given(turn, self._planned[turn.batch.batch], self._watched.quantum_ns, fills=fills)
        else:
            self._give(turn, given, now_ns)
        waiting = {s.job.request for batch in self._work.batches for s in self._counted(batch, now_ns) if not s.beside}
        self._waits = {request: wait for request, wait in self._waits.items() if request in waiting}

    def _give(self, turn: RunningTurn, given: _Given | None, now_ns: int) -> None:
        """A turn that is no pause: the one that was paused, which goes on, or another one."""
        before, self._paused = self._paused or given, None
        if before is not None and before is not given and _goes_on(before.turn, turn, now_ns):
            before.turn, before.quantum_ns = turn, min(before.quantum_ns, self._watched.quantum_ns)
            self._given = before
            return
        self._over(before)
        quantum_ns = 1 if turn.used_up(now_ns) else self._watched.quantum_ns  # of one that is over there is one run
        self._given = _Given(turn, self._planned[turn.batch.batch], quantum_ns)
        self._count(self._given, now_ns)

    def _over(self, given: _Given | None) -> None:
        """The turn is, and another one may be given for its token if it went by."""
        if given is not None and self._went_by(given):
            for wait in self._waits.values():
                wait.tokens.discard(given.pressing.token)

    def _check_rows(self, run: Run) -> None:
        given, rows = self._given, {row.job.request for row in run.rows}
        assert given is not None
        there = [
            s
            for s in given.turn.batch.sequences
            if s.where is Where.DEVICE and not s.lacks and not s.beside and s.steps_held() > 0
        ]
        left_out = [sequence.job.request for sequence in there if sequence.job.request not in rows]
        if left_out:
            raise LawBroken(f"W3: requests {left_out} are there and not in the run")
        given.missed |= given.pressing.token[0] not in rows

    def _failed(self) -> None:
        """The run of the turn: a step that a prompt shared is made good, once for each prompt in it."""
        given, prompts = self._given, self._work.stepping[: len(self._prompts)]
        if given is None or not prompts or len(self._work.stepping) == 1:
            return
        if any(sequence.suspect for sequence in prompts):
            raise LawBroken(f"W3: prompts of {prompts} have failed before, and others again with them")
        given.failed = True
        for wait in self._waits.values():
            wait.turns["failed", prompts[0].job.request] = 1
            wait.round.add(("failed", prompts[0].job.request))

    def _went_by(self, given: _Given) -> bool:
        """For lack of a run or of its KV, with a step that failed, with prefills and pauses for a whole quantum, with a
        piece of a prompt, or beside a run on the second lane."""
        sequence, rules = given.pressing.sequence, self._watched.rules
        short = not given.ran or sequence.where is not Where.DEVICE or sequence.steps_held() <= 0
        cut = rules.chunk_tokens is not None and given.cut
        return given.missed or given.failed or short or cut or given.filled_ns >= given.quantum_ns

    def _count(self, given: _Given, now_ns: int) -> None:
        token, due_ns = given.pressing.token, given.pressing.urgent_ns - MISJUDGED_NS
        for batch in self._work.batches:
            for sequence in batch.sequences:
                request = sequence.job.request
                if batch is given.turn.batch or batch.passed_over:
                    continue  # it waits until a run of the turn has begun, or for memory
                wait = self._waits.setdefault(request, Wait(now_ns))
                wait.latest_ns = max(wait.latest_ns, self._latest_ns(batch, sequence))
                number = given.turn.batch.batch
                if due_ns > wait.latest_ns and number in wait.batches:
                    raise LawBroken(f"W3: request {request} waits for {token}, which is due later, another round")
                if token in wait.tokens:
                    raise LawBroken(f"W3: request {request} waits for a second turn for {token}")
                if due_ns > wait.latest_ns:
                    wait.batches.add(number)
                wait.tokens.add(token)
                self._reckon(wait, batch)

    def _reckon(self, wait: Wait, own: Batch) -> None:
        """The number of turns that others may have before it: more, if its batch may be shed for longer than before,
        because quanta have grown."""
        for batch in self._work.batches:
            for sequence in batch.sequences if batch is not own else ():
                slo, job = sequence.spec.slo, sequence.job
                due = (wait.latest_ns + MISJUDGED_NS - self._urgent_ns(sequence)) // slo.tbt_ns + 1
                tokens = max(min(due, job.sampling.max_tokens - sequence.generated), 0)
                wait.early_ns = max(wait.early_ns, -job.priority * slo.ttft_ns)
                wait.turns.setdefault(("batch", batch.batch), 1)
                wait.round.add(("batch", batch.batch))
                if sequence.lacks:
                    wait.round.add(("request", job.request))
                had = sum(request == job.request and index < sequence.generated for request, index, _ in wait.tokens)
                key, may = ("request", job.request), had + tokens + (sequence.lacks > 0)
                wait.turns[key] = max(wait.turns.get(key, 0), may)

    def _worked(self, duration_ns: int) -> None:
        """One run of the turn under way."""
        given = self._given
        assert given is not None and given.turn.quota_ns is not None
        given.filled_ns += duration_ns if self._prompts else 0
        if given.turn.pause and self._paused and self._paused.turn.started_ns is not None:
            self._paused.filled_ns += duration_ns
        if given.fills:
            return
        given.cut |= bool(self._work.beside)
        given.cut |= any(not row.samples for row in self._prompts)
        for request, wait in self._waits.items():
            wait.worked_ns += duration_ns
            if given.turn.pause:
                wait.pauses.add(given.turn.batch.batch)
            else:
                wait.turn_ns = max(wait.turn_ns, given.turn.quota_ns)
            if wait.turn_ns and wait.worked_ns > wait.longest_ns():
                raise LawBroken(f"W4: request {request} has waited for {wait.worked_ns} ns of others' steps")

    def _urgent_ns(self, sequence: Decoding) -> int:
        return sequence.job.urgent_ns(sequence.spec.slo, sequence.generated)

    def _latest_ns(self, batch: Batch, sequence: Decoding) -> int:
        return _latest_ns_of(self._urgent_ns(sequence), batch.ran_ns, self._watched.shed_ns)


def _goes_on(before: RunningTurn, after: RunningTurn, now_ns: int) -> bool:
    """Or was renewed in time, or before its first step, but for those that bring back KV that was lost. What is renewed
    when it is over is a turn of one run, and a pause is one run. A turn that follows one of the same batch has a start
    of its own, also where its first run has begun by now."""
    renewed = after.batch is before.batch and after.pause == before.pause and not after.used_up(now_ns)
    return after is before or (renewed and (not before.begun or before.started_ns == after.started_ns))


@dataclass(slots=True)
class _Line:
    """A job's wait, and the jobs that came before it."""

    since_ns: int  # later by as long as nothing was done for lack of memory
    before: set[RequestId]
    ttft_ns: int


class WatchedPrefillCore(PrefillCore):
    """Checks W5 after each event. Waits begin anew where memory is taken away."""

    def __init__(
        self, instance: InstanceId, ledger: Ledger, policy: PrefillOrder | None = None, *, reuses: bool = False
    ) -> None:
        self._lines: dict[RequestId, _Line] = {}
        self._short = False  # of memory, for jobs that wait
        self._at_ns = 0  # since when
        super().__init__(instance, ledger, policy, reuses=reuses)

    def on(self, event: InstanceEvent, now_ns: int) -> list[Effect]:
        effects = super().on(event, now_ns)
        running = self._queue.running
        for line in self._lines.values() if self._short else ():
            line.since_ns += now_ns - self._at_ns
        self._short, self._at_ns = not (running or self.ledger.weights.loading()), now_ns
        if isinstance(event, TakeBack):
            self._lines.clear()
        for each in (running, *self._queue.beside) if running else ():
            self._check_line(each.job, now_ns)
        self._line_up(now_ns)
        return effects

    def _line_up(self, now_ns: int) -> None:
        jobs = [job for group in self._queue.groups for job in group.jobs]
        self._lines = {job.request: self._lines.get(job.request) or _Line(now_ns, set(), 0) for job in jobs}
        for job in jobs:
            line = self._lines[job.request]
            for other in jobs:
                if self._rank(other) <= self._rank(job):
                    line.before.add(other.request)
                    line.ttft_ns = max(line.ttft_ns, self.ledger.specs[other.model].slo.ttft_ns)

    def _check_line(self, job: Job, now_ns: int) -> None:
        line = self._lines.pop(job.request, None)
        if line and now_ns - line.since_ns > len(line.before) * (line.ttft_ns + 2 * LOAD_NS + 2 * RUN_NS):
            raise LawBroken(
                f"W5: request {job.request} has waited for {now_ns - line.since_ns} ns behind {line.before}"
            )

    def _rank(self, job: Job) -> int:
        return job.ranked_ns(self.ledger.specs[job.model].slo)
