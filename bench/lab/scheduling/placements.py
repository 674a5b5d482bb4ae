"""A steady stream of requests through the router, every event timed: what placing takes while a market serves.

Instances are stand-ins that keep real queues and answer at once; between two events of theirs a core cannot tell them
from others. As many requests wait and decode at a time as the size says, models are as popular as Zipf has it.
"""

from __future__ import annotations

import time
from bisect import bisect
from collections import defaultdict, deque
from itertools import accumulate

from msgspec import Struct

from aegis.core.estimators import Hardware, Latency
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.messages import Adopt, Cancel, KvReleased, Prefilled, Started, Submit, SwitchDone, Tokens
from aegis.core.model import KvLayer, KvShape, Manifest, ModelSpec
from aegis.core.request import EventHandle, FinishReason, Job, KvHandle, Sampling, Token
from aegis.core.rng import Stream
from aegis.core.role import Role
from decode.policies.weighted_round_robin import WeightedRoundRobin
from prefill.policies.grouped_fcfs import GroupedFcfs
from prefill.queue import Queue
from proxy.routing.events import ClientLeft, Effect, Event, InstanceUp, MessageReceived, ModelUp, RequestArrived, To
from proxy.routing.router import Router

_TRUE = Hardware(copy_bytes_per_s=2e10, memory_bytes_per_s=2e12, flops_per_s=3e14)
_PROMPT = tuple(range(1500))
_CAPACITY_TOKENS = 40_000
_MEAN_MESSAGES = 20  # of one token each, for a request
_CANCEL_EVERY = 20  # arrivals


