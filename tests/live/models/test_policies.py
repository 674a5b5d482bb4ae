"""Every scheduler that can be launched says what transformers generates, token for token, with streams of many models
at once; and none of them initialises an engine again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from aegis.policies import RECIPES
from aegis.telemetry.node_report import NodeReport
from tests.live.cases import Case
from tests.live.market import MARKET
from tests.live.server import SPLIT, Server, launched
from tests.live.streams import run_all

STREAMS = 24
ROOMY = "96MiB"  # for all of the models at once
ORACLES = ("serverlessllm-oracle-sjf",)
"""Nobody knows how long answers will be but a simulation."""

ALWAYS = ("aegaeon",)
"""Other tests have `least-slack`. All others are in the long form."""


@dataclass(frozen=True, slots=True)
class Site:
    """Without a `memory`, two of the models fit. The first so many `models` are asked."""

    roles: tuple[str, ...] = ("--mixed", "1")
    memory: str | None = None
    models: int = len(MARKET)


SITES = {
    "aegaeon": Site(SPLIT),
    "muxwise": Site(memory=ROOMY),
    "muxserve": Site(("--mixed", "2"), ROOMY),
    "prism": Site(("--mixed", "2")),
    "s-partition": Site(("--mixed", "2"), ROOMY),
    "muxserve++": Site(("--mixed", "2"), ROOMY),
    "dedicated": Site(("--mixed", "2"), models=2),
}
POLICIES = [name for name in RECIPES if name not in ORACLES]


@dataclass(frozen=True, slots=True)
class Launched:
    policy: str
    site: Site
    server: Server


@pytest.fixture(params=[name if name in ALWAYS else pytest.param(name, marks=pytest.mark.long) for name in POLICIES])
def scheduled(
    request: pytest.FixtureRequest, tmp_path: Path, cache: Path, checkpoints_dir: Path, tight_memory: str
) -> Iterator[Launched]:
    site = SITES.get(request.param, Site())
    options = ["--models", str(checkpoints_dir), "--dtype", "float32", "--device-memory", site.memory or tight_memory]
    options += ["--policy", request.param, *site.roles, "--debug-memory"]
    with launched(tmp_path, cache, *options) as running:
        running.wait_for_ready()
        yield Launched(request.param, site, running)


def test_a_scheduler_serves_what_transformers_generates(cases: list[Case], scheduled: Launched) -> None:
    server, asked = scheduled.server, cases[:STREAMS]
    models = sorted({case.body["model"] for case in asked})[: scheduled.site.models]
    asked = [case for case in asked if case.body["model"] in models]
    streams = run_all(server.url, [case.body for case in asked])
    after = server.wait_for_freed_memory()
    assert [stream.tokens for stream in streams] == [case.expected.tokens for case in asked]
    assert all(stream.done for stream in streams)
    assert after.total("model_switches_total") >= len(models)
    assert {name: after.total("engine_initialisations_total", instance=name) for name in after.instances()} == (
        dict.fromkeys(after.instances(), 1)
    )
    node = msgspec.json.decode(server.get("/debug/node").content, type=NodeReport)
    assert node.policy == scheduled.policy
