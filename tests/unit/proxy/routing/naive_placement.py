"""Placing as the papers write it: views of all instances made for every request, every policy looking through all of
them. The reference for what is kept in order instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from aegis.core.estimators import Latency
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.views import MAX_BATCH, PrefillPlacement, Tail


@dataclass(slots=True)
class Group:
    number: int
    model: ModelId
    size: int = 0
    waiting: dict[RequestId, int] = field(default_factory=dict)


@dataclass(slots=True)
class Queue:
    instance: InstanceId
    running: ModelId | None = None
    groups: dict[int, Group] = field(default_factory=dict)
    made: int = 0
    foreign_ns: int = 0  # what other proxies have there

    def add(self, request: RequestId, model: ModelId, tokens: int, group: int | None) -> int:
        if group is None:
            self.made += 1
            group = self.made
            self.groups[group] = Group(group, model)
        self.groups[group].size += 1
        self.groups[group].waiting[request] = tokens
        return group

    def remove(self, request: RequestId) -> None:
        for group in list(self.groups.values()):
            group.waiting.pop(request, None)
            if not group.waiting:
                del self.groups[group.number]


def load_ns(queue: Queue, latency: Mapping[ModelId, Latency]) -> int:
    """Eq. 4 and 5. The jobs of a model are priced together, so that nothing is rounded twice."""
    total, running = queue.foreign_ns, queue.running
    waiting: dict[ModelId, list[int]] = {}
    for group in queue.groups.values():
        if group.model != running:
            total += latency[group.model].switch_ns()
            running = group.model
        waiting.setdefault(group.model, []).extend(group.waiting.values())
    return total + sum(latency[m].prefills_ns(len(ts), sum(ts), sum(t * t for t in ts)) for m, ts in waiting.items())


def algorithm_1(
    model: ModelId, queues: Sequence[Queue], latency: Mapping[ModelId, Latency], max_group_size: int
) -> PrefillPlacement:
    """Aegaeon §4.2. `queues` in order of instance."""
    min_load_ns, best = float("inf"), queues[0]
    for queue in queues:
        for group in queue.groups.values():
            if group.model == model and group.size < max_group_size:
                return PrefillPlacement(queue.instance, group.number)
    for queue in queues:
        load = load_ns(queue, latency)
        if load < min_load_ns:
            min_load_ns, best = load, queue
    return PrefillPlacement(best.instance, None)


@dataclass(slots=True)
class List:
    """The requests of a decode instance, and their tokens when they came. `foreign` are how many other proxies have
    there, and their tokens."""

    instance: InstanceId
    held: dict[RequestId, tuple[ModelId, int]] = field(default_factory=dict)
    placed: set[ModelId] = field(default_factory=set)
    active: ModelId | None = None
    foreign: dict[ModelId, tuple[int, int]] = field(default_factory=dict)

    def tail(self) -> Tail:
        models = [model for model, _ in self.held.values()]
        if not models:
            return Tail(self.active, 0)
        return Tail(models[-1], len(list(takewhile(lambda model: model == models[-1], reversed(models)))))

    def batches(self, model: ModelId, capacity_tokens: int) -> int:
        requests, tokens = self.of(model)
        return max(-(-tokens // max(capacity_tokens, 1)), -(-requests // MAX_BATCH))

    def of(self, model: ModelId) -> tuple[int, int]:
        """All requests of the model, and their tokens."""
        tokens = [t for m, t in self.held.values() if m == model]
        others, their_tokens = self.foreign.get(model, (0, 0))
        return len(tokens) + others, sum(tokens) + their_tokens

    def is_open(self, model: ModelId, tokens: int, capacity_tokens: int) -> bool:
        count, (requests, held) = self.batches(model, capacity_tokens), self.of(model)
        return count * capacity_tokens - held >= tokens and requests < MAX_BATCH * count


def algorithm_2(
    model: ModelId, tokens: int, lists: Sequence[List], capacity_tokens: Mapping[ModelId, int]
) -> InstanceId:
    """Aegaeon §4.3, lines 1-9. `lists` in order of instance."""
    for known in lists:
        if known.is_open(model, tokens, capacity_tokens[model]):
            return known.instance

    def batches(known: List) -> int:
        return sum(known.batches(m, capacity_tokens[m]) for m in capacity_tokens)

    return min(lists, key=lambda known: (batches(known), known.instance)).instance
