"""What is served, by the configuration."""

from pathlib import Path

import pytest

from aegis.config_sources import load
from aegis.core.model import Slo
from aegis.models.demo import demo_models
from aegis.runtime import launch


def test_the_demo_market_has_the_deadlines_that_the_server_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AEGIS_CACHE", str(tmp_path))
    for source in demo_models(tmp_path):
        Path(source.root).mkdir(parents=True)
        (Path(source.root) / "config.json").write_text("{}")
    served = launch._sources(load({"slo": "ttft=2,tbt=0.05"}, {}))
    assert len(served) == 8 and {source.slo for source in served} == {Slo(2_000_000_000, 50_000_000)}
