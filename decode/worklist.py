"""The work list of a decode instance: its batches, and rounds of turns over them (Aegaeon §4.3, Algorithm 2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from aegis.core.ids import ModelId
from aegis.core.switching import Switching
from aegis.core.views import MAX_BATCH, BatchView, RoundPolicy, Turn
from decode.sequences import Sequence

LOOKAHEAD_BLOCKS = 4  # room for growth a sequence is counted with when it joins a batch (Aegaeon's artifact)


@dataclass(slots=True)
class Batch:
    """Sequences of one model that are decoded together; never empty."""

    batch: int
    model: ModelId
    sequences: list[Sequence]


@dataclass(slots=True)
class RunningTurn:
    """`started_ns` is that of its first step: time spent bringing things in is not taken from the quota."""

    batch: Batch
    quota_ns: int
    switching: Switching
    started_ns: int | None = None

    def used_up(self, now_ns: int) -> bool:
        return self.started_ns is not None and now_ns - self.started_ns >= self.quota_ns


class WorkList:
    """Batches in order of their making. A round plans a turn for each that is there when it starts."""

    __slots__ = ("_next_batch", "_policy", "_round", "batches", "stepping", "turn")

    def __init__(self, policy: RoundPolicy) -> None:
        self._policy = policy
        self._next_batch = 0
        self._round: deque[Turn] = deque()
        self.batches: list[Batch] = []
        self.turn: RunningTurn | None = None
        self.stepping: tuple[Sequence, ...] = ()  # in the step under way

    def join(self, sequence: Sequence, capacity_blocks: int) -> None:
        """(1) The first batch of the same model with room; (2) a new one at the end of the list."""
        model, need = sequence.job.model, sequence.blocks_ahead(LOOKAHEAD_BLOCKS)
        for batch in self.batches:
            if batch.model == model and len(batch.sequences) < MAX_BATCH:
                taken = sum(s.blocks_ahead(LOOKAHEAD_BLOCKS) for s in batch.sequences)
                if taken + need <= capacity_blocks:
                    batch.sequences.append(sequence)
                    return
        self._next_batch += 1
        self.batches.append(Batch(self._next_batch, model, [sequence]))

    def leave(self, sequence: Sequence) -> None:
        batch = next(b for b in self.batches if sequence in b.sequences)
        batch.sequences.remove(sequence)
        if not batch.sequences:
            self.batches.remove(batch)

    def turn_now(self, now_ns: int, view: Callable[[Batch], BatchView]) -> RunningTurn | None:
        """The turn that goes on, or the next one, of the next round if need be; None when there is no work."""
        if self.turn and self.turn.batch.sequences and not self.turn.used_up(now_ns):
            return self.turn
        by_id = {batch.batch: batch for batch in self.batches}
        while self._round and self._round[0].batch not in by_id:
            self._round.popleft()
        if not self._round:
            if not self.batches:
                self.turn = None
                return None
            self._round.extend(self._policy.plan([view(batch) for batch in self.batches]))
        planned = self._round.popleft()
        batch = by_id[planned.batch]
        self.turn = RunningTurn(batch, planned.quota_ns, Switching(batch.model, now_ns))
        return self.turn

    def upcoming(self) -> list[Batch]:
        """Batches in the order of their next turns, as far as it is known; the running one first."""
        by_id = {batch.batch: batch for batch in self.batches}
        order = [self.turn.batch.batch] if self.turn else []
        order += [turn.batch for turn in self._round]
        order += by_id
        return [by_id[i] for i in dict.fromkeys(order) if i in by_id]
