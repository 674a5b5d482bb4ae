"""Effects: what an instance core asks its shell to do.

The shell performs them in order. A `Run…` is always the last of a list and is answered by exactly one `Stepped` or
`StepFailed`. Copies are answered by `Progress`; everything else is done when the shell returns to the core.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from aegis.core.block_runs import BlockCopy, Blocks
from aegis.core.decision import Decision
from aegis.core.ids import BlockRun, ModelId, PageRun, RequestId, SlabId
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
    of the node's model cache that hold the image; without any it is read from disk."""

    stream: StreamName
    model: ModelId
    event: EventHandle
    cached: tuple[PageRun, ...] = ()


class AbandonLoad(Struct, frozen=True, tag=True):
    """The rest of this copy need not be done; its event passes all the same."""

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


class RunPrefill(Struct, frozen=True):
    """Positions `[start, stop)` of what is to be prefilled: a chunk of it, or all. The KV of those before is in
    `blocks` already. Only the chunk with the last position makes a token, as the one step of its `Stepped`."""

    job: Job
    blocks: Blocks
    start: int
    stop: int

    @property
    def ends(self) -> bool:
        return self.stop == self.job.prefill_tokens


class DecodeRow(Struct, frozen=True):
    """`token`, generated as number `index - 1`, goes to `position`; what the first step makes is number `index`."""

    job: Job
    index: int
    token: int
    position: int
    blocks: list[BlockRun]  # the core's own table; read at once, never kept


class RunDecode(Struct, frozen=True):
    """Decode steps, one after the other, each for all rows, until (1) a row's last token was made, (2) `steps` are
    done, which is what there are blocks for, (3) it is `until_ns`, or (4) the core, which is told between two steps
    what happens meanwhile, asks for `EndRun`. At least one. The shell sends each step's `Tokens` to the proxy as it
    ends: no token waits for a decision."""

    model: ModelId
    rows: tuple[DecodeRow, ...]
    steps: int
    until_ns: int


class EndRun(Struct, frozen=True):
    """No more steps of the run under way: something else is to be done, or with other rows."""


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
    | AcceptPages
    | WipePages
    | RevokePages
    | CopyBlocks
    | MoveBlocks
    | RunPrefill
    | RunDecode
    | EndRun
    | Track
    | Untrack
    | Send
    | Decision
)
