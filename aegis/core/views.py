"""Views: what policies see, and the form of their answers. Views hold no true output length (rule 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

from msgspec import Struct

from aegis.core.ids import InstanceId, ModelId, RequestId

PPM: Final = 1_000_000
"""Shares are counted in whole millionths, because sums of these are exact, and so the same on every machine."""

MAX_BATCH: Final = 64
"""Sequences in a decode batch, whatever room there is."""


ANSWER_TOKENS: Final = 256.0
"""The tokens that a request is expected to make yet, where it is weighed whom to keep on time."""

LATE_WEIGHT: Final = 4
"""Time that an instance loses counts for no more than so many times the part of its work that is late for it: what is
on time all the same is no loss. It is the one of those tried that does well both with costs of GPUs and of a processor.
"""

JOIN_GAIN: Final = 0.1
"""The share of its time that a prompt has to save to run in the step of another one, if prefills are cut at all: who is
in a step with others gets its first token at the end of the whole step."""


def worth_of(priority: int) -> float:
    """A request, where it is weighed whom to keep on time: one of priority 0 is worth one, and each step less doubles
    that."""
    return 2.0**-priority


class Work(Struct, frozen=True):
    """A request that looks for an instance."""

    model: ModelId
    tokens: int  # to prefill, or cached after it
    owner: InstanceId | None = None  # the holder of its KV


# --- prefill ----------------------------------------------------------------------------------------------------------


class OpenGroup(NamedTuple):
    """Jobs of one model that run in a row, with room for more. `size` counts those that have run too."""

    instance: InstanceId
    group: int  # increasing along the queue of its instance
    size: int


class Load(NamedTuple):
    """The estimated time to finish all that waits at an instance, execution and switches (eq. 4 and 5)."""

    load_ns: int
    instance: InstanceId


class PrefillCandidate(NamedTuple):
    """The number of models whose last request was placed at an instance."""

    models: int
    instance: InstanceId


class PrefillView(Protocol):
    """The queues of the prefill instances, of which there is at least one. Nothing here is computed when it is asked
    for: everything is kept in order while queues change."""

    @property
    def by_load(self) -> Sequence[Load]:
        """All instances, the least loaded first; equal ones in order of instance. An idle one has no load."""
        ...

    def load_ns(self, instance: InstanceId) -> int: ...

    def open_groups(self, model: ModelId) -> Sequence[OpenGroup]:
        """Groups of the model with room, in order of instance, those of one instance from the front."""
        ...

    def active_on(self, model: ModelId) -> Sequence[InstanceId]:
        """The instances on which the model is running, or was the last to run; in order of instance."""
        ...

    def home(self, model: ModelId) -> InstanceId | None:
        """The instance of the last request of the model."""
        ...

    @property
    def by_model_count(self) -> Sequence[PrefillCandidate]:
        """All instances, the one that is home to the fewest models first."""
        ...

    def switch_ns(self, model: ModelId) -> int:
        """The estimated time to bring the model in."""
        ...

    def ttft_ns(self, model: ModelId) -> int: ...


class PrefillPlacement(Struct, frozen=True):
    """`group` None: a new group at the end of the instance's queue."""

    instance: InstanceId
    group: int | None


class PrefillPolicy(Protocol):
    """A policy that chooses the instance on which an arriving request is prefilled."""

    @property
    def max_group_size(self) -> int:
        """A group that has had so many jobs is not open any more."""
        ...

    def place(self, work: Work, queues: PrefillView) -> PrefillPlacement: ...


class PrefillJob(NamedTuple):
    """A job that waits to be prefilled, when an order is made."""

    model: ModelId
    ranked_ns: int  # when it arrived, shifted by its priority
    urgent_ns: int  # the deadline of its next token, likewise
    due_ns: int  # and as it is
    ttft_ns: int
    prefill_ns: int  # the estimated time of its prefill
    switch_ns: int  # and to bring its model in from nothing


class WaitingJobs(Struct, frozen=True):
    """All that waits at a prefill instance."""

    jobs: Sequence[PrefillJob]  # in the order there was
    load_ns: Mapping[ModelId, int]  # the estimated time to bring in those of their models that are not there
    relieved_ns: int  # when the job that had waited the longest, going by `ranked_ns`, was last the next one


class PrefillOrder(Protocol):
    """A policy that orders the jobs of a prefill instance."""

    def order(self, waiting: WaitingJobs, now_ns: int) -> list[int]:
        """The positions of all jobs that wait, of which there is at least one. It is asked anew between jobs."""
        ...


