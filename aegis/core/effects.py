"""What an instance core asks its shell to do. Performed in order; a `Run…` is always the last of a list and is answered
by exactly one `Stepped` or `StepFailed`. Copies are answered by `Progress`; the rest is done when the shell returns to
the core."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from aegis.core.block_runs import BlockCopy, Blocks
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


@dataclass(frozen=True, slots=True)
class Bind:
    """Bind the model's parameters to its permanent range, `offset_pages` into the weights' address space. A backend
    that refuses is answered with `DropModel`, and the `ModelAdded` that follows becomes a `ModelFailed`."""

    spec: ModelSpec
    offset_pages: int


@dataclass(frozen=True, slots=True)
class Unbind:
    model: ModelId


@dataclass(frozen=True, slots=True)
class MapKv:
    """Back this slab of the device's KV range with these pages."""

    slab: SlabId
    runs: tuple[PageRun, ...]


@dataclass(frozen=True, slots=True)
class UnmapKv:
    slab: SlabId


@dataclass(frozen=True, slots=True)
class MapWeights:
    """Back the model's range with these pages."""

    model: ModelId
    runs: tuple[PageRun, ...]


@dataclass(frozen=True, slots=True)
class UnmapWeights:
    model: ModelId


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Copy the model's image to its range; `event` is what that copy will be on the stream. `cached` are the extents
    of the node's model cache that hold the image; without any it is read from disk."""

    stream: StreamName
    model: ModelId
    event: EventHandle
    cached: tuple[PageRun, ...] = ()


@dataclass(frozen=True, slots=True)
class AbandonLoad:
    """What is left of this copy need not be done; its event passes all the same."""

    event: EventHandle


@dataclass(frozen=True, slots=True)
class AcceptPages:
    """These pages of the device are ours from now on."""

    runs: tuple[PageRun, ...]


@dataclass(frozen=True, slots=True)
class WipePages:
    """Zero these pages, which are in no range, on the scrub stream."""

    runs: tuple[PageRun, ...]
    event: EventHandle


@dataclass(frozen=True, slots=True)
class RevokePages:
    """These pages are not ours any more."""

    runs: tuple[PageRun, ...]


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """Copy KV blocks between device and host slabs, once `after` has passed."""

    stream: StreamName
    shape: KvShape
    copies: tuple[BlockCopy, ...]
    after: EventHandle | None
    event: EventHandle


@dataclass(frozen=True, slots=True)
class MoveBlocks:
    """Copy KV blocks within the device before anything else is done."""

    shape: KvShape
    copies: tuple[BlockCopy, ...]


@dataclass(frozen=True, slots=True)
class RunPrefill:
    job: Job
    blocks: Blocks


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """`token`, generated as number `index - 1`, goes to `position`; what the first step makes is number `index`."""

    job: Job
    index: int
    token: int
    position: int
    blocks: list[BlockRun]  # the core's own table; read at once, never kept


@dataclass(frozen=True, slots=True)
class RunDecode:
    """Decode steps, one after the other, each for all rows, until (1) a row's last token was made, (2) `steps` are
    done, which is what there are blocks for, (3) it is `until_ns`, or (4) the core, which is told between two steps
    what happens meanwhile, asks for `EndRun`. At least one. The shell sends each step's `Tokens` to the proxy as it
    ends: no token waits for a decision."""

    model: ModelId
    rows: tuple[DecodeRow, ...]
    steps: int
    until_ns: int


@dataclass(frozen=True, slots=True)
class EndRun:
    """No more steps of the run under way: something else is to be done, or with other rows."""


@dataclass(frozen=True, slots=True)
class Track:
    """Make the sampler's state for a sequence that arrives with tokens already generated."""

    job: Job
    generated: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Untrack:
    request: RequestId


@dataclass(frozen=True, slots=True)
class Send:
    """To the proxy."""

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
)
