"""What an instance core asks its shell to do. Performed in order; a `Run…` is always the last of a list and is answered
by exactly one `Stepped` or `StepFailed`. Copies are answered by `Progress`; the rest is done when the shell returns to
the core."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from aegis.core.ids import BlockId, ModelId, PageRun, RequestId, SlabId
from aegis.core.messages import FromInstance
from aegis.core.model import KvShape, ModelSpec
from aegis.core.request import EventHandle, Job


class StreamName(StrEnum):
    """The streams of an instance beside its compute."""

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
    """Copy KV blocks between device and host slabs, `(source, destination)` each, once `after` has passed."""

    stream: StreamName
    shape: KvShape
    pairs: tuple[tuple[BlockId, BlockId], ...]
    after: EventHandle | None
    event: EventHandle


@dataclass(frozen=True, slots=True)
class MoveBlocks:
    """Copy KV blocks within the device, `(source, destination)` each, before anything else is done."""

    shape: KvShape
    pairs: tuple[tuple[BlockId, BlockId], ...]


@dataclass(frozen=True, slots=True)
class RunPrefill:
    job: Job
    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class DecodeRow:
    request: RequestId
    token: int
    position: int
    blocks: list[BlockId]  # the core's own table; read at once, never kept


@dataclass(frozen=True, slots=True)
class RunDecode:
    model: ModelId
    rows: tuple[DecodeRow, ...]


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
    | Track
    | Untrack
    | Send
)
