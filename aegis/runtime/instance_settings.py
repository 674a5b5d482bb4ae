"""What the launcher tells an instance's process, as JSON on its standard input."""

from __future__ import annotations

from msgspec import Struct

from aegis.core.ids import InstanceId
from aegis.core.role import Role
from aegis.core.views import PrefillOrder
from aegis.policies import Policy, Site, recipe
from aegis.runtime.bus.settings import BusSettings
from decode.policy import WeightedRoundRobin


class InstanceSettings(Struct, frozen=True, kw_only=True):
    """All an instance has to be told. `words` are the shared words that are its own."""

    instance: InstanceId
    incarnation: int
    role: Role
    address: str
    words_path: str
    words: tuple[int, ...]
    host_kv_path: str
    images_path: str
    device: str
    device_address: str  # of its memory, which the launcher has
    slab_bytes: int
    host_slabs: int
    instances: int
    policy: str
    memory_bytes: int  # what a policy takes its device to have
    q_max_ns: int
    switching_share: float
    bus: BusSettings
    explains: bool = False
    check_laws: bool = False

    @property
    def identity(self) -> str:
        return f"{self.instance}/{self.incarnation}"

    def scheduler(self) -> Policy:
        """Where requests go, for the proxy, and what turns they get, for the instance. Raises UserError."""
        turns = WeightedRoundRobin(self.q_max_ns, self.switching_share)
        return recipe(self.policy).policy(Site(memory_bytes=self.memory_bytes, turns=turns))

    def prefill_order(self) -> PrefillOrder | None:
        """Who is next on a prefill instance; None: one group after the other. Raises UserError."""
        return recipe(self.policy).order