# --- decode -----------------------------------------------------------------------------------------------------------


class Share(NamedTuple):
    """The requests of one model on a decode instance."""

    instance: InstanceId
    requests: int
    batches: int  # as many as their tokens fill (Aegaeon Alg. 2, line 2)
    room_tokens: int  # that these batches take besides; 0 where they have all the sequences they may


class Tail(NamedTuple):
    """The last model in an instance's list, and how many requests of it came after all others. Of an idle instance the
    model that was the last to run, if there is one."""

    model: ModelId | None
    requests: int


class PlacedModels(NamedTuple):
    """Models whose requests were ever placed at an instance."""

    models: int
    weight_bytes: int


class Pressure(NamedTuple):
    """The share of an instance's time that its requests want, in millionths: a step of each of their models every TBT
    and, if their weights and KV do not fit its memory together, one load in every TTFT of the part that does not fit.
    All of it is estimated, as far as the proxy knows. Of two instances with equal shares, the one with
    fewer bytes of placed models comes first."""

    load_ppm: int
    placed_bytes: int
    instance: InstanceId


class Weights(NamedTuple):
    """The weights of a model on a decode instance, as far as the proxy can know: those of the models that were asked
    for last are there, as many as fit beside KV. It `fits` if what requests and all models at home there want of its
    memory, with this model, is no more than all."""

    there: bool
    fits: bool


class Length(NamedTuple):
    """The batches in a decode instance's work list."""

    batches: int
    instance: InstanceId


class DecodeView(Protocol):
    """The work lists of the decode instances, of which there is at least one; kept in order while they change."""

    @property
    def by_length(self) -> Sequence[Length]:
        """All instances, the shortest list first; equal ones in order of instance. An idle one has no batches."""
        ...

    def batches(self, instance: InstanceId) -> int: ...

    def shares(self, model: ModelId) -> Sequence[Share]:
        """The instances that have requests of the model, in order of instance."""
        ...

    def active_on(self, model: ModelId) -> Sequence[InstanceId]:
        """The instances on which the model is running, or was the last to run; in order of instance."""
        ...

    def tail(self, instance: InstanceId) -> Tail:
        """The last batch of the instance's list, counting the requests that have come and not left."""
        ...

    def last_token_ns(self, instance: InstanceId) -> int:
        """The time when a token last came from the instance."""
        ...

    def instances_of(self, model: ModelId) -> Sequence[InstanceId]:
        """The instances that requests of the model were ever placed on, the first one first."""
        ...

    def home(self, model: ModelId) -> InstanceId | None:
        """The instance of the last request of the model."""
        ...

    @property
    def by_pressure(self) -> Sequence[Pressure]:
        """All instances, the one under least pressure first."""
        ...

    def load_ppm(self, instance: InstanceId) -> int: ...

    def weights(self, model: ModelId, instance: InstanceId) -> Weights: ...

    def reload_ppm(self, model: ModelId) -> int:
        """The time of a load of its weights, as a part of its TTFT."""
        ...

    def placed_models(self, instance: InstanceId) -> PlacedModels:
        """All models whose requests were ever placed there."""
        ...

    def weight_bytes(self, model: ModelId) -> int: ...


class DecodePolicy(Protocol):
    """A policy that chooses the instance of a prefilled request; on mixed instances, the instance on which an arriving
    request is prefilled and goes on."""

    def place(self, work: Work, lists: DecodeView) -> InstanceId | None:
        """None: there is no place for this model, and its request fails."""
        ...


