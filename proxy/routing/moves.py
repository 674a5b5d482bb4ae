"""Models on their way to another instance, and the instances that their next requests go to.

A move: (1) the target brings the model in, while the sources serve as before; (2) once it is there, or has to wait for
a turn, each request of the model is handed over by its source, which goes on with the others; (3) the target adopts its
KV, or prefills it anew where that takes less time. Each request is on one side or the other at any moment. Where only
a part moves, those go that came last.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from aegis.core.clock import NS_PER_S
from aegis.core.estimators import Hardware, Latency
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.model import ModelSpec
from aegis.core.views import PPM, DecodeView
from proxy.routing.events import ModelMoved, MoveModel


class Places:
    """The instances that requests of a model go to, where that is set: the policy chooses for the others."""

    __slots__ = ("_places",)

    def __init__(self) -> None:
        self._places: dict[ModelId, tuple[InstanceId, ...]] = {}

    def set(self, model: ModelId, instances: tuple[InstanceId, ...]) -> None:
        """None: the policy chooses."""
        if instances:
            self._places[model] = instances
        else:
            self._places.pop(model, None)

    def has(self, model: ModelId, instance: InstanceId) -> bool:
        """Whether it is one of them."""
        return instance in self._places.get(model, ())

    def of(self, model: ModelId, up: Container[InstanceId], lists: DecodeView) -> InstanceId | None:
        """Of the model's places the one that is `up` and under least pressure; None if none is up."""
        places = [home for home in self._places.get(model, ()) if home in up]
        return (
            min(places, key=lambda home: (lists.load_ppm(home), home)) if len(places) > 1 else next(iter(places), None)
        )


class Placed(NamedTuple):
    """A request where it is, with so many tokens."""

    request: RequestId
    instance: InstanceId
    tokens: int


@dataclass(slots=True)
class _Move:
    target: InstanceId
    source: InstanceId | None
    places: tuple[InstanceId, ...]
    share_ppm: int
    number: int
    asked: set[RequestId] | None = None  # who are to be handed over and have not been; None: the target brings it in
    moved: int = 0
    replayed: int = 0
    kv_tokens: int = 0  # of those that moved
    lost: str = ""

    def report(self, model: ModelId, why: str) -> ModelMoved:
        return ModelMoved(model, self.target, self.moved, self.replayed, why, self.kv_tokens, self.number)


@dataclass(slots=True)
class Moves:
    """The moves of one proxy's requests: one at a time of each model, a later one takes the place of an earlier one."""

    _moves: dict[ModelId, _Move] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._moves)

    def begin(self, event: MoveModel) -> list[ModelMoved]:
        """Ends the one under way, if there is one: who was asked for it goes on where requests of the model go then."""
        before = self._moves.get(event.model)
        places = event.places or (event.target,)
        self._moves[event.model] = _Move(event.target, event.source, places, event.share_ppm, event.number)
        return [before.report(event.model, "another move took its place")] if before else []

    def brought_in(self, model: ModelId, target: InstanceId) -> tuple[InstanceId, ...]:
        """Where requests that come are to go, if others are to be handed over now."""
        move = self._moves.get(model)
        return move.places if move and move.target == target and move.asked is None else ()

    def leaves(self, model: ModelId, instance: InstanceId) -> bool:
        """Whether requests there are to be handed over."""
        move = self._moves[model]
        return instance != move.target and move.source in (None, instance)

    def ask(self, model: ModelId, placed: Sequence[Placed]) -> Sequence[Placed]:
        """The requests that are to be handed over, of those that may be, which are in the order of their coming; as few
        of the last ones as have the move's share of all tokens."""
        move, asked, tokens = self._moves[model], list[Placed](), 0
        most = sum([each.tokens for each in placed]) * move.share_ppm
        for each in reversed(placed):
            if tokens * PPM >= most:
                break
            asked.append(each)
            tokens += each.tokens
        move.asked = {each.request for each in asked}
        return asked[::-1]

    def handed(self, model: ModelId, request: RequestId, kv_tokens: int | None) -> InstanceId | None:
        """The request has left its source, with its KV of so many tokens or, if that is None, without. Returns where it
        goes; None: the move is over."""
        move = self._moves.get(model)
        if not (move and move.asked and request in move.asked):
            return None
        move.moved += kv_tokens is not None
        move.replayed += kv_tokens is None
        move.kv_tokens += kv_tokens or 0
        return move.target

    def left(self, model: ModelId, request: RequestId) -> None:
        """The request is not where it was any more, or has ended."""
        move = self._moves.get(model)
        if move and move.asked:
            move.asked.discard(request)

    def down(self, instance: InstanceId) -> None:
        """Nothing moves to an instance that is lost; who was asked for it is placed elsewhere."""
        for move in self._moves.values():
            if move.target == instance:
                move.lost = f"{instance} was lost"
                move.asked = move.asked or set()

    def forget(self, model: ModelId) -> None:
        """The model was removed."""
        move = self._moves.get(model)
        if move:
            move.lost, move.asked = "the model was removed", set()

    def ended(self) -> list[ModelMoved]:
        """The moves that are over, which are forgotten here."""
        over = [(model, move) for model, move in self._moves.items() if move.asked is not None and not move.asked]
        for model, _ in over:
            del self._moves[model]
        return [move.report(model, move.lost) for model, move in over]


def kv_is_cheaper(spec: ModelSpec, latency: Latency, hardware: Hardware, tokens: int) -> bool:
    """Whether moving the KV of so many tokens takes less than to prefill them: it leaves one device and comes to
    another."""
    copies_ns = 2 * tokens * spec.manifest.kv.token_bytes * NS_PER_S / hardware.copy_bytes_per_s
    return copies_ns <= latency.prefill_ns(tokens)
