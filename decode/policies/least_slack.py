"""The batch that would be late first runs next, long enough to be worth the change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from operator import attrgetter

from aegis.core.decision import Plan, Why
from aegis.core.ids import InstanceId, ModelId
from aegis.core.lane_views import Companion, Division, LaneChoice, LanesView
from aegis.core.views import BatchView, DecodeView, Pressure, Renewal, Turn, TurnRules, Work
from aegis.core.wording import duration, when
from decode.policies import savable
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
)
_PPM = 1_000_000
_NEAR = 1.1  # the guard adds 9 % to what it has seen, and 30 % where it has seen nothing
_IN_ORDER_OF_MAKING = attrgetter("batch")
_RAN_NS = attrgetter("ran_ns")
_GAIN = attrgetter("gain")


@dataclass(frozen=True, slots=True)
class LeastSlack:
    """Placing. A request goes to the instance of the last request of its model, unless the instance under the least
    pressure is better off by `migrate_share` of its time; if no request of the model is left there, unless another
    instance is better off at all. The same holds if its batches there have no room: they run on several instances
    rather than wait for each other's turns on one. To the pressure of an instance counts the load of the model there,
    unless its weights should be there, and the loads of those for whom there is no room then: of a load that takes the
    part p of the TTFT p².

    Turns. The slack of a batch is the time until it has to begin so that none of its tokens is late: its next deadline,
    less the time of loading its model, of its prefills and of a step. The batch with the least slack has the turn, and
    keeps it for at least a quantum. With turns of Q, changes of time c cost c / Q of the instance, and the others wait
    in proportion to Q, which costs Q / T of their TTFT deadline T: c / Q + Q / T is least at √(c·T). The quantum is
    `turn_factor` of that. c is the mean over the batches of the time of a change, or of a step if that is longer: a
    turn begins as soon as the KV of one sequence is there, and a step without the others is worth little. Prefills of
    requests that have lost their KV, the host having no room for it, are a part of the change: they may lose it again.
    Most of c is hidden behind the turn before, unless memory does not hold two models and their KV. What is not, the
    time s in which nothing ran before turns, is seen: c is at least four times that.

    If less than `calm_share` of the time is needed, which is the sum over batches of step time over TBT, the quantum is
    the time of `calm_switches` changes and `calm_quantum_ns` if that is shorter: spare time goes into earlier first
    tokens.

    A turn pauses for a prompt whose first token would be late at its end (`decode.policies.savable`), unless batches
    are shed: then one more request on time costs another one that is.

    Where two batches go on at a time, side by side, others wait for half as many turns; so the quantum grows with the
    part of the time in which they do, up to twice that: the others wait as long as ever, and changes take less of the
    time.

    If more than all of the time is needed, not every batch can be on time. Those that make the most tokens on time per
    second are kept so, and the others are shed (`decode.policies.overload`): they have turns in `shed_share` of the
    time, of a quantum with their prefills, and those of them that can still be on time what the others can spare. A
    request that is late counts less in that, the less of it can be on time once it has caught up.

    One that is kept then, and that is full, so that another batch of its model waits, goes on after its quantum until
    somebody else has to begin within one. Run ahead of its deadlines it loses no rows, for whoever leaves makes room
    for others, and changes are saved. One with places left has the more rows in each step, the later it is run.

    No batch starves. A batch comes before another one for a token that has to begin earlier, or because the other one
    is late and had a turn less than `1 / shed_share` quanta for each batch ago, and each token gets it one such turn,
    not counting those that prefills and pauses filled for a quantum, or that had pieces of prompts in them or a run
    beside them. A turn lasts for a quantum, the prefills it was planned with and one run. So a request that waits,
    other than for memory, waits for no more turns than others have tokens due before its own may count, prefills and
    batches. Each batch has a turn in a round besides, unless batches are shed: then each end of a turn makes a new
    plan, for the other turns of the old one would go to those that are to be put off. Nothing else does then but who
    comes for the batch itself, so that its turn lasts as long as planned however many come.
    A sequence for which its batch's last turn had no room is left out of this until the next one, if the batch has
    others: its deadline would get the batch turn after turn, in which only those went on. So is one whose KV is on its
    way when the turn of its batch is over, for the turn after that.

    Pieces. If the prefills of a turn take longer than half a gap target, they are cut into pieces, so that streams
    whose models are there go on beside them: each has a step, in a pause of the turn, before its last token is half its
    gap target ago, and before a token is late that can still be saved. Half, since estimates err and a piece is not all
    that takes time. The step comes earlier if the least piece would end too late for it, or a prompt that is not cut. A
    piece takes at least two steps of its model, or most of the time would go into reading weights, and at most a gap
    target, or `piece_steps` steps, if that is longer, where nobody streams, since a request that arrives during it
    waits for its end. All such steps take no more than `stream_share` of the time: if they would, each stream has one
    as often as that allows.

    A prompt that fits in a piece need not wait for one that does not: it comes before it, in a pause of its turn, if
    its rank is lower. Rank is arrival plus length, so a prompt that takes d is overtaken by none that comes d later.

    Lanes. If the device can be divided, something runs beside a decode: of the prompts and batches that are there, the
    one that has to begin first, if it is a prompt and both together do `lane_gain` times the work that one alone would
    do, or if it would otherwise be cut. If it is a batch, they have to do `pair_gain` times the work, which is more:
    beside another one, the batch that has to begin first is slower than it would be alone. Nor does it slow down for
    another one that has nobody left to be on time: that has to begin first of all, and has turns of its own. Either is
    let in if by the guard's word no step of a stream takes longer than its time between tokens or its gap target. A
    prompt of the decode's own batch that may not run beside it comes before what has to begin later, in the steps of
    the decode: it could not begin while something else ran beside them. If no share does for prompts, the largest one
    does where only the margin of the guard's word is missing. No first token is made late by a share of the device that
    would come twice as soon in pieces between the steps. Beside a prompt the decode has the least share that does, and
    two batches divide the device so that they do the most work. A prompt is run there for as long as `piece_steps`
    steps on the whole device at most, so that each piece does more than read weights, and a batch for `lane_turn_ns`,
    or `lane_turn_share` of the TTFT if that is shorter, since a prompt that arrives meanwhile waits for its end: then
    it is asked again who is due next. Prompts that would be next anyhow join one that is not cut for as long as
    `piece_steps` steps take beside them, and until the deadline of the first. One with a lower rank than the prompt on
    the second lane need not wait for the end of its piece: it has its step with the decode, if by the guard's word no
    stream waits too long for that either. A pause in a prompt's turn is where the prompt goes on beside the streams.
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
        home = lists.home(work.model)
        if home is None:
            return _cheapest(work.model, lists).instance
        there = (s for s in lists.shares(work.model) if s.instance == home)
        joins = any(s.batches == 1 and s.room_tokens >= work.tokens for s in there)
        limit_ppm = self.migrate_share * _PPM if joins else 0
        cost_ppm = lists.load_ppm(home) + _loads_ppm(work.model, lists, home)
        if cost_ppm - lists.by_pressure[0].load_ppm <= limit_ppm:
            return home  # none is under less pressure when the model comes to it
        best = _cheapest(work.model, lists, home)
        return home if cost_ppm - best.load_ppm <= limit_ppm else best.instance

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
        turns = self._with_pauses(order, quotas_ns, now_ns, forecast=bool(shed))
        if shed or order[0] is not running:
            return turns
        paused = {turn.batch for turn in turns if turn.pause}
        saves = savable.pauses(order, quotas_ns, by_ns, now_ns - (running.turn_ns or 0), now_ns)
        return [turn for turn in saves if turn.batch not in paused] + turns

    def beside(self, lanes: LanesView, now_ns: int) -> LaneChoice | None:
        for companion in sorted(lanes.companions, key=_companion_by_ns):
            own = companion.batch.batch == lanes.decoding.batch
            if companion.batch.in_time_by_ns is None and not own:
                continue
            long = companion.prefills and companion.alone_ns > lanes.decoding.gap_ns // 2
            divisions = [d for d in companion.divisions if _keeps(lanes, companion, d)]
            if (
                not divisions
                and companion.prefills
                and _keeps(lanes, companion, last := companion.divisions[-1], _NEAR)
            ):
                divisions = [last]
            least = self.lane_gain if companion.prefills else self.pair_gain
            divisions = [d for d in divisions if long or d.gain >= least]
            divisions = [d for d in divisions if not _makes_late(lanes, companion, d, now_ns)]
            if divisions:
                best = divisions[0] if companion.prefills else max(divisions, key=_GAIN)
                within_ns = max(self.piece_steps * lanes.step_ns, companion.batch.gap_ns)
                if not companion.prefills:
                    ttft_ns = min(lanes.decoding.ttft_ns, companion.batch.ttft_ns)
                    within_ns = min(self.lane_turn_ns, round(self.lane_turn_share * ttft_ns))
                joins_ns = self.piece_steps * best.step_ns
                return LaneChoice(companion.batch.batch, companion.prefills, best.shares, within_ns, joins_ns)
            if companion.prefills and own:
                return None
        return None

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
        home, pressed = lists.home(work.model), lists.by_pressure
        best = _cheapest(work.model, lists, home)
        if home is None:
            second = next((each for each in pressed if each.instance != best.instance), None)
            beside = f"; {second.instance}'s want {_share(second.load_ppm)}" if second else ""
            because = f"least pressed: its requests want {_share(best.load_ppm)} of its time{beside}"
            return Why(because, lost=second.instance if second else None)
        if home in (best.instance, pressed[0].instance) and chosen == home:
            return Why("home of its model, and least pressed", lost=None)
        share = next((share for share in lists.shares(work.model) if share.instance == home), None)
        gain_ppm = lists.load_ppm(home) + _loads_ppm(work.model, lists, home) - best.load_ppm
        if gain_ppm <= 0:
            return Why(f"home of its model; {best.instance} would have to load it", lost=best.instance)
        freer = f"{_share(gain_ppm)} freer"
        if share is None:
            limit = "nothing, and none are left at home"
        elif share.room_tokens < work.tokens:
            limit = "nothing, and there is no room in its batch at home"
        elif share.batches > 1:
            limit = f"nothing, and it has {share.batches} batches at home"
        else:
            limit = f"the {_share(round(self.migrate_share * _PPM))} that a move needs"
        if chosen == home:
            return Why(f"home of its model; {best.instance} is {freer}, not more than {limit}", lost=best.instance)
        return Why(f"{freer} than its model's home {home}, more than {limit}", lost=home)

    def _with_pauses(self, order: list[BatchView], quotas_ns: list[int], now_ns: int, *, forecast: bool) -> list[Turn]:
        """The turns in this order. The first one pauses for streams and for a short prompt, if its own prompts would
        make them wait for longer than half a gap."""
        front = order[0]
        # Prompts that take long are cut: in later turns at once, and a new plan says then how long pieces are. One of
        # its own for each batch, these are most of the time of a plan, so that nothing is called for them.
        turns = [
            Turn(
                b.batch,
                quota_ns,
                0 if b.prefill_ns > b.gap_ns // 2 and b.prompt_rank_ns is not None else None,
                forecast=forecast,
            )
            for b, quota_ns in zip(order, quotas_ns, strict=True)
        ]
        if front.prompt_rank_ns is None:
            return turns
        streams = [b for b in order if b.stream_ns is not None and b.there]
        ends_ns = now_ns + front.prefill_ns
        if front.prefill_ns <= front.gap_ns // 2 and all([b is front or _half_gap_ns(b) >= ends_ns for b in streams]):
            return turns
        free_ns = front.gap_ns if streams else max(front.gap_ns, self.piece_steps * front.step_ns)
        free_until_ns = now_ns + free_ns
        pauses: list[Turn] = []
        busy_ns = sum([batch.step_ns + 2 * batch.change_ns for batch in streams])
        least_ns = round(busy_ns / self.stream_share)
        saves = sum([(b.step_ns + 2 * b.change_ns) / b.tbt_ns for b in streams]) <= self.stream_share
        soon_ns = now_ns + front.step_ns
        for batch in streams:
            by_ns = _stream_by_ns(batch, least_ns=least_ns, saves=saves)
            early = by_ns < now_ns + front.piece_ns and _step_by_ns(batch, least_ns) <= soon_ns
            if batch is not front and (by_ns <= soon_ns or early):
                pauses.append(Turn(batch.batch, 1, prefills=False, pause=True))
            if by_ns < free_until_ns:  # also of one that pauses: it may have had its pause just now
                free_until_ns = by_ns
        short = _overtaking(order)
        if short is not None:
            pauses.append(Turn(short.batch, 1, decodes=False, pause=True))
        free_until_ns = max(free_until_ns, now_ns + max(2 * front.step_ns, busy_ns))
        turns[0] = Turn(front.batch, quotas_ns[0], free_until_ns)
        return pauses + turns

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


