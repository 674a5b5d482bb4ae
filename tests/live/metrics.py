"""The metrics of `/metrics`, as numbers."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

_BUSY = (
    "device_blocks_used",
    "device_blocks_reserved",
    "device_blocks_in_transfer",
    "host_blocks_used",
    "host_blocks_reserved",
    "host_blocks_in_transfer",
    "transfers_in_flight",
)
_KINDS = {"counter", "gauge", "histogram", "summary", "untyped"}
IDLE_SLABS = 1  # host slabs an instance keeps for the next request


class Metrics:
    """One scrape."""

    def __init__(self, text: str) -> None:
        kinds = {line.split()[3] for line in text.splitlines() if line.startswith("# TYPE")}
        assert kinds <= _KINDS, f"Prometheus knows no metric of {kinds - _KINDS}, and refuses all of them"
        self._samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def total(self, name: str, **labels: str) -> int:
        """The sum over all series `aegis:name` that bear these labels; 0 where there is none."""
        return round(
            sum(
                sample.value
                for sample in self._samples
                if sample.name == f"aegis:{name}" and labels.items() <= sample.labels.items()
            )
        )

    def instances(self) -> list[str]:
        return sorted(s.labels["instance"] for s in self._samples if s.name == "aegis:instance_up")

    def held(self) -> list[str]:
        """The memory that is not free, or not reported yet: empty when no request is left and all its memory is free
        again."""
        held = [name for name in ("num_requests_waiting", "num_requests_running") if self.total(name)]
        for instance in self.instances():
            held += [f"{instance} {what}" for what in self._held_by(instance)]
        return held

    def _held_by(self, instance: str) -> list[str]:
        def account(name: str) -> int:
            return self.total(f"memory_{name}", instance=instance)

        held = [name for name in _BUSY if account(name)]
        if not any(s.name == "aegis:memory_device_pages" and s.labels["instance"] == instance for s in self._samples):
            return ["no accounts yet"]
        if account("device_pages_free") + account("device_pages_weights") != account("device_pages"):
            held.append("device_pages")
        if account("host_slabs_leased") != account("host_slabs_idle") or account("host_slabs_leased") > IDLE_SLABS:
            held.append("host_slabs_leased")
        return held
