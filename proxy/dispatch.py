"""What the proxy knows of the instances' queues, as the views the placement policies decide on.

The proxy dispatches everything and hears of every first token and every end, so it keeps these mirrors itself: no
message is spent on asking.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.views import MAX_BATCH, GroupView, ListView, QueueView


@dataclass(slots=True)
class _Group:
    group: int
    model: ModelId
    size: int = 0
    waiting: dict[RequestId, int] = field(default_factory=dict)  # prefill tokens
    view: GroupView | None = None  # until the group changes

    def seen(self) -> GroupView:
        if self.view is None:
            self.view = GroupView(self.group, self.model, self.size, tuple(self.waiting.values()))
        return self.view


class PrefillMirror:
    """The queue of one prefill instance."""

    __slots__ = ("_group_of", "_groups", "_next", "instance", "running")

    def __init__(self, instance: InstanceId) -> None:
        self.instance = instance
        self.running: ModelId | None = None
        self._groups: dict[int, _Group] = {}
        self._group_of: dict[RequestId, _Group] = {}
        self._next = 0

    def view(self) -> QueueView:
        return QueueView(self.instance, tuple(group.seen() for group in self._groups.values()), self.running)

    def add(self, request: RequestId, model: ModelId, tokens: int, group: int | None) -> int:
        """Returns the group joined; None makes a new one."""
        if group is None:
            self._next += 1
            self._groups[self._next] = _Group(self._next, model)
        joined = self._groups[self._next if group is None else group]
        joined.size += 1
        joined.waiting[request] = tokens
        joined.view = None
        self._group_of[request] = joined
        return joined.group

    def remove(self, request: RequestId) -> None:
        """The request was prefilled or cancelled. A group with nobody waiting has left the queue."""
        group = self._group_of.pop(request, None)
        if group is None:
            return
        del group.waiting[request]
        group.view = None
        if not group.waiting:
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
