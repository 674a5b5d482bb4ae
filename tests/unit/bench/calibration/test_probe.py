"""The grid that is sent to a server fits it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from aegis.admin_client import ADMIN_KEY, AdminClient
from aegis.core.errors import UserError
from aegis.core.ids import ModelId
from aegis.core.model import ModelSpec, Slo
from aegis.sim.shapes import SHAPES
from aegis.telemetry.node_report import NodeReport
from bench.calibration import telemetry
from bench.calibration.suite import grid_for, probed
from bench.serve import suite
from bench.serve.settings import Settings
from bench.workloads.grid import Grid
from bench.workloads.spec import parse


def spec(name: str, context_tokens: int) -> ModelSpec:
    whole = SHAPES["qwen2.5-7b"].spec(ModelId(name), Slo())
    return replace(whole, manifest=replace(whole.manifest, context_tokens=context_tokens))


def node(*contexts: int) -> NodeReport:
    models = tuple(spec(f"served-{n}", context) for n, context in enumerate(contexts))
    return NodeReport("least-slack", 1, 1 << 30, 2 << 20, 4 << 30, {}, models)


def test_every_model_is_asked() -> None:
    arrivals = parse(grid_for(node(4096, 4096, 8192)), 1)
    assert {each.model for each in arrivals} == {"m000", "m001", "m002"}
    assert max(each.input_tokens for each in arrivals) == Grid().prompt


@pytest.mark.parametrize("context", [2, 7, 100, 512, 1983, 1984])
def test_every_model_has_room_for_what_is_asked(context: int) -> None:
    arrivals = parse(grid_for(node(4096, context)), 1)
    assert max(each.input_tokens + each.output_tokens for each in arrivals) <= context
    assert max(each.input_tokens for each in arrivals) >= context // 2


def test_a_server_without_models_is_told() -> None:
    with pytest.raises(UserError, match="no models to probe"):
        grid_for(node())


def test_requests_have_the_key_that_the_server_is_asked_with(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Settings] = []
    monkeypatch.setenv(ADMIN_KEY, "the-key")
    monkeypatch.setattr(suite, "run", sent.append)
    monkeypatch.setattr(AdminClient, "next_number", lambda client, what: 0)
    monkeypatch.setattr(AdminClient, "node", lambda client: node(4096))
    monkeypatch.setattr(telemetry, "settled", lambda client, start: telemetry.Telemetry([], []))
    probed("http://u")
    assert [settings.api_key for settings in sent] == ["the-key"]
