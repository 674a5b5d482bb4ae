"""Images of lazy models in the node's cache: who waits for a fetch, and who leaves for another.

The rules are those of the cache on disk that serves (`aegis.models.disk_cache`): a checkpoint takes its bytes, and its
image as many again as it has; before a fetch there has to be room for what is missing and for an image as large as the
checkpoint; what was longest unused leaves first. A request uses its model's image, making an image the checkpoint.
Images of models that are not lazy stay. Making an image takes no time here, the fetch does: all fetches share what
comes from the registries.

An image stays while requests of its model are under way. A request that comes when it has left waits for a fetch, even
if the weights are still on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from aegis.core.ids import ModelId
from aegis.sim.event_queue import EventQueue
from aegis.sim.flows import Bus, Flow, Link

_CHECKPOINT: Final = "checkpoints"
_IMAGE: Final = "images"
_Entry = tuple[str, ModelId]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Of a model's checkpoint, from the first request that wanted it to its end; of no bytes where only the image had
    left. One that was `refused` had no room."""

    model: ModelId
    began_ns: int
    ended_ns: int
    nbytes: int
    refused: bool = False


class FetchedImages:
    """`fetched` are the bytes of the checkpoints of lazy models, `images` those of all images; `limit_bytes` bound both
    together, 0: nothing does."""

    def __init__(
        self,
        agenda: EventQueue,
        *,
        bytes_per_s: int,
        limit_bytes: int,
        fetched: Mapping[ModelId, int],
        images: Mapping[ModelId, int],
    ) -> None:
        self.fetches: list[Fetch] = []
        self._agenda = agenda
        self._link = Link(Bus(agenda, 0), bytes_per_s)
        self._limit_bytes = limit_bytes
        self._fetched = fetched
        self._images = images
        self._held_bytes = sum(nbytes for model, nbytes in images.items() if model not in fetched)
        self._entries: dict[_Entry, int] = {}  # the longest unused first
        self._promised: dict[ModelId, int] = {}
        self._waiting: dict[ModelId, list[Callable[[bool], None]]] = {}
        self._under_way: dict[ModelId, int] = {}

    def want(self, model: ModelId, then: Callable[[bool], None]) -> None:
        """A request came. `then` is told when the image is there, or that it cannot be; `ended` has to follow."""
        self._under_way[model] = self._under_way.get(model, 0) + 1
        if model not in self._fetched:
            then(True)
        elif (image := (_IMAGE, model)) in self._entries:
            self._use(image)
            then(True)
        elif model in self._waiting:
            self._waiting[model].append(then)
        else:
            self._waiting[model] = [then]
            self._fetch(model)

    def ended(self, model: ModelId) -> None:
        """A request that was told is over."""
        self._under_way[model] -= 1

    def check(self) -> None:
        """Law: what is there, promised and held never takes more than the limit."""
        taken = self._taken_bytes()
        assert not self._limit_bytes or taken <= self._limit_bytes, f"{taken} bytes of {self._limit_bytes}"

    def there(self) -> list[_Entry]:
        """The images that are there, in the order in which they would leave."""
        return [*self._entries]

    def _fetch(self, model: ModelId) -> None:
        whole, checkpoint = self._fetched[model], (_CHECKPOINT, model)
        missing = 0 if checkpoint in self._entries else whole
        began_ns = self._agenda.now_ns
        if not self._room(whole + missing, checkpoint):
            self.fetches.append(Fetch(model, began_ns, began_ns, 0, refused=True))
            self._tell(model, there=False)
            return
        self._promised[model] = whole + missing

        def arrived(_: Flow | None) -> None:
            self.fetches.append(Fetch(model, began_ns, self._agenda.now_ns, missing))
            self._kept(model)

        if missing:
            self._link.start(missing, arrived)
        else:
            arrived(None)

    def _kept(self, model: ModelId) -> None:
        del self._promised[model]
        for entry, nbytes in (((_CHECKPOINT, model), self._fetched[model]), ((_IMAGE, model), self._images[model])):
            self._entries.pop(entry, None)
            self._entries[entry] = nbytes
        self._room(0, (_IMAGE, model))
        self._tell(model, there=True)

    def _tell(self, model: ModelId, *, there: bool) -> None:
        for then in self._waiting.pop(model):
            then(there)

    def _use(self, entry: _Entry) -> None:
        self._entries[entry] = self._entries.pop(entry)

    def _taken_bytes(self) -> int:
        return self._held_bytes + sum(self._entries.values()) + sum(self._promised.values())

    def _room(self, nbytes: int, keep: _Entry) -> bool:
        """Whether there is room for so many bytes, once as many entries have left as had to."""
        if not self._limit_bytes:
            return True
        if nbytes > self._limit_bytes:
            return False
        taken = self._taken_bytes()
        for entry in [*self._entries]:
            if taken + nbytes <= self._limit_bytes:
                break
            if entry != keep and not (entry[0] == _IMAGE and self._under_way.get(entry[1])):
                taken -= self._entries.pop(entry)
        return taken + nbytes <= self._limit_bytes
