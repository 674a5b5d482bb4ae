"""Messages between the instances and their node or proxies: control only, never KV bytes.

Each is an event to the core that receives it and an effect of the core that sends it; msgpack on the wire. Messages of
one request carry its `attempt`: those of another one come from a process that was lost meanwhile, and are dropped.
"""

from __future__ import annotations

from msgspec import Struct

from aegis.core.ids import BlockRun, InstanceId, ModelId, PageRun, ProxyId, RequestId, SlabId
from aegis.core.model import ModelSpec, Slo
from aegis.core.request import EventHandle, Failure, FinishReason, Job, KvHandle, Token
from aegis.core.role import Role

# --- to an instance ---------------------------------------------------------------------------------------------------


class AddModel(Struct, frozen=True, tag=True):
    """Bind this model; answered by `ModelAdded` or `ModelFailed`."""

    spec: ModelSpec


class SetSlo(Struct, frozen=True, tag=True):
    """From now on these are the model's deadlines. An instance that does not know the model ignores it."""

    model: ModelId
    slo: Slo


class DropModel(Struct, frozen=True, tag=True):
    """Forget this model; no job of it is left. Answered by `ModelDropped`."""

    model: ModelId


class UnloadModel(Struct, frozen=True, tag=True):
    """Let the model's weights leave the device as soon as no job of it is here; answered by `ModelUnloaded` then. A job
    that comes later brings them back."""

    model: ModelId


class Submit(Struct, frozen=True, tag=True):
    """Run this prefill; on a prefill instance in group `group` (Aegaeon Alg. 1). A mixed instance then decodes the
    request as well. `Broken` where the model is not there: it may have been dropped before the proxy knew."""

    job: Job
    group: int = 0


class Adopt(Struct, frozen=True, tag=True):
    """To a decode instance: go on from here. `tokens` are all generated so far, those of `job.sent` included. `Broken`
    as `Submit` is, the KV being released."""

    job: Job
    tokens: tuple[int, ...]
    kv: KvHandle


class BringIn(Struct, frozen=True, tag=True):
    """To a decode or mixed instance: requests of the model are to come from elsewhere. Bring its weights in, if there
    is room that nobody here needs; answered by `BroughtIn`."""

    model: ModelId


class HandOver(Struct, frozen=True, tag=True):
    """To a decode or mixed instance: the request goes on elsewhere. Answered by `HandedOver`, unless the request ends,
    or is given up, before: a step under way and a prefill that has begun are finished first. Without `with_kv` its KV
    is not wanted."""

    request: RequestId
    attempt: int
    with_kv: bool = True


class Cancel(Struct, frozen=True, tag=True):
    """Free all the request holds here. Not answered."""

    request: RequestId
    attempt: int


class ReleaseKv(Struct, frozen=True, tag=True):
    """To the owner of the request's `KvHandle`: nothing reads the blocks any more."""

    request: RequestId
    attempt: int


class GrantSlabs(Struct, frozen=True, tag=True):
    """The node leases these slabs of its host KV region. `refused` is true where there were fewer than asked for."""

    slabs: tuple[SlabId, ...]
    refused: bool = False


class KvFetched(Struct, frozen=True, tag=True):
    """Answers `FetchKv`, always once. Where there is a reason, the blocks hold nothing."""

    request: RequestId
    attempt: int
    reason: str = ""


class GrantPages(Struct, frozen=True, tag=True):
    """The device lends these pages. `refused` is true where the request cannot be granted now: it is remembered. An
    `excessive` one is more than the instance's limit allows."""

    runs: tuple[PageRun, ...]
    refused: bool = False
    excessive: bool = False


class TakeBack(Struct, frozen=True, tag=True):
    """Give `pages` back within `patience_ns`, all or none; answered once by a `GaveBack` of the same `number`. A
    `gentle` one may not disturb requests: the instance gives only pages that it does not need now, however few, down to
    `keep` pages held."""

    number: int
    pages: int
    patience_ns: int
    gentle: bool = False
    keep: int = 0


class ImageCached(Struct, frozen=True, tag=True):
    """The model's image lies in these extents of the node's model cache, until `EvictImage` is answered."""

    model: ModelId
    extents: tuple[PageRun, ...]


