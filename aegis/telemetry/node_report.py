"""The parts of a server: all that a simulation of it has to know besides costs."""

from __future__ import annotations

from msgspec import Struct

from aegis.core.ids import InstanceId
from aegis.core.model import ModelSpec
from aegis.core.role import Role


class BusPlace(Struct, frozen=True):
    """The place to which commands to instances are published: the broker, without user and password, and the prefix of
    topics."""

    url: str
    prefix: str


class NodeReport(Struct, frozen=True):
    """Instances are dealt to the devices in turn. `models` come without what only serves to load them."""

    policy: str
    devices: int
    device_bytes: int  # of each
    slab_bytes: int
    host_kv_bytes: int
    instances: dict[InstanceId, Role]
    models: tuple[ModelSpec, ...]
    bus: BusPlace | None = None
