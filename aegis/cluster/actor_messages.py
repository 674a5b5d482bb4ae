"""Messages between the launcher and a machine of the cluster, as msgpack in the arguments of Ray's calls."""

from __future__ import annotations

from msgspec import Struct

from aegis.core.model import EngineName
from aegis.node.machine import RankMemory


class Opening(Struct, frozen=True):
    """The parts that a machine is to have."""

    machine: str
    version: str  # of the launcher's aegis
    host_kv_bytes: int  # of each rank
    cache_bytes: int
    ranks: int
    instances: int  # that may be there
    engine: EngineName = "transformers"


class Opened(Struct, frozen=True):
    """The parts that it has. `version` is that of its aegis; if it differs from the launcher's, there is nothing
    else."""

    version: str
    boot: str = ""  # of the operating system it runs on
    cache_dir: str = ""
    rendezvous: str = ""
    memory: tuple[RankMemory, ...] = ()
    extents: int = 0


class PoolOpened(Struct, frozen=True):
    """The memory of one device, with its `number` among the machine's; a `refusal` in place of one that cannot be
    had."""

    number: int = -1
    address: str = ""
    page_bytes: int = 0
    page_count: int = 0
    refusal: str = ""