class EvictImage(Struct, frozen=True, tag=True):
    """Load the model from the cache no more; answered by `ImageEvicted` when no load from it is under way."""

    model: ModelId


class CarryImage(Struct, frozen=True, tag=True):
    """Carry a part of the `load` of another instance, `target`, whose image of `nbytes` is in these extents of the
    model cache: stage the pieces that its words `requests` ask for. Answered by `CarryBegan` and, once it wants no more
    or at once, by `CarryOver`."""

    target: InstanceId
    load: EventHandle
    peer: int
    nbytes: int
    cached: tuple[PageRun, ...]
    requests: tuple[int, ...]


class PeerReady(Struct, frozen=True, tag=True):
    """An `instance` on another device, whose memory is at `address`, carries a part of the `load`: see `RemoteLoad`."""

    load: EventHandle
    peer: int
    instance: InstanceId
    address: str
    runs: tuple[PageRun, ...]
    staged: int


class KeepKv(Struct, frozen=True, tag=True):
    """Answers `OfferKv`: its blocks from number `first` on, as many as these, are to be copied here. With none it keeps
    nothing, and needs no answer."""

    offer: int
    first: int
    blocks: tuple[BlockRun, ...]


class PrefixChecked(Struct, frozen=True, tag=True):
    """Answers `CheckPrefix`. Where it is not `intact`, what was copied may be anything."""

    request: RequestId
    attempt: int
    intact: bool


class ForgetPeer(Struct, frozen=True, tag=True):
    """This instance was lost: finish or drop every transfer from its slabs, then answer `PeerForgotten`. What it handed
    over has one of these words for its event: KV with another is of the process that came after it."""

    peer: InstanceId
    words: tuple[int, ...]


class MeetProxy(Struct, frozen=True, tag=True):
    """From the node, after all models: a proxy listens at this address. It is sent a `Greeting`."""

    proxy: ProxyId
    address: str


class DropProxy(Struct, frozen=True, tag=True):
    """The proxy is lost: free all that its requests hold, except what was handed over. Answered by `ProxyDropped` when
    no transfer of theirs from another instance's slabs is left."""

    proxy: ProxyId


class ReleaseProxy(Struct, frozen=True, tag=True):
    """Every instance has dropped the proxy: nothing reads KV that was handed over for its requests any more."""

    proxy: ProxyId


class Ping(Struct, frozen=True, tag=True):
    """Answered by `Pong` when the main loop gets to it, whatever the core is at."""


class Shutdown(Struct, frozen=True, tag=True):
    """Finish the step in hand and exit 0."""


ToInstance = (
    AddModel
    | SetSlo
    | DropModel
    | UnloadModel
    | Submit
    | Adopt
    | BringIn
    | HandOver
    | Cancel
    | ReleaseKv
    | GrantSlabs
    | KvFetched
    | GrantPages
    | TakeBack
    | ImageCached
    | CarryImage
    | PeerReady
    | EvictImage
    | KeepKv
    | PrefixChecked
    | ForgetPeer
    | MeetProxy
    | DropProxy
    | ReleaseProxy
    | Ping
    | Shutdown
)


# --- from an instance -------------------------------------------------------------------------------------------------


class Ready(Struct, frozen=True, tag=True):
    """The engine is initialised; sent once per process."""

    pid: int


class Greeting(Struct, frozen=True, tag=True):
    """To a proxy, first of all: it may be sent requests."""

    role: Role


class Pong(Struct, frozen=True, tag=True):
    """Answers `Ping`."""


class ModelAdded(Struct, frozen=True, tag=True):
    model: ModelId


class ModelFailed(Struct, frozen=True, tag=True):
    model: ModelId
    reason: str


class ModelDropped(Struct, frozen=True, tag=True):
    model: ModelId


class ModelUnloaded(Struct, frozen=True, tag=True):
    """Answers `UnloadModel`."""

    model: ModelId


class Started(Struct, frozen=True, tag=True):
    """A prefill began."""

    request: RequestId
    attempt: int


class Tokens(Struct, frozen=True, tag=True):
    """Tokens `[first, first + len(tokens))` of the request. With `finish` set nothing follows."""

    request: RequestId
    attempt: int
    first: int
    tokens: tuple[Token, ...]
    finish: FinishReason | None = None


