"""Answers of instances that were asked to let go of something: memory is free once the last one has come.

A model's image leaves the model cache when no instance has its weights any more. KV that was handed over for a lost
proxy is released when no instance has a transfer for its requests any more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from aegis.core.ids import InstanceId

K = TypeVar("K")


class AwaitedAnswers(Generic[K]):
    """The instances that have not answered yet, by what they were asked about. A lost instance is not waited for any
    more: what it held is gone with its process."""

    def __init__(self) -> None:
        self._awaited: dict[K, set[InstanceId]] = {}

    def __bool__(self) -> bool:
        return bool(self._awaited)

    def begin(self, about: K, instances: Iterable[InstanceId]) -> bool:
        """These were asked, perhaps again. Whether there are none, so that no answer is awaited."""
        self._awaited[about] = set(instances)
        return self._is_over(about)

    def answered(self, about: K, instance: InstanceId) -> bool:
        """Whether that was the last answer."""
        if about not in self._awaited:
            return False
        self._awaited[about].discard(instance)
        return self._is_over(about)

    def lost(self, instance: InstanceId) -> list[K]:
        """Its process is gone; returns what no answer is awaited about any more."""
        return [about for about in list(self._awaited) if self.answered(about, instance)]

    def forget(self, about: K) -> None:
        """Answers are of no use any more."""
        self._awaited.pop(about, None)

    def _is_over(self, about: K) -> bool:
        if self._awaited[about]:
            return False
        del self._awaited[about]
        return True
