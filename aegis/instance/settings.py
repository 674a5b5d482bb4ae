"""The settings that the launcher gives an instance's process, as JSON on its standard input."""

from __future__ import annotations

from aegis.control.settings import BusSettings
from aegis.core.ids import InstanceId, MachineId
from aegis.core.model import EngineName
from aegis.core.role import LaneCount, Role
from aegis.scheduling_settings import SchedulingSettings
from aegis.telemetry.logs import LogSettings


class InstanceSettings(SchedulingSettings, frozen=True, kw_only=True):
    """All an instance has to be told. `words` are the shared words that are its own. Where it is several processes,
    each is told its rank, and of the device, words, host slabs and model cache of that rank."""

    instance: InstanceId
    incarnation: int
    role: Role
    machine: MachineId = MachineId("")
    clock_ahead_ns: int = 0  # of the machine's clock, against the launcher's
    address: str  # of its node
    market_key: str = ""  # needed to reach its node and proxies on other machines
    words_path: str
    words: tuple[int, ...]
    host_kv_path: str
    images_path: str
    device: str
    device_address: str  # of its memory, which the launcher has
    slab_bytes: int
    host_slabs: int
    instances: int
    on_device: int = 1  # of them, share its device
    bus: BusSettings
    logs: LogSettings = LogSettings()
    engine: EngineName = "transformers"  # initialised before it is asked for
    lanes: LaneCount = "off"  # of its device
    peer_loads: bool = False  # devices of the machine carry parts of each other's loads
    check_laws: bool = False
    rank: int = 0
    ranks: int = 1
    rendezvous: str = ""  # the place where they find each other: a unique beginning of paths

    @property
    def identity(self) -> str:
        return f"{self.instance}/{self.incarnation}"