class Prefilled(Struct, frozen=True, tag=True):
    """The first token, and where the KV will be; None: the sequence goes on where it is. Not sent when the first token
    was also the last (`Tokens` is)."""

    request: RequestId
    attempt: int
    token: Token
    kv: KvHandle | None
    duration_ns: int


class PromptLogprobs(Struct, frozen=True, tag=True):
    """For `echo` with `logprobs`: one entry per prompt token from the second on; before the first token."""

    request: RequestId
    attempt: int
    tokens: tuple[Token, ...]


class Reused(Struct, frozen=True, tag=True):
    """The first `tokens` of the request's prompt were not prefilled: their KV was kept. Before the first token."""

    request: RequestId
    attempt: int
    tokens: int


class KvReleased(Struct, frozen=True, tag=True):
    """The instance that adopted a `KvHandle` is done with it: the KV has arrived, or is no longer wanted. Forwarded to
    the owner as `ReleaseKv`, whatever became of the request meanwhile."""

    request: RequestId
    attempt: int
    kv: KvHandle


class BroughtIn(Struct, frozen=True, tag=True):
    """Answers `BringIn`: the weights are there now, or there is no room for them before a request's turn."""

    model: ModelId
    there: bool


class HandedOver(Struct, frozen=True, tag=True):
    """Answers `HandOver`: nothing more comes from here, after so many tokens in all. The KV will be there; None: it is
    to be made again, because it was not wanted, had not been made, or the host has no slab for it. The owner of the KV
    is another instance where it had not arrived from there yet."""

    request: RequestId
    attempt: int
    generated: int
    kv: KvHandle | None


class Phase(Struct, frozen=True, tag=True):
    """A request's batch got or lost its turn."""

    requests: tuple[RequestId, ...]
    running: bool


class GaveUp(Struct, frozen=True, tag=True):
    """The instance gave the request up: there is no memory for its KV anywhere, or its model could not be loaded. So it
    has to be prefilled again."""

    request: RequestId
    attempt: int


class Broken(Struct, frozen=True, tag=True):
    """The engine failed on a step the request was part of. Trying again would do the same, so it ends. `reason` is for
    the client."""

    request: RequestId
    attempt: int
    reason: str
    kind: Failure = Failure.GENERATION


class NeedSlabs(Struct, frozen=True, tag=True):
    """Asks the node for host KV slabs."""

    count: int


class ReturnSlabs(Struct, frozen=True, tag=True):
    slabs: tuple[SlabId, ...]


class FetchKv(Struct, frozen=True, tag=True):
    """This KV, which lies on another machine, is to be copied into these host blocks of the sender's, in this order.
    Answered by `KvFetched`; until then they are written to."""

    request: RequestId
    attempt: int
    kv: KvHandle
    blocks: tuple[BlockRun, ...]
    block_bytes: int


class NeedPages(Struct, frozen=True, tag=True):
    """Asks the device for pages. A new request replaces the last one; 0 withdraws it. An `urgent` one stands for work
    that cannot go on without: others are asked to give pages back for it. A `crowded` one stands for requests of the
    running turn: up to an equal share of the device, others are asked to give for it too."""

    count: int
    urgent: bool
    crowded: bool = False


class GaveBack(Struct, frozen=True, tag=True):
    """Answers `TakeBack`. These pages are given back, unmapped and wiped. With `refused`, more was asked for than could
    be had in time, nothing was given, and `spare` pages could have been."""

    number: int
    runs: tuple[PageRun, ...]
    refused: bool = False
    spare: int = 0


class ImageEvicted(Struct, frozen=True, tag=True):
    model: ModelId


class ImageUnreadable(Struct, frozen=True, tag=True):
    """The model could not be loaded from its image on disk; what waited for it here is given up."""

    model: ModelId
    reason: str


class NeedLinks(Struct, frozen=True, tag=True):
    """A demanded `load` has begun, of an image of `nbytes` in these extents of the model cache: peers whose links are
    idle may carry parts of it. `requests` are the words in which each of them is asked for pieces. Until `LoadOver`
    the link is busy."""

    load: EventHandle
    nbytes: int
    cached: tuple[PageRun, ...]
    requests: tuple[tuple[int, ...], ...]


class LoadOver(Struct, frozen=True, tag=True):
    """The load that `NeedLinks` told of has ended."""

    load: EventHandle