class Size(Struct, frozen=True):
    """Three of eight instances prefill."""

    instances: int
    models: int
    waiting: int = 4  # requests for each prefill instance
    decoding: int = 32  # for each decode instance

    @property
    def prefills(self) -> int:
        return max(1, self.instances * 3 // 8)

    def __str__(self) -> str:
        return f"{self.instances} × {self.models}"


def make_spec(index: int) -> ModelSpec:
    """A model of 3, 7 or 13 thousand million parameters."""
    parameters = (3, 7, 13)[index % 3] * 1_000_000_000
    manifest = Manifest(
        fingerprint=str(index),
        architecture="",
        dtype="bfloat16",
        image_bytes=2 * parameters,
        tensors=(),
        kv=KvShape((KvLayer(32, 128, 128),) * 32, "bfloat16", 2),
        context_tokens=4096,
        vocab_size=32_000,
        eos_token_ids=(),
        hidden_size=4096,
        intermediate_size=11_008,
        parameters=parameters,
    )
    return ModelSpec(ModelId(f"model-{index:05}"), manifest, "", "", "")


class Replay:
    """`durations_ns` by what happened, from when `measure` was called."""

    def __init__(self, size: Size, *, seed: int = 0) -> None:
        self.durations_ns: defaultdict[str, list[int]] = defaultdict(list)
        self._size, self._draw = size, Stream(seed, "schedule", size.instances, size.models)
        self._core = Router(GroupedFcfs(), WeightedRoundRobin(), Hardware())
        specs = [make_spec(index) for index in range(size.models)]
        self._models = [spec.model for spec in specs]
        self._popularity = list(accumulate(1 / (rank + 1) for rank in range(size.models)))
        self._true = {spec.model: Latency(spec.manifest, _TRUE) for spec in specs}
        self._queues = {InstanceId(f"prefill-{i:04}"): Queue() for i in range(size.prefills)}
        self._active: dict[InstanceId, ModelId] = {}
        self._waiting: dict[RequestId, Job] = {}
        self._left: dict[RequestId, int] = {}  # messages until a decoding request ends
        self._decoding: deque[tuple[RequestId, InstanceId, int]] = deque()  # with the index of its next token
        self._arrived = 0
        for spec in specs:
            self._core.on(ModelUp(spec, _CAPACITY_TOKENS), 0)
        for instance in self._queues:
            self._core.on(InstanceUp(instance, Role.PREFILL), 0)
        for i in range(size.instances - size.prefills):
            self._core.on(InstanceUp(InstanceId(f"decode-{i:04}"), Role.DECODE), 0)

    def measure(self, arrivals: int) -> None:
        """Measures so many arrivals, once the queues are as full as they stay."""
        full = self._size.decoding * (self._size.instances - self._size.prefills)
        while len(self._decoding) < full:
            self._round(full)
        self.durations_ns.clear()
        for _ in range(arrivals):
            self._round(full)

    def _round(self, full: int) -> None:
        self._arrive()
        if self._arrived % _CANCEL_EVERY == 0:
            self._cancel()
        while len(self._waiting) > self._size.waiting * len(self._queues):
            self._prefill()
        for _ in range(_MEAN_MESSAGES * 2 if len(self._decoding) >= full else 2):
            self._decode()

    def _tell(self, what: str, event: Event) -> list[Effect]:
        start_ns = time.perf_counter_ns()
        effects = self._core.on(event, start_ns)
        self.durations_ns[what].append(time.perf_counter_ns() - start_ns)
        return effects

    def _arrive(self) -> None:
        self._arrived += 1
        model = self._models[bisect(self._popularity, self._draw.uniform() * self._popularity[-1])]
        prompt = _PROMPT[: 1 + self._draw.below(len(_PROMPT))]
        job = Job(RequestId(self._arrived), 1, model, prompt, Sampling(max_tokens=1000), 0)
        self._waiting[job.request] = job
        for effect in self._tell("arrival", RequestArrived(job)):
            if isinstance(effect, To) and isinstance(effect.message, Submit):
                self._queues[effect.instance].submit(effect.message)

    def _prefill(self) -> None:
        """Instances in turn, each what is in front of its queue."""
        instance = next(iter(self._queues))
        queue = self._queues[instance] = self._queues.pop(instance)
        group = queue.front()
        if group is None:
            return
        job = group.jobs.popleft()
        del self._waiting[job.request]
        true = self._true[job.model]
        if self._active.get(instance) != job.model:
            self._active[instance] = job.model
            switch = SwitchDone(job.model, self._draw.uniform() < 0.5, 0, self._noisy(true.switch_ns()), 0, 0)
            self._tell("switch", MessageReceived(instance, switch))
        self._tell("start", MessageReceived(instance, Started(job.request, 1)))
        kv = KvHandle(instance, ((0, 1),), job.prefill_tokens, EventHandle(0, 0))
        took_ns = self._noisy(true.prefill_ns(job.prefill_tokens))
        for effect in self._tell(
            "first token", MessageReceived(instance, Prefilled(job.request, 1, Token(1), kv, took_ns))
        ):
            if isinstance(effect, To) and isinstance(effect.message, Adopt):
                self._decoding.append((job.request, effect.instance, 1))
                self._left[job.request] = 1 + self._draw.below(2 * _MEAN_MESSAGES)
                self._tell("KV arrived", MessageReceived(effect.instance, KvReleased(job.request, 1, kv)))

    def _decode(self) -> None:
        if not self._decoding:
            return
        request, instance, index = self._decoding.popleft()
        left = self._left.pop(request, 0)
        if left > 1:
            self._left[request] = left - 1
            self._decoding.append((request, instance, index + 1))
            self._tell("token", MessageReceived(instance, Tokens(request, 1, index, (Token(1),))))
        elif left == 1:
            self._tell(
                "last token", MessageReceived(instance, Tokens(request, 1, index, (Token(1),), FinishReason.STOP))
            )

    def _cancel(self) -> None:
        """Cancels a request: in turn one that waits and one that decodes."""
        among = self._waiting if self._arrived % (2 * _CANCEL_EVERY) else self._left
        if not among:
            return
        request = next(iter(among))
        del among[request]
        for effect in self._tell("cancel", ClientLeft(request)):
            if isinstance(effect, To) and isinstance(effect.message, Cancel) and effect.instance in self._queues:
                self._queues[effect.instance].cancel(request, 1)

    def _noisy(self, true_ns: int) -> int:
        return round(true_ns * (0.9 + 0.2 * self._draw.uniform()))