def _loads_ppm(model: ModelId, lists: DecodeView, instance: InstanceId) -> int:
    """What a load of its weights costs a first token there, unless they are there."""
    return 0 if lists.weights(model, instance).there else _load_ppm(model, lists)


def _load_ppm(model: ModelId, lists: DecodeView) -> int:
    """A load takes a part of the TTFT, and with a chance of that part the first token is late by it."""
    part_ppm = lists.reload_ppm(model)
    return part_ppm * part_ppm // _PPM


def _cheapest(model: ModelId, lists: DecodeView, home: InstanceId | None = None) -> Pressure:
    """Of the instances but the home the one under the least pressure when the model comes to it: its weights have to be
    loaded, and where there is no room for them beside others', a part of those has to be loaded again."""
    load_ppm, best = _load_ppm(model, lists), lists.by_pressure[0]
    best_ppm: int | None = None
    for each in lists.by_pressure:
        if best_ppm is not None and each.load_ppm >= best_ppm:
            break
        there, lacking_ppm = lists.weights(model, each.instance)
        cost_ppm = each.load_ppm + (0 if there else load_ppm) + load_ppm * lacking_ppm // _PPM
        if each.instance != home and (best_ppm is None or cost_ppm < best_ppm):
            best, best_ppm = each, cost_ppm
    return best._replace(load_ppm=best.load_ppm if best_ppm is None else best_ppm)


