"""The settings that the launcher gives the process of a further proxy, as JSON on its standard input."""

from __future__ import annotations

from aegis.core.ids import ProxyId
from aegis.metadata.store import StoreSettings
from aegis.scheduling_settings import SchedulingSettings
from aegis.telemetry.logs import LogSettings
from aegis.transport.addresses import Keys
from proxy.http.settings import Settings


class ProxySettings(SchedulingSettings, frozen=True, kw_only=True):
    """`name` is its place among the proxies, `number` this process of it."""

    name: str
    number: ProxyId
    node_address: str
    address: str  # for instances
    keys: Keys | None
    host: str
    port: int
    logs: LogSettings
    http: Settings
    refuses_late: bool
    records: int  # that are kept until the node has them; decisions likewise
    decisions: int
    token_times: bool
    otlp: str | None
    store: StoreSettings | None

    @property
    def identity(self) -> str:
        return f"{self.name}/{self.number}"
