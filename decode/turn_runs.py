"""The run of a turn, on the first lane."""

from __future__ import annotations

from typing import Final

from aegis.core.effects import Row, Run
from decode.rows import decode_rows
from decode.worklist import WorkList

FOR_EVER_NS: Final = (1 << 63) - 1


def turn_run(work: WorkList, prompts: tuple[Row, ...], until_ns: int | None, *, owes: bool) -> Run:
    """Of what is stepping, the rows of `prompts` first. One step where the instance `owes` pages, and none after
    `until_ns`, if that is set."""
    turn = work.turn
    assert turn is not None
    streams = work.stepping[len(prompts) :]
    hurried = bool(prompts) or owes or turn.batch.chunked
    steps = 1 if hurried else min([s.steps_held() for s in streams])
    ends_ns = min([FOR_EVER_NS if end_ns is None else end_ns for end_ns in (turn.ends_ns, until_ns)])
    return Run(turn.batch.model, prompts + decode_rows(streams), steps, ends_ns)
