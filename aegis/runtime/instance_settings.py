"""What the launcher tells an instance's process, as JSON on its standard input."""

from __future__ import annotations

from aegis.core.ids import InstanceId
from aegis.core.model import EngineName
from aegis.core.role import Role
from aegis.runtime.bus.settings import BusSettings
from aegis.runtime.scheduling_settings import SchedulingSettings


class InstanceSettings(SchedulingSettings, frozen=True, kw_only=True):
    """All an instance has to be told. `words` are the shared words that are its own."""

    instance: InstanceId
    incarnation: int
    role: Role
    address: str  # of its node
    words_path: str
    words: tuple[int, ...]
    host_kv_path: str
    images_path: str
    device: str
    device_address: str  # of its memory, which the launcher has
    slab_bytes: int
    host_slabs: int
    instances: int
    bus: BusSettings
    engine: EngineName = "transformers"  # initialised before it is asked for
    check_laws: bool = False

    @property
    def identity(self) -> str:
        return f"{self.instance}/{self.incarnation}"
