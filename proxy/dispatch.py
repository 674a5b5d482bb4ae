"""What the proxy knows of the instances' queues, as the views the placement policies decide on.

The proxy dispatches everything and hears of every first token and every end, so it keeps these mirrors itself: no
message is spent on asking.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.views import GroupView, ListView, QueueView

MAX_BATCH = 64


@dataclass(slots=True)
class _Group:
    group: int
    model: ModelId
    size: int = 0
    waiting: dict[RequestId, int] = field(default_factory=dict)  # prefill tokens


class PrefillMirror:
    """The queue of one prefill instance."""

    __slots__ = ("_groups", "_next", "instance", "running")

    def __init__(self, instance: InstanceId) -> None:
        self.instance = instance
        self.running: ModelId | None = None
        self._groups: dict[int, _Group] = {}
        self._next = 0

    def view(self) -> QueueView:
        groups = (GroupView(g.group, g.model, g.size, tuple(g.waiting.values())) for g in self._groups.values())
        return QueueView(self.instance, tuple(groups), self.running)

    def add(self, request: RequestId, model: ModelId, tokens: int, group: int | None) -> int:
        """Returns the group joined; None makes a new one."""
        if group is None:
            self._next += 1
            group = self._next
            self._groups[group] = _Group(group, model)
        self._groups[group].size += 1
        self._groups[group].waiting[request] = tokens
        return group

    def remove(self, request: RequestId) -> None:
        """The request was prefilled or cancelled. A group with nobody waiting has left the queue."""
        for group in list(self._groups.values()):
            if group.waiting.pop(request, None) is not None and not group.waiting:
                del self._groups[group.group]


class DecodeMirror:
    """The work list of one decode instance, as far as placement cares."""

    __slots__ = ("_tokens", "instance")

    def __init__(self, instance: InstanceId) -> None:
        self.instance = instance
        self._tokens: dict[ModelId, dict[RequestId, int]] = {}

    def view(self, capacity_tokens: Mapping[ModelId, int], model: ModelId, tokens: int) -> ListView:
        """`tokens` more of `model` fit into a batch that exists, or they do not: batch sizes are bounded by the KV
        capacity of the device (Aegaeon Alg. 2, line 2)."""
        count = {m: self._batches(m, capacity_tokens[m]) for m in self._tokens}
        held = self._tokens.get(model, {})
        room = count.get(model, 0) * capacity_tokens[model] - sum(held.values())
        is_open = room >= tokens and len(held) < MAX_BATCH * count.get(model, 0)
        return ListView(self.instance, sum(count.values()), frozenset((model,) if is_open else ()))

    def add(self, request: RequestId, model: ModelId, tokens: int) -> None:
        self._tokens.setdefault(model, {})[request] = tokens

    def remove(self, request: RequestId, model: ModelId) -> None:
        held = self._tokens.get(model, {})
        held.pop(request, None)
        if not held:
            self._tokens.pop(model, None)

    def _batches(self, model: ModelId, capacity: int) -> int:
        held = self._tokens[model]
        return max(-(-sum(held.values()) // max(capacity, 1)), -(-len(held) // MAX_BATCH))