class BatchView(Struct, frozen=True):
    """A batch when a plan is made."""

    batch: int
    model: ModelId
    step_ns: int  # estimated time of one decode step
    tbt_ns: int
    switch_ns: int  # estimated time to bring the model in
    change_ns: int = 0  # and what a change to it takes besides, where it is not the running one
    requests: tuple[RequestId, ...] = ()  # in order of coming
    waiting: int = 0  # of them that have to be prefilled here
    prefill_ns: int = 0  # estimated time of their prefills
    first_due_ns: int | None = None  # the earliest deadline of a first token among them, shifted by priority
    active: bool = False  # the model is the running one, or was the last to run
    decoded_ns: int = -1  # when its last turn with decode steps was given to it
    ran_ns: int = -1  # when a run in a turn of its own last began
    due_ns: int | None = None  # that of a next token among those that are not to be prefilled, likewise
    savable_due_ns: int | None = None  # and as it is, of those not yet missed by a whole TBT; where prefills may be cut
    ttft_ns: int = 0
    resident: bool = False  # the model's weights are on the device, or on their way
    turn_ns: int | None = None  # for how long it has had the turn, from the first step; None: it has it not
    in_time_by_ns: int | None = None  # the latest start with which its first token that can be on time is; where shed
    worth: float = 0.0  # its requests, each by its priority, and less the later it is; where batches may be shed
    there: bool = False  # its weights are on the device, and it can have a run without anything being brought in
    gap_ns: int = 0
    stream_ns: int | None = None  # when the stream that can go on at once and has waited the longest had its last token
    prompt_ns: int = 0  # estimated time of the prefill that is next here, as far as it is still to be done
    piece_ns: int = 0  # and of the least part of it that is run: all of it, if that takes half a gap target at most
    prompt_rank_ns: int | None = None  # and its place among all prompts: arrival, shifted by priority, and its length
    stall_ns: int | None = None  # what the first run of another batch has lately cost its instance; None: not known yet
    steps_share: float = 1.0  # of its instance's time, went into steps of all of a batch; more, where two have them
    late_ns: int = 0  # of the next tokens of its streams, on average of all its requests; where batches may be shed
    abreast: float = 0.0  # of the time of its instance's turns, another batch had steps beside theirs
    on_time: float = 0.0  # its requests, each for less the later it is; where batches may be shed
    again_ns: int = 0  # of `prefill_ns`, for requests that have been prefilled before, and have lost their KV


class Turn(Struct, frozen=True):
    """`quota_ns` None: until the batch is empty, or has nothing left to do that the turn is for. Until `free_until_ns`
    no batch needs a decode step: a prefill that would end later is cut into chunks, between which there is one. A turn
    that is a `pause` of another one is over after one run. A new plan is made then, and the other turn goes on. One
    that is a `forecast` is only given as the first of its plan: when a turn is over, a new plan is made."""

    batch: int
    quota_ns: int | None
    free_until_ns: int | None = None
    prefills: bool = True
    decodes: bool = True
    pause: bool = False
    forecast: bool = False


class Renewal(StrEnum):
    """The moments at which a plan is made anew. It always is when all its turns are over."""

    ROUND = "round"  # only then
    TURN = "turn"  # when one is: what the plan says of later ones is a forecast
    ARRIVAL = "arrival"  # at once when a request has come, or a chunk of a prefill is done


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRules:
    """The rules of an instance that a policy of turns sets."""

    renewal: Renewal = Renewal.ROUND
    max_batch: int = MAX_BATCH
    in_order: bool = False  # only the last batch of the list takes newcomers, rather than the first of their model
    prefetches: bool = True  # the next turn's model comes in during this one
    evicts: bool = True  # weights may leave for others' weights or KV; otherwise only where nothing else could go on
    keeps_kv: bool = True  # over a switch; otherwise preempted requests are prefilled again
    chunk_tokens: int | None = None  # the shortest chunk that is worth its cost; None: prefills are not cut or joined
    defers_refused: bool = False  # deadlines of those for whom their batch's last turn had no room do not count in it
    fills_loads: bool = False  # while its weights are on their way, a turn may pause for others, run after run
    rotates: bool = False  # rows ahead of their deadlines leave a device that is too small for others of their batch
    merges: bool = False  # the batch that is given a turn takes over others of its model that fit
    budget_tokens: int | None = None  # of a step with a prompt, its decode rows included; None: as time allows
    step_tokens: int | None = None  # of prompts, in one step at most
    overtakes_beside: bool = False  # a short prompt runs with the decode, and needs not wait for one beside it
    join_gain: float = JOIN_GAIN
    sheds: bool = False  # a batch may be put off where not all can be on time
    divides_kv: bool = False  # what weights leave of the device is in equal parts, one for the KV of each model there


class RoundPolicy(Protocol):
    """A policy that chooses the batch that has the next turn on an instance, and for how long."""

    @property
    def rules(self) -> TurnRules: ...

    def plan(self, batches: Sequence[BatchView], now_ns: int) -> list[Turn]:
        """Orders the work list and says how long each batch runs. `batches`, of which there is at least one, is in the
        list's order. A batch whose sequences all have to be prefilled needs a turn that does."""
        ...
