"""What runs beside a decode, if the device can be divided.

Candidates are the prompts and batches whose weights are there. Of those that may run, the one does that has to begin
first:

(1) A prompt may run beside the decode if both together do `lane_gain` times the work that one of them would do alone,
    or if it would be cut otherwise. A batch may if both together do `pair_gain` times the work. That is more, because
    the batch that has to begin first is slower beside another one than alone. A batch of which no request can be on
    time any more does not run beside another one: it has to begin before all others, and has turns of its own.
(2) By the guard's word, no step of a stream may take longer than its time between tokens or its gap target. Where no
    share does for a prompt, the largest one does if only the margin of the guard's word is missing.
(3) No first token is made late by having a share of the device only, if it would come twice as soon in pieces between
    the steps of the decode.
(4) A prompt of the decode's own batch that may not run beside it comes before what has to begin later, in the steps of
    the decode: it could not begin while something else ran beside them.

Beside a prompt the decode has the least share that does; two batches divide the device so that they do the most work.

A prompt runs there for as long as `piece_steps` steps on the whole device at most, so that each piece does more than
read weights. A batch runs for `lane_turn_ns`, or `lane_turn_share` of the TTFT if that is shorter, since a prompt that
arrives meanwhile waits for the end; then it is asked again who is due next. Prompts that would be next anyhow join one
that is not cut, for as long as `piece_steps` steps take beside them, and until the deadline of the first. A prompt with
a lower rank than the one on the second lane need not wait for the end of that one's piece: it shares a step with the
decode, if by the guard's word no stream waits too long for that either. Where a turn is paused for streams, its prompt
goes on beside them.
"""

from __future__ import annotations

from operator import attrgetter

from aegis.core.lane_views import Companion, Division, LaneChoice, LanesView
from decode.slack import begin_by_ns

_NEAR = 1.1  # the guard adds 9 % to what it has seen, and 30 % where it has seen nothing
_GAIN = attrgetter("gain")


def beside(
    lanes: LanesView,
    now_ns: int,
    *,
    lane_gain: float,
    pair_gain: float,
    lane_turn_ns: int,
    lane_turn_share: float,
    piece_steps: int,
) -> LaneChoice | None:
    """The first companion that may run beside the decode, and how."""
    for companion in sorted(lanes.companions, key=_companion_by_ns):
        own = companion.batch.batch == lanes.decoding.batch
        if companion.batch.in_time_by_ns is None and not own:
            continue
        long = companion.prefills and companion.alone_ns > lanes.decoding.gap_ns // 2
        divisions = [d for d in companion.divisions if _keeps(lanes, companion, d)]
        if not divisions and companion.prefills and _keeps(lanes, companion, last := companion.divisions[-1], _NEAR):
            divisions = [last]
        least = lane_gain if companion.prefills else pair_gain
        divisions = [d for d in divisions if long or d.gain >= least]
        divisions = [d for d in divisions if not _makes_late(lanes, companion, d, now_ns)]
        if divisions:
            best = divisions[0] if companion.prefills else max(divisions, key=_GAIN)
            within_ns = max(piece_steps * lanes.step_ns, companion.batch.gap_ns)
            if not companion.prefills:
                ttft_ns = min(lanes.decoding.ttft_ns, companion.batch.ttft_ns)
                within_ns = min(lane_turn_ns, round(lane_turn_share * ttft_ns))
            joins_ns = piece_steps * best.step_ns
            return LaneChoice(companion.batch.batch, companion.prefills, best.shares, within_ns, joins_ns)
        if companion.prefills and own:
            return None
    return None


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
