"""The names of topics, all below one prefix."""

from __future__ import annotations

from dataclasses import dataclass

CLIENT_PATTERN = r"[A-Za-z0-9_.-]{1,64}"
"""Part of a topic too."""


CLUSTER = ""
"""The receiver of commands that go to no instance."""


@dataclass(frozen=True, slots=True)
class Topics:
    """`instance` may be `+`: those of all instances; where it may be `CLUSTER`, the cluster's."""

    prefix: str

    @property
    def claim(self) -> str:
        return f"{self.prefix}/cluster"

    @property
    def beat(self) -> str:
        return f"{self.prefix}/cluster/beat"

    def state(self, instance: str) -> str:
        return f"{self.prefix}/instances/{instance}/state"

    def heartbeat(self, instance: str) -> str:
        return f"{self.prefix}/instances/{instance}/heartbeat"

    def commands(self, instance: str) -> str:
        return f"{self._of(instance)}/commands"

    def replies(self, instance: str, client: str) -> str:
        return f"{self._of(instance)}/replies/{client}"

    def instance_of(self, topic: str) -> tuple[str, str] | None:
        """The instance that a topic is about and what of it: `("mixed-0", "state")`."""
        head, _, what = topic.rpartition("/")
        start = f"{self.prefix}/instances/"
        name = head.removeprefix(start)
        return (name, what) if head.startswith(start) and name and "/" not in name else None

    def _of(self, instance: str) -> str:
        return f"{self.prefix}/cluster" if instance == CLUSTER else f"{self.prefix}/instances/{instance}"