def _goes_on(order: Sequence[BatchView], found: Shedding, soon_ns: int) -> BatchView | None:
    """The batch that ran last, if it is full and kept where others are not, nobody in the `order` has to begin by then,
    and all may be put off until it has to begin itself, or longer."""
    if not found.shed or order[0].batch in found.shed or found.by_ns[order[0].batch] <= soon_ns:
        return None
    last = max(order, key=_RAN_NS)
    full = any([batch.model == last.model and batch is not last for batch in order])
    may = full and last.ran_ns >= 0 and last.batch not in found.shed and begin_by_ns(last) <= found.latest_ns
    return last if may else None


def _companion_by_ns(companion: Companion) -> int:
    return begin_by_ns(companion.batch)


def _makes_late(lanes: LanesView, companion: Companion, division: Division, now_ns: int) -> bool:
    """Whether a first token is late because the prompts of the batch have a share of the device, and would come
    twice as soon in pieces of half a gap target between the steps of the decode."""
    due_ns, alone_ns = companion.batch.first_due_ns, companion.batch.prefill_ns
    if not companion.prefills or due_ns is None:
        return False
    half_gap_ns = max(lanes.decoding.gap_ns // 2, 1)
    slower, in_pieces = division.beside_ns / max(companion.alone_ns, 1), 1 + lanes.step_ns / half_gap_ns
    return slower > 2 * in_pieces and now_ns + alone_ns <= due_ns < now_ns + round(alone_ns * slower)


def _keeps(lanes: LanesView, companion: Companion, division: Division, near: float = 1.0) -> bool:
    """Whether neither of the two stands still for longer than `near` what it may."""
    steps = [(lanes.decoding, division.step_ns)]
    if not companion.prefills:
        steps.append((companion.batch, division.beside_ns))
    return all(step_ns <= near * min(batch.tbt_ns, batch.gap_ns) for batch, step_ns in steps)


def _stream_by_ns(batch: BatchView, *, least_ns: int, saves: bool) -> int:
    """When its next step has to begin so that no stream stands still for long, though not oftener than every
    `least_ns`, and where it `saves` them so that no token is late that can still be saved."""
    assert batch.stream_ns is not None
    within_ns = max(batch.gap_ns // 2, least_ns)
    if saves and batch.savable_due_ns is not None:
        within_ns = min(within_ns, batch.savable_due_ns - batch.stream_ns)
    return _step_by_ns(batch, within_ns)


def _half_gap_ns(batch: BatchView) -> int:
    return _step_by_ns(batch, batch.gap_ns // 2)


def _step_by_ns(batch: BatchView, within_ns: int) -> int:
    """When its next step has to begin to end so long after that of the stream that waits the longest."""
    assert batch.stream_ns is not None
    by_ns = batch.stream_ns + within_ns - batch.step_ns
    return by_ns if batch.active else by_ns - batch.change_ns


def _overtaking(order: Sequence[BatchView]) -> BatchView | None:
    """The batch whose prompt is short enough to come before the first one's."""
    front = order[0]
    piece_ns = front.gap_ns // 2
    if front.prompt_rank_ns is None or front.prompt_ns <= piece_ns:
        return None
    short = None
    for batch in order[1:]:
        rank_ns = batch.prompt_rank_ns
        if rank_ns is None or not batch.there or batch.prompt_ns > piece_ns or rank_ns >= front.prompt_rank_ns:
            continue
        if short is None or short.prompt_rank_ns is None or rank_ns < short.prompt_rank_ns:
            short = batch
    return short


def _slack_ns(batch: BatchView, now_ns: int) -> int:
    return begin_by_ns(batch) - now_ns


def _share(load_ppm: int) -> str:
    return f"{load_ppm / 10_000:.0f} %"


def _begins(slack_ns: int) -> str:
    return f"{'must begin' if slack_ns >= 0 else 'had to begin'} {when(slack_ns)}"