class CarryBegan(Struct, frozen=True, tag=True):
    """Answers `CarryImage`: pieces are staged in these pages of the device, and the word `staged` says how many."""

    target: InstanceId
    load: EventHandle
    peer: int
    runs: tuple[PageRun, ...]
    staged: int


class CarryOver(Struct, frozen=True, tag=True):
    """Answers `CarryImage`: nothing is carried any more, or nothing was: the link is busy, or there are no pages."""

    target: InstanceId
    load: EventHandle


class OfferKv(Struct, frozen=True, tag=True):
    """To the node: the KV of these tokens, whole blocks of them, is on the device and needed no more. Answered by
    `KeepKv`. A token takes `TOKEN_BYTES`, little-endian."""

    offer: int
    model: ModelId
    tokens: bytes


class KvKept(Struct, frozen=True, tag=True):
    """The copy that `KeepKv` asked for has ended; if it is not `done`, it never will be."""

    offer: int
    done: bool


class CheckPrefix(Struct, frozen=True, tag=True):
    """A request's `KeptPrefix` has been copied: was it still there?"""

    request: RequestId
    attempt: int
    entry: int


class PeerForgotten(Struct, frozen=True, tag=True):
    peer: InstanceId


class ProxyDropped(Struct, frozen=True, tag=True):
    proxy: ProxyId


class SwitchDone(Struct, frozen=True, tag=True):
    """A model became the running one. Nanoseconds by phase: `make_room` (victims released, pages mapped), `copy`
    (waiting for the weights, 0 when prefetched), `kv` (waiting for the first request's KV)."""

    model: ModelId
    prefetched: bool
    make_room_ns: int
    copy_ns: int
    kv_ns: int
    nbytes: int
    work_share: float = 1.0  # of the instance's time lately; more than all where two batches go on at a time

    @property
    def duration_ns(self) -> int:
        return self.make_room_ns + self.copy_ns + self.kv_ns


class StepsTook(Struct, frozen=True, tag=True):
    """The time of a decode step of a batch of this model, estimated by the instance after its last run: of `rows`
    sequences with so many cached tokens in all. Sent now and then, to all proxies."""

    model: ModelId
    context_tokens: int
    rows: int
    step_ns: int
    work_share: float = 1.0  # as in `SwitchDone`


class SlabsOfShape(Struct, frozen=True):
    """The KV slabs of one shape that an instance holds in one region, `device` or `host`. Their blocks are free,
    reserved (the content is not there yet), used, or moving (given up, and still part of a transfer)."""

    region: str
    models: tuple[ModelId, ...]  # of that shape
    slab_bytes: int
    block_bytes: int
    slabs: int
    free_blocks: int
    reserved_blocks: int
    used_blocks: int
    moving_blocks: int


class Telemetry(Struct, frozen=True, tag=True):
    """Counters since the process started and gauges of now; sent a few times a second while anything changes.

    Names of counters end in `_total`. `accounts` are pages, slabs and blocks as `{"device_pages_free": …}`. `lanes` is
    the number of lanes that the device can have, 1 where it cannot be divided or is not to be.
    """

    running_model: ModelId | None
    resident: tuple[ModelId, ...]
    queued: int
    running: int
    counters: dict[str, int]
    accounts: dict[str, int]
    loading: tuple[ModelId, ...] = ()
    shapes: tuple[SlabsOfShape, ...] = ()
    lanes: int = 1


FromInstance = (
    Ready
    | Greeting
    | Pong
    | ModelAdded
    | ModelFailed
    | ModelDropped
    | ModelUnloaded
    | Started
    | Tokens
    | Prefilled
    | PromptLogprobs
    | Reused
    | KvReleased
    | BroughtIn
    | HandedOver
    | Phase
    | GaveUp
    | Broken
    | NeedSlabs
    | ReturnSlabs
    | FetchKv
    | NeedPages
    | GaveBack
    | ImageEvicted
    | ImageUnreadable
    | NeedLinks
    | LoadOver
    | CarryBegan
    | CarryOver
    | OfferKv
    | KvKept
    | CheckPrefix
    | PeerForgotten
    | ProxyDropped
    | SwitchDone
    | StepsTook
    | Telemetry
)
