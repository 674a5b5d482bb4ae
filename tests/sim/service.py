"""That a turn serves all of its batch, checked run by run (W8 of `tests.sim.starvation`)."""

from __future__ import annotations

from collections.abc import Callable

from aegis.core.effects import Run
from aegis.core.errors import LawBroken
from aegis.core.ids import RequestId
from decode.sequences import Sequence as Decoding
from decode.sequences import Where
from decode.worklist import Batch, WorkList


class Service:
    """Of one instance. A sequence `fits` if its next run needs no room that is to be made first: nobody is held to
    have served who waits for memory."""

    def __init__(self, work: WorkList, fits: Callable[[Decoding], bool]) -> None:
        self._work = work
        self._fits = fits
        self._left_out: set[RequestId] = set()  # streams: of the last run of their batch's turn, and no pause since
        self._passed_over: set[int] = set()  # batches whose turn's last run had none of the prompts that could have run
        self._paused: set[int] = set()  # for these batches, since the last run that was no pause

    def begins(self, run: Run) -> None:
        """A run, with what runs beside it already in the work list."""
        work, turn = self._work, self._work.turn
        sequences = {row.job.request for row in run.rows}
        batch = next(b for b in work.batches if any(s.job.request in sequences for s in b.sequences))
        if run.prompts and work.rules.chunk_tokens is not None:
            _check_ranks(run, batch)
        if run.lane or turn is None:
            return
        if turn.pause:
            if batch.batch in self._paused and work.awaited is None:
                raise LawBroken(f"W6: two pauses for {batch.model}, and no run of the turn between them")
            self._paused.add(batch.batch)
            self._left_out -= {row.job.request for row in run.rows}
            return
        self._paused.clear()
        self._check_streams(run, batch)
        self._check_prompts(run, batch)

    def _check_streams(self, run: Run, batch: Batch) -> None:
        rows = {row.job.request for row in run.rows}
        there = {s.job.request for s in batch.sequences if _is_there(s)}
        left_out, own = there - rows, {s.job.request for s in batch.sequences}
        if twice := left_out & self._left_out:
            raise LawBroken(f"W8: requests {sorted(twice)} are there and in neither of two runs of their turn")
        self._left_out = self._left_out - own | left_out

    def _check_prompts(self, run: Run, batch: Batch) -> None:
        """One step comes between two pieces, or where something runs beside it."""
        self._passed_over.intersection_update([each.batch for each in self._work.batches])
        turn = self._work.turn
        assert turn is not None
        if run.prompts or self._work.beside or not turn.prefills_next:
            self._passed_over.discard(batch.batch)
            return
        following = batch.next_waiting()
        if following.where not in (Where.NOWHERE, Where.DEVICE) or not self._fits(following):
            return
        if batch.batch in self._passed_over or run.steps > 1:
            raise LawBroken(f"W8: request {following.job.request} could be prefilled, and others have steps")
        self._passed_over.add(batch.batch)


def _is_there(sequence: Decoding) -> bool:
    return sequence.where is Where.DEVICE and not sequence.lacks and not sequence.beside and sequence.steps_held() > 0


def _check_ranks(run: Run, batch: Batch) -> None:
    """Of the prompts in the run, and of those of their batch that are not."""
    prompts = {row.job.request for row in run.prompts}
    last_ns = max([s.rank_ns for s in batch.sequences if s.job.request in prompts])
    for sequence in batch.sequences:
        waits = sequence.lacks > 0 and not sequence.beside and sequence.job.request not in prompts
        if waits and sequence.rank_ns < last_ns:
            raise LawBroken(f"W8: request {sequence.job.request} is prefilled after one of a higher rank")
