"""Effects: what an instance core asks its shell to do.

The shell performs them in order. A `Run` is always the last of a list, or one of the last if lanes begin together, and
is answered by exactly one `Stepped` or `StepFailed`. Copies are answered by `Progress`; everything else is done when
the shell returns to the core.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct

from aegis.core.block_runs import BlockCopy
from aegis.core.decision import Decision
from aegis.core.ids import BlockRun, InstanceId, ModelId, PageRun, RequestId, SlabId
from aegis.core.messages import FromInstance
from aegis.core.model import KvShape, ModelSpec
from aegis.core.request import EventHandle, Job


class StreamName(StrEnum):
    """The streams of an instance beside its compute."""

    __hash__ = str.__hash__  # that of enumerations is Python code

    WEIGHTS = "weights"
    PREFETCH = "prefetch"  # weights for later: what is wanted now does not queue behind them
    SWAP_IN = "swap_in"
    SWAP_OUT = "swap_out"
    SCRUB = "scrub"
    RELAY = "relay"  # pieces of images for loads of other devices


class Bind(Struct, frozen=True, tag=True):
    """Bind the model's parameters to its permanent range, `offset_pages` into the weights' address space. A backend
    that refuses is answered with `DropModel`, and the `ModelAdded` that follows becomes a `ModelFailed`."""

    spec: ModelSpec
    offset_pages: int


class Unbind(Struct, frozen=True, tag=True):
    model: ModelId


class MapKv(Struct, frozen=True, tag=True):
    """Back this slab of the device's KV range with these pages."""

    slab: SlabId
    runs: tuple[PageRun, ...]


class UnmapKv(Struct, frozen=True, tag=True):
    slab: SlabId


class MapWeights(Struct, frozen=True, tag=True):
    """Back the model's range with these pages."""

    model: ModelId
    runs: tuple[PageRun, ...]


class UnmapWeights(Struct, frozen=True, tag=True):
    model: ModelId


class LoadWeights(Struct, frozen=True, tag=True):
    """Copy the model's image to its range; `event` is what that copy will be on the stream. `cached` are the extents
    of the node's model cache that hold the image; without any it is read from disk. `shared`: peers may carry parts of
    it, each from its `RemoteLoad` on."""

    stream: StreamName
    model: ModelId
    event: EventHandle
    cached: tuple[PageRun, ...] = ()
    shared: bool = False


class AbandonLoad(Struct, frozen=True, tag=True):
    """The rest of this copy need not be done; its event passes all the same."""

    event: EventHandle


class PeerWords(Struct, frozen=True):
    """Shared words of an instance: for each peer that carries for it one for each place, which says what piece belongs
    there, and the one whose progress says how many pieces it has staged for another one."""

    requests: tuple[tuple[int, ...], ...]
    staged: int


class RemoteLoad(Struct, frozen=True, tag=True):
    """From now on a peer carries a part of the `load` under way. It has the number `peer` among those of this load, and
    stages pieces in these pages of the device whose memory is at `address`; its word `staged` says how many."""

    load: EventHandle
    peer: int
    instance: InstanceId
    address: str
    runs: tuple[PageRun, ...]
    staged: int


class StageImage(Struct, frozen=True, tag=True):
    """Stage pieces of the image of `nbytes` in these extents of the node's model cache, as the words `requests` ask for
    them, in these pages of ours, which are in no range. `event` passes once the `load` of another instance wants no
    more."""

    load: EventHandle
    nbytes: int
    cached: tuple[PageRun, ...]
    requests: tuple[int, ...]
    runs: tuple[PageRun, ...]
    event: EventHandle


class AcceptPages(Struct, frozen=True, tag=True):
    """These pages of the device are ours from now on."""

    runs: tuple[PageRun, ...]


class WipePages(Struct, frozen=True, tag=True):
    """Zero these pages, which are in no range, on the scrub stream."""

    runs: tuple[PageRun, ...]
    event: EventHandle


class RevokePages(Struct, frozen=True, tag=True):
    """These pages are not ours any more."""

    runs: tuple[PageRun, ...]


class CopyBlocks(Struct, frozen=True, tag=True):
    """Copy KV blocks between device and host slabs, once `after` has passed; `ahead` of a turn that waits for them."""

    stream: StreamName
    shape: KvShape
    copies: tuple[BlockCopy, ...]
    after: EventHandle | None
    event: EventHandle
    ahead: bool = False


class MoveBlocks(Struct, frozen=True, tag=True):
    """Copy KV blocks within the device before anything else is done."""

    shape: KvShape
    copies: tuple[BlockCopy, ...]


class Row(Struct, frozen=True):
    """Positions `[start, stop)` of a sequence, in a step; the KV of those before is in `blocks`, as theirs will be.

    A row of a prompt runs what is to be prefilled, or a piece of it. A row that decodes runs one position: its `token`,
    generated as number `index - 1`. If the row makes a token, that is number `index`."""

    job: Job
    start: int
    stop: int
    blocks: Sequence[BlockRun]  # of a row that decodes the core's own table: read at once, never kept
    index: int
    token: int | None = None

    @property
    def decodes(self) -> bool:
        return self.token is not None

    @property
    def samples(self) -> bool:
        """Whether it makes a token: all do, but pieces of prompts before the last."""
        return self.token is not None or self.stop == self.job.prefill_tokens


class Run(Struct, frozen=True):
    """A step of these rows of one model. If all of them decode, more steps follow, each for all rows, until (1) a row's
    last token was made, (2) `steps` are done, which is what there are blocks for, (3) it is `until_ns`, or (4) the
    core, which is told between two steps what happens meanwhile, asks for `EndRun`. With a row of a prompt, `steps` is
    1. The shell sends the `Tokens` of rows that decode to the proxy as each step ends: no token waits for a decision.
    `lane` is that of the instance's device on which it runs."""

    model: ModelId
    rows: tuple[Row, ...]
    steps: int
    until_ns: int
    lane: int = 0

    @property
    def prompts(self) -> tuple[Row, ...]:
        """The rows of prompts, which come before those that decode."""
        return tuple([row for row in self.rows if row.token is None])


class EndRun(Struct, frozen=True):
    """No more steps of the run under way on the lane: something else is to be done, or with other rows."""

    lane: int = 0


class DivideDevice(Struct, frozen=True):
    """Give each lane this share of the device's compute, in thousandths that add up to 1 000; one share of 1 000
    divides nothing. Only what the device offers is asked for, and only while no run is under way on any lane."""

    shares: tuple[int, ...]


class Track(Struct, frozen=True):
    """Make the sampler's state for a sequence that arrives with tokens already generated."""

    job: Job
    generated: tuple[int, ...]


class Untrack(Struct, frozen=True):
    request: RequestId


class Send(Struct, frozen=True):
    """Send this message; the link finds its receivers."""

    message: FromInstance


Effect = (
    Bind
    | Unbind
    | MapKv
    | UnmapKv
    | MapWeights
    | UnmapWeights
    | LoadWeights
    | AbandonLoad
    | RemoteLoad
    | StageImage
    | AcceptPages
    | WipePages
    | RevokePages
    | CopyBlocks
    | MoveBlocks
    | Run
    | EndRun
    | DivideDevice
    | Track
    | Untrack
    | Send
    | Decision
)
