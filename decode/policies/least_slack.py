"""The batch that would be late first runs next, long enough to be worth the change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from operator import attrgetter

from aegis.core.decision import Plan, Why
from aegis.core.ids import InstanceId
from aegis.core.lane_views import LaneChoice, LanesView
from aegis.core.views import BatchView, DecodeView, Renewal, Turn, TurnRules, Work
from aegis.core.wording import duration, when
from decode.policies import companions, home, pieces, savable
from decode.policies.overload import Shedding, shedding, spoken_for
from decode.reasons import cost_ns, wants
from decode.slack import begin_by_ns

_RULES = TurnRules(
    renewal=Renewal.ARRIVAL,
    sheds=True,
    chunk_tokens=16,
    merges=True,
    defers_refused=True,
    rotates=True,
    overtakes_beside=True,
    fills_loads=True,
)
_IN_ORDER_OF_MAKING = attrgetter("batch")
_RAN_NS = attrgetter("ran_ns")


@dataclass(frozen=True, slots=True)
class LeastSlack:
    """Requests are placed by `decode.policies.home`, long prefills are cut by `decode.policies.pieces`, and what runs
    beside a decode is chosen by `decode.policies.companions`. The rest is about turns.

    The slack of a batch is the time until it has to begin so that none of its tokens is late: its next deadline, less
    the time of loading its model, of its prefills and of a step. The batch with the least slack has the turn, and keeps
    it for at least a quantum. With turns of Q, changes of time c cost c / Q of the instance, and the others wait in
    proportion to Q, which costs Q / T of their TTFT deadline T: c / Q + Q / T is least at √(c·T). The quantum is
    `turn_factor` of that. c is the mean over the batches of the time of a change, or of a step if that is longer: a
    turn begins as soon as the KV of one sequence is there, and a step without the others is worth little. Prefills of
    requests that have lost their KV, the host having no room for it, are a part of the change: they may lose it again.
    Most of c is hidden behind the turn before, unless memory does not hold two models and their KV. What is not hidden
    is seen as the time s in which nothing ran before turns: c is at least four times that.

    If less than `calm_share` of the time is needed, which is the sum over batches of step time over TBT, the quantum is
    at most the time of `calm_switches` changes and `calm_quantum_ns`: spare time goes into earlier first tokens.

    While the weights of a turn are on their way, it pauses for the streams that are there, in the order in which they
    have to begin: they wait for no more than a step of each other, and need not be run later. What runs beside a decode
    then runs beside them.

    A turn pauses for a prompt whose first token would be late at its end (`decode.policies.savable`), unless batches
    are shed: then one more request on time costs another one that is.

    Where two batches run side by side, the others wait for half as many turns. So the quantum grows with the part of
    the time in which they do, up to twice its length: the others wait as long as ever, and changes take less of the
    time.

    If more than all of the time is needed, not every batch can be on time. Those that make the most tokens on time per
    second are kept on time, and the others are shed (`decode.policies.overload`): these have turns in `shed_share` of
    the time, each of a quantum and their prefills, and those of them that can still be on time have what the others can
    spare. A request that is late counts the less in that, the less of it can be on time once it has caught up.

    A batch that is kept then, and that is full, so that another batch of its model waits, goes on after its quantum
    until somebody else has to begin within one. Running ahead of its deadlines costs it no rows, for others take the
    places of those that end, and changes are saved. A batch with places left has the more rows in each step, the later
    it runs.

    No batch starves. A batch comes before another one for a token that has to begin earlier, or because the other one
    is late and had a turn less than `1 / shed_share` quanta for each batch ago, and each token gets it one such turn,
    not counting those that prefills and pauses filled for a quantum, or that had pieces of prompts in them or a run
    beside them. A turn lasts for a quantum, the prefills it was planned with and one run. So a request that waits,
    other than for memory, waits for no more turns than others have tokens due before its own may count, prefills and
    batches. Each batch has a turn in a round besides, unless batches are shed: then a new plan is made at the end of
    each turn, for the other turns of the old one would go to those that are to be put off. During a turn only arrivals
    for its own batch make a new plan then, so that it lasts as long as planned however many others come.

    The deadline of a sequence for which its batch's last turn had no room does not count until the next one, if the
    batch has others: it would get the batch turn after turn, in which only those others went on. Nor does that of a
    sequence whose KV is on its way when the turn of its batch is over, for the turn after that.
    """

    migrate_share: float = 1.0
    turn_factor: float = 0.6
    calm_share: float = 0.6
    calm_switches: float = 4.0
    calm_quantum_ns: int = 30_000_000  # besides these
    shed_share: float = 0.1
    stream_share: float = 0.5
    lane_gain: float = 1.05
    pair_gain: float = 1.1
    lane_turn_ns: int = 400_000_000
    lane_turn_share: float = 0.14
    piece_steps: int = 32
    rules: TurnRules = _RULES

    def place(self, work: Work, lists: DecodeView) -> InstanceId:
        return home.place(work, lists, self.migrate_share)

    def plan(self, batches: Sequence[BatchView], now_ns: int) -> list[Turn]:
        quantum_ns = self._quantum_ns(batches)
        order = sorted(batches, key=_IN_ORDER_OF_MAKING)  # if they have to begin at the same time
        found = shedding(batches, quantum_ns, self.shed_share, now_ns)
        by_ns, shed = found.by_ns, found.shed
        order.sort(key=lambda batch: by_ns[batch.batch])
        running = next((batch for batch in batches if batch.turn_ns is not None), None)
        if running and running.turn_ns is not None and running.turn_ns < quantum_ns:
            order.remove(running)
            order.insert(0, running)
        elif (full := _goes_on(order, found, now_ns + quantum_ns)) is not None:
            order.remove(full)
            order.insert(0, full)
        quotas_ns = [quantum_ns + (0 if b.batch in shed else b.prefill_ns) for b in order]
        if self.rules.chunk_tokens is None:
            return [Turn(b.batch, quota_ns) for b, quota_ns in zip(order, quotas_ns, strict=True)]
        turns = pieces.turns(
            order,
            quotas_ns,
            now_ns,
            piece_steps=self.piece_steps,
            stream_share=self.stream_share,
            forecast=bool(shed),
        )
        if order[0] is not running:
            return turns
        if running.resident and not running.there:
            return _meanwhile(order, quantum_ns) + [turn for turn in turns if not turn.pause]
        if shed:
            return turns
        paused = {turn.batch for turn in turns if turn.pause}
        saves = savable.pauses(order, quotas_ns, by_ns, now_ns - (running.turn_ns or 0), now_ns)
        return [turn for turn in saves if turn.batch not in paused] + turns

    def beside(self, lanes: LanesView, now_ns: int) -> LaneChoice | None:
        return companions.beside(
            lanes,
            now_ns,
            lane_gain=self.lane_gain,
            pair_gain=self.pair_gain,
            lane_turn_ns=self.lane_turn_ns,
            lane_turn_share=self.lane_turn_share,
            piece_steps=self.piece_steps,
        )

    def why_turn(self, plan: Plan, at: int) -> Why:
        chosen, second, now_ns = plan.batch(at), plan.batch(at + 1), plan.made_ns
        assert chosen is not None
        slack_ns, quota_ns = _slack_ns(chosen, now_ns), plan.turns[at].quota_ns
        because = f"{_begins(slack_ns)} ({wants(chosen, now_ns)})"
        if second is None:
            return Why(because, slack_ns, cost_ns(chosen))
        second_ns = _slack_ns(second, now_ns)
        quantum_ns = self._quantum_ns(plan.batches)
        shed = shedding(plan.batches, quantum_ns, self.shed_share, plan.made_ns)
        if chosen.turn_ns is not None and quota_ns is not None and shed.by_ns[second.batch] < shed.by_ns[chosen.batch]:
            least_ns = quota_ns - chosen.prefill_ns
            because = f"has had {duration(chosen.turn_ns)} of at least {duration(least_ns)}; {because}"
        elif chosen.batch in shed.shed:
            saved = chosen.in_time_by_ns is not None
            turn = "the others have time to spare" if saved else "it has been put off for long enough"
            because = f"not everybody can be on time, and {turn}; {because}"
        elif shed.by_ns[second.batch] < shed.by_ns[chosen.batch]:
            because = f"others of its model wait for its places, and nobody has to begin at once; {because}"
        elif second.batch in shed.shed:
            because = f"not everybody can be on time, and others make fewer tokens on time per second; {because}"
        elif second_ns < slack_ns:
            because = f"others that have to begin sooner are late already; {because}"
        because = f"{because}; next {second.model}, which {_begins(second_ns)} ({wants(second, now_ns)})"
        return Why(because, slack_ns, cost_ns(chosen), second.model, second_ns, cost_ns(second))

    def why_place(self, work: Work, lists: DecodeView, chosen: InstanceId) -> Why:
        return home.why(work, lists, self.migrate_share, chosen)

    def _quantum_ns(self, batches: Sequence[BatchView]) -> int:
        changes_ns = [
            ns if (ns := b.switch_ns + b.change_ns + b.again_ns) > (step_ns := b.step_ns) else step_ns for b in batches
        ]
        change_ns = sum(changes_ns) / len(batches)
        ttft_ns, stall_ns = min([batch.ttft_ns for batch in batches]), batches[0].stall_ns or 0
        factor = self.turn_factor * (1 + batches[0].abreast)
        quantum_ns = round(factor * sqrt(max(change_ns, 4 * stall_ns) * ttft_ns))
        if spoken_for(batches) >= self.calm_share:
            return quantum_ns
        longest_ns = max(
            [b.change_ns + b.again_ns if b.resident else change for b, change in zip(batches, changes_ns, strict=True)]
        )
        return min(quantum_ns, round(self.calm_switches * longest_ns) + self.calm_quantum_ns)


def _meanwhile(order: Sequence[BatchView], quantum_ns: int) -> list[Turn]:
    """Pauses of the first turn, whose weights are on their way, for the streams that are there and whose steps take no
    longer than the load. There are none where KV is lost: they would grow into the room of others' KV."""
    longest_ns = 0 if any([b.again_ns for b in order]) else order[0].switch_ns
    streams = [b for b in order if b.there and b.stream_ns is not None and b.step_ns <= longest_ns]
    return [Turn(batch.batch, quantum_ns, prefills=False, pause=True) for batch in streams]


def _goes_on(order: Sequence[BatchView], found: Shedding, soon_ns: int) -> BatchView | None:
    """The batch that ran last, if it is full and kept where others are not, nobody in the `order` has to begin by then,
    and all may be put off until it has to begin itself, or longer."""
    if not found.shed or order[0].batch in found.shed or found.by_ns[order[0].batch] <= soon_ns:
        return None
    last = max(order, key=_RAN_NS)
    full = any([batch.model == last.model and batch is not last for batch in order])
    may = full and last.ran_ns >= 0 and last.batch not in found.shed and begin_by_ns(last) <= found.latest_ns
    return last if may else None


def _slack_ns(batch: BatchView, now_ns: int) -> int:
    return begin_by_ns(batch) - now_ns


def _begins(slack_ns: int) -> str:
    return f"{'must begin' if slack_ns >= 0 else 'had to begin'} {when(slack_ns)}"
