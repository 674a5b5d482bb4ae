"""MuxWise's suites: what is searched for, and that each runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aegis.core.role import Roles
from aegis.policies import RECIPES
from bench.simulate.figures import Figures
from bench.simulate.goodput import CHUNKED, MUXWISE, SGLANG_PD, SUITES, GoodputResult, Search, keeps_target
from bench.simulate.goodput_run import ratio, run

PANELS = [panel for suite in SUITES.values() for panel in suite.panels]


def figures(*, gap_ms: float = 40.0, ttft_ms: float = 500.0, failed: int = 0) -> Figures:
    return Figures(10, failed, 100, 1.0, 10.0, 1.0, ttft_ms, gap_ms, 0, 0.5, 10.0)


@pytest.mark.parametrize(
    ("found", "keeps"),
    [
        (figures(), True),
        (figures(gap_ms=50.0), True),
        (figures(gap_ms=50.1), False),
        (figures(ttft_ms=10_001.0), False),
        (figures(failed=1), False),
    ],
)
def test_a_rate_is_kept_within_the_target_while_the_system_is_stable(found: Figures, keeps: bool) -> None:
    panel = SUITES["mux-tool-agent"].panels[0]
    assert (panel.tbt_ms, panel.ttft_s) == (50, 10)
    assert keeps_target(found, panel) is keeps


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.name)
def test_targets_are_those_of_the_paper_and_all_have_the_same_rules(panel) -> None:  # type: ignore[no-untyped-def]
    settings = [panel.setting(contender, 1.0) for contender in (MUXWISE, CHUNKED, SGLANG_PD)]
    tbt_ns = 50_000_000 if panel.model == "llama-3-8b" else 100_000_000
    assert {(s.slo.tbt_ns, s.slo.gap_ns, s.max_batch, s.workload) for s in settings} == {
        (tbt_ns, tbt_ns, 256, settings[0].workload)
    }
    assert [s.gpu for s in settings] == [f"{panel.gpu}x8", f"{panel.gpu}x8", f"{panel.gpu}x4"]
    assert [s.roles for s in settings] == [Roles.AUTO, Roles.AUTO, Roles.FIXED]


def test_the_best_budget_counts() -> None:
    panel = SUITES["mux-sharegpt"].panels[0]
    result = Search(panel=panel, contender=CHUNKED, tiny=True).found()
    assert result.budget in CHUNKED.budgets and result.rps > 0


def test_ratios_are_muxwises_over_the_contenders() -> None:
    results = [GoodputResult("muxwise", 3.0, None, None), GoodputResult("a", 2.0, None, None)]
    assert ratio(results, "a") == 1.5 and ratio(results, "muxwise") == 1.0
    assert ratio([*results, GoodputResult("b", 0.0, None, None)], "b") is None


@pytest.mark.parametrize("name", SUITES)
def test_each_suite_runs(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(SUITES[name], json=tmp_path / "out.json", tiny=True, seed=0, jobs=1)
    written = json.loads((tmp_path / "out.json").read_text())
    assert [panel["panel"] for panel in written["panels"]] == [panel.name for panel in SUITES[name].panels]
    assert all({"muxwise", "least-slack"} <= {r["contender"] for r in panel["results"]} for panel in written["panels"])
    assert "MuxWise over it" in capsys.readouterr().out


def test_policies_of_the_suites_are_policies() -> None:
    assert {c.policy for suite in SUITES.values() for c in suite.contenders} <= set(RECIPES)
