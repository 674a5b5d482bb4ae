"""Rows of a batch that the device does not hold: they take turns in its memory.

A batch that fits when its sequences come may outgrow the device as they grow. Then its last sequences would wait until
others have ended, while those run ahead of their deadlines. Instead, the sequence that is furthest ahead leaves for one
that is about to be late. Copies take time, so the one that leaves has to be ahead of the other by ten times what they
take. A sequence that is late already waits for room: where there is too little for all, some are on time rather than
all late.

Laws: (1) a sequence that leaves has more slack than the one that comes for it, and neither is late; (2) no more leave
than those that come need the room of, beside the room into which others grow.
"""

from __future__ import annotations

from typing import Final

from aegis.core.clock import NS_PER_S
from aegis.core.estimators import Hardware
from aegis.core.model import Slo
from aegis.core.views import TurnRules
from decode.eviction import growth
from decode.eviction_reasons import EvictionReasons
from decode.kv_swap import KvSwap
from decode.phases import Phases
from decode.sequences import ARRIVING, DEVICE, HOST, Sequence
from decode.worklist import LOOKAHEAD_BLOCKS, Batch, RunningTurn
from memory.balloon import PageRequestState
from memory.ledger import Ledger

_COPIES: Final = 10
"""By so many times the duration of their copies one has to be ahead of the other."""


class Rotation:
    """Of one instance, whose link is that of the `hardware`. It does nothing unless the rules say so."""

    def __init__(
        self,
        ledger: Ledger,
        kv: KvSwap,
        phases: Phases,
        rules: TurnRules,
        hardware: Hardware,
        reasons: EvictionReasons | None,
    ) -> None:
        self._ledger = ledger
        self._kv = kv
        self._phases = phases
        self._rotates = rules.rotates
        self._bytes_per_s = hardware.copy_bytes_per_s
        self._reasons = reasons

    def rotate(self, turn: RunningTurn, now_ns: int) -> bool:
        """Rotates rows between two runs of the turn: who leaves comes last among the batch's sequences, and who is to
        come is first, for in that order they are brought in. Where something leaves already, its room is waited for.
        Returns whether no run may begin yet, because the host has to give slabs first and it would be in the way of who
        leaves."""
        batch, ledger = turn.batch, self._ledger
        asked = ledger.balloon.request_state is PageRequestState.ASKED
        if ledger.device.moving or asked or not (turn.decodes and self._lacks_room(batch)):
            return False
        slo = ledger.specs[batch.model].slo

        def urgent_ns(each: Sequence) -> int:
            return each.job.urgent_ns(slo, each.generated)

        there = [each for each in batch.sequences if each.where is DEVICE or each.where is ARRIVING]
        spare = ledger.device.room(batch.sequences[0].shape) - sum([growth(each) for each in there])
        ahead = sorted([each for each in there if _may_leave(each)], key=urgent_ns)
        following = batch.next_waiting() if turn.prefills_next else None
        waiting = [each for each in batch.sequences if self._waits(each, following) and _due_ns(each, slo) >= now_ns]
        left, coming, asks = list[Sequence](), list[Sequence](), False
        for first in sorted(waiting, key=urgent_ns):
            leaving = list[Sequence]()
            while spare < _wanted(first) and ahead and self._gives_way(ahead[-1], first, slo, now_ns):
                leaving.append(ahead.pop())
                spare += leaving[-1].held + growth(leaving[-1])
            if spare < _wanted(first):
                break
            left += [last for last in leaving if self._put_away(last, first)]
            if not set(leaving) <= set(left):
                asks = self._kv.waiting
                break
            coming.append(first)
            spare -= _wanted(first) + LOOKAHEAD_BLOCKS
        if coming or left:
            stay = [each for each in batch.sequences if each not in coming and each not in left]
            batch.sequences[:] = coming + stay + left
            self._phases.stop(left)
        return asks

    def next_ns(self, turn: RunningTurn | None, now_ns: int) -> int | None:
        """When a run of the turn that begins now has to end, since others may come then."""
        assert turn is not None
        if not self._lacks_room(turn.batch):
            return None
        return now_ns + self._ledger.specs[turn.batch.model].slo.gap_ns // 2

    def _lacks_room(self, batch: Batch) -> bool:
        return self._rotates and any([each.refused for each in batch.sequences])

    def _waits(self, sequence: Sequence, following: Sequence | None) -> bool:
        """Whether it would come if there was room: of prompts the next one would, and none without its adapter."""
        adapter = sequence.job.adapter
        comes = sequence is following if sequence.lacks else sequence.where is not ARRIVING
        return sequence.refused and comes and (adapter is None or self._ledger.weights.is_resident(adapter))

    def _put_away(self, last: Sequence, first: Sequence) -> bool:
        """Whether it leaves. It does not if the host has no slab for it, or still has to give one."""
        self._kv.put_away(last)
        if last.where is HOST and self._reasons:
            self._ledger.effects.append(self._reasons.rotated(last, first))
        return last.where is HOST

    def _gives_way(self, last: Sequence, first: Sequence, slo: Slo, now_ns: int) -> bool:
        nbytes = (last.held + first.blocks_now()) * first.shape.block_bytes
        copies_ns = round(nbytes * NS_PER_S / self._bytes_per_s)
        least_ns = slo.gap_ns + _COPIES * copies_ns
        ahead_ns = last.job.urgent_ns(slo, last.generated) - first.job.urgent_ns(slo, first.generated)
        soon = _due_ns(first, slo) - now_ns <= slo.gap_ns + copies_ns
        return soon and ahead_ns > least_ns and _due_ns(last, slo) - now_ns > least_ns


def _due_ns(sequence: Sequence, slo: Slo) -> int:
    return slo.due_ns(sequence.job.arrival_ns, sequence.generated)


def _wanted(sequence: Sequence) -> int:
    """The blocks that it lacks for its next run."""
    return sequence.blocks_now() - sequence.held


def _may_leave(sequence: Sequence) -> bool:
    return sequence.where is DEVICE and not (sequence.lacks or sequence.beside or sequence.leaving or sequence.refused)
