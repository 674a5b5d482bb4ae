"""The simulation of a server, from what the server tells of itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from aegis.admin_client import AdminClient
from aegis.core.errors import UserError
from aegis.core.ids import InstanceId, ModelId
from aegis.core.model import Slo
from aegis.core.role import Role
from aegis.sim.market import SimRequest
from aegis.sim.shapes import SHAPES
from aegis.sim.simulation import simulate
from aegis.telemetry.node_report import NodeReport
from aegis.telemetry.spans import SpanKind
from bench.fidelity.suite import FidelityOptions, pool_of, run
from bench.serve import suite
from bench.serve.settings import Settings

NAMES = (ModelId("a"), ModelId("b"))
SPECS = tuple(SHAPES["qwen2.5-7b"].spec(name, Slo()) for name in NAMES)
COSTS = "{decode_ms: {step: 5}, prefill_ms: {step: 20}}"


def node(device_bytes: int) -> NodeReport:
    instances = {InstanceId("prefill-0"): Role.PREFILL, InstanceId("decode-0"): Role.DECODE}
    return NodeReport("aegaeon", 1, device_bytes, 64 << 20, 8 << 30, instances, SPECS)


def costs(directory: Path, *models: str) -> Path:
    file = directory / "costs.yaml"
    lines = [f"  {model}: {COSTS}" for model in models]
    file.write_text("\n".join(["link_in: 100000000000", "contention: 0.5", "costs:", *lines]))
    return file


def test_instances_share_what_they_share_on_the_server(tmp_path: Path) -> None:
    """Where only two copies of a model fit, a third and a fourth have to wait for somebody to make room."""
    one = SPECS[0].manifest.image_bytes
    arrivals = [SimRequest(at * 200_000_000, NAMES[at % 2], 50, 20) for at in range(20)]
    file = costs(tmp_path, "a", "b")
    roomy, tight = (simulate(pool_of(node(size), file), arrivals) for size in (5 * one, round(2.6 * one)))
    assert len(roomy.records) == len(tight.records) == 20
    loads = [sum(s.kind in (SpanKind.LOAD, SpanKind.PREFETCH) for s in each.spans) for each in (roomy, tight)]
    assert loads[0] == 4 < loads[1]


def test_runs_on_shared_processors_are_longer_beside_others(tmp_path: Path) -> None:
    arrivals = [SimRequest(at * 50_000_000, NAMES[0], 50, 40) for at in range(20)]
    outcome = simulate(pool_of(node(200 << 30), costs(tmp_path, "a", "b")), arrivals)
    prefills = [span.stop_ns - span.start_ns for span in outcome.spans if span.kind is SpanKind.PREFILL]
    assert min(prefills) == 20_000_000
    assert 25_000_000 < max(prefills) < 30_000_100  # each change of pace may round


def test_a_model_without_costs_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no costs of b; calibrate with more requests"):
        pool_of(node(80 << 30), costs(tmp_path, "a"))


def options(directory: Path, file: Path | None = None) -> FidelityOptions:
    spec = "poisson:models=1,rps=1,duration=5,lengths=fixed,input=8,output=2"
    return FidelityOptions(
        workload=spec,
        seed=1,
        calibrate_on=spec,
        calibrate_seed=2,
        piece_s=5,
        costs=file,
        url="http://u",
        launch=(),
        json=None,
        keep=directory,
    )


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Those that are sent to a server, which answers none of their requests."""
    sent: list[Settings] = []

    def refused(settings: Settings) -> dict[str, int]:
        sent.append(settings)
        return {"completed": 0}

    monkeypatch.setattr(suite, "run", refused)
    monkeypatch.setattr(AdminClient, "node", lambda client: node(80 << 30))
    monkeypatch.setattr(AdminClient, "next_number", lambda client, what: 0)
    return sent


def test_costs_are_read_before_anything_is_measured(tmp_path: Path, runs: list[Settings]) -> None:
    for file, reason in ((tmp_path / "nope.yaml", "cannot be read"), (costs(tmp_path, "a"), "has no costs of b")):
        with pytest.raises(UserError, match=reason):
            run(options(tmp_path, file))
    assert runs == []


def test_a_server_that_answers_nothing_is_told(tmp_path: Path, runs: list[Settings]) -> None:
    with pytest.raises(UserError, match=r"http://u has answered none of the requests"):
        run(options(tmp_path))
    assert len(runs) == 1
