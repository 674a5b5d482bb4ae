"""The rows of sequences in a run."""

from __future__ import annotations

from collections.abc import Iterable

from aegis.core.block_runs import first_blocks
from aegis.core.effects import Row
from decode.sequences import Sequence


def prompt_row(sequence: Sequence, stop: int) -> Row:
    """What it lacks of its positions before `stop`."""
    blocks = first_blocks(sequence.device, sequence.shape.blocks_for(stop))
    return Row(sequence.job, sequence.cached - sequence.lacks, stop, blocks, len(sequence.job.sent))


def decode_rows(sequences: Iterable[Sequence]) -> tuple[Row, ...]:
    return tuple([Row(s.job, s.cached, s.cached + 1, s.device, s.generated, s.last) for s in sequences])
