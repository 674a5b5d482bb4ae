"""Sequences of a decode or mixed instance, and where their KV is: not made, in host slabs, arriving, on the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from aegis.core.block_runs import Blocks
from aegis.core.ids import BlockRun, MachineId
from aegis.core.messages import Adopt
from aegis.core.model import KvShape, ModelSpec
from aegis.core.request import EventHandle, Job, KeptPrefix, KvHandle


class Where(Enum):
    """The place of a sequence's KV. A sequence whose KV is ABROAD, on another machine, is in no batch. KV that is being
    moved out counts as HOST already: a swap-in waits for the event of the swap-out (rule 2)."""

    ABROAD = "abroad"
    NOWHERE = "nowhere"  # it is to be prefilled here
    HOST = "host"
    ARRIVING = "arriving"
    DEVICE = "device"


HOST: Final = Where.HOST
DEVICE: Final = Where.DEVICE
NOWHERE: Final = Where.NOWHERE
ARRIVING: Final = Where.ARRIVING
"""For loops over sequences: Python 3.11 takes ten times as long to look up a member of an enum as a name."""


class Room(Enum):
    """The result of an attempt to make room on the device."""

    NOW = "now"
    LATER = "later"  # with an event: a copy's, or an answer about host slabs
    NONE = "none"  # there was nothing to put away


@dataclass(slots=True, eq=False)
class Sequence:
    """`cached` positions of KV exist, or will once it is prefilled: it `lacks` that many of them. The KV of `last`, the
    latest of the `generated` tokens, is not among them. `prefix` is set until kept KV of its prompt has come."""

    job: Job
    generated: int
    last: int
    cached: int
    spec: ModelSpec  # as it was when it came: its deadlines may be others now
    handle: KvHandle | None  # set while another instance's slabs hold the KV
    where: Where = Where.HOST
    device: list[BlockRun] = field(default_factory=list)
    held: int = 0  # blocks on the device
    host: Blocks = ()  # our own host blocks
    arrival: EventHandle | None = None  # the swap-in under way
    saved: EventHandle | None = None  # the swap-out that filled `host`
    running: bool = False
    dropped: bool = False
    beside: bool = False  # in the run under way on the second lane
    leaving: bool = False  # it is to be handed over, and has no step any more
    refused: bool = False  # there was no room on the device for it when its batch last wanted it there
    suspect: bool = False  # a step that its prompt shared has failed
    prefill_ns: int = 0  # the time of the prefill
    last_ns: int | None = None  # when `last` was made, if that was here
    made: list[int] = field(default_factory=list)  # the generated tokens, where KV is kept after its end
    prefix: KeptPrefix | None = None
    reused: int = 0  # positions that need not be prefilled
    rank_ns: int = 0  # the prompt with the least is prefilled first
    lacks: int = field(init=False)  # none while the run under way makes them
    shape: KvShape = field(init=False)
    block_tokens: int = field(init=False)
    most_blocks: int = field(init=False)

    def __post_init__(self) -> None:
        self.lacks = self.cached if self.where is Where.NOWHERE else 0
        if self.prefix:
            self.where, self.reused = Where.HOST, self.prefix.tokens
            self.lacks -= self.reused
        self.shape = self.spec.manifest.kv
        self.block_tokens = self.shape.block_tokens
        self.most_blocks = self.shape.blocks_for(self.job.most_tokens)

    def blocks_now(self) -> int:
        """The blocks that the next step needs."""
        return self.cached // self.block_tokens + 1

    def steps_held(self) -> int:
        """Steps for which there are blocks."""
        return self.held * self.block_tokens - self.cached

    def blocks_ahead(self, lookahead: int) -> int:
        ahead = -(-self.cached // self.block_tokens) + lookahead
        return ahead if ahead < self.most_blocks else self.most_blocks


Stepping = tuple[Sequence, ...]
"""The sequences of a run."""


def submitted(job: Job, spec: ModelSpec) -> Sequence:
    """One that is to be prefilled here."""
    sequence = Sequence(job, len(job.sent), -1, job.prefill_tokens, spec, None, Where.NOWHERE, prefix=job.kept)
    sequence.made += job.sent
    return sequence


def adopted(event: Adopt, spec: ModelSpec, machine: MachineId) -> Sequence:
    """One that goes on here, on this machine, from KV that another instance has handed over."""
    where = Where.HOST if event.kv.machine == machine else Where.ABROAD
    sequence = Sequence(event.job, len(event.tokens), event.tokens[-1], event.kv.tokens, spec, event.kv, where)
    sequence.made += event.tokens
    return sequence
