"""MuxWise's suites: what is searched for, and that each runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aegis.core.errors import UserError
from aegis.core.role import Roles
from aegis.policies import RECIPES, Site
from aegis.sim.rival_engines import NANO_BATCHES
from bench.simulate import goodput_run
from bench.simulate.figures import Figures
from bench.simulate.goodput import (
    ABLATIONS,
    CHUNKED,
    LOONGSERVE,
    MUXWISE,
    NANOFLOW,
    SGLANG_PD,
    SUITES,
    GoodputResult,
    Search,
    keeps_target,
    of_traces,
)
from bench.simulate.goodput_run import ratio, run
from bench.simulate.setting import pool_of
from tests.long_forms import first_of

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
        (tbt_ns, tbt_ns, 512, settings[0].workload)
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


@pytest.mark.parametrize("name", first_of(2, list(reversed(SUITES))))
def test_each_suite_runs(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(SUITES[name], json=tmp_path / "out.json", tiny=True, seed=0, jobs=1)
    written = json.loads((tmp_path / "out.json").read_text())
    assert [panel["panel"] for panel in written["panels"]] == [panel.name for panel in SUITES[name].panels]
    assert all({"muxwise", "least-slack"} <= {r["contender"] for r in panel["results"]} for panel in written["panels"])
    assert "MuxWise over it" in capsys.readouterr().out


def test_rivals_differ_only_in_what_is_said_of_them() -> None:
    panel = SUITES["mux-tool-agent"].panels[0]
    nano, elastic = panel.setting(NANOFLOW, 1.0, budget=256), panel.setting(LOONGSERVE, 1.0)
    assert (nano.policy, nano.engine, nano.budget_tokens) == ("chunked-prefill", NANO_BATCHES, 256)
    assert (elastic.engine, elastic.cache_tokens, elastic.gpu) == ("elastic-4", 0, "a100x8")
    assert panel.setting(MUXWISE, 1.0).cache_tokens is None
    assert SUITES["mux-loogle"].panels[0].setting(LOONGSERVE, 1.0).engine == "elastic-2"


def test_ablations_are_muxwise_without_one_thing() -> None:
    panel = SUITES["mux-sharegpt"].panels[0]
    options = [dict(panel.setting(contender, 1.0).options) for contender in ABLATIONS]
    assert options == [{"guarded": False}, {"layer_wise": False}, {"fixed": 300}, {"fixed": 600}]
    site = Site(memory_bytes=1 << 40)
    made = [pool_of(panel.setting(contender, 1.0)).recipe.policy(site) for contender in ABLATIONS]
    assert [policy.guarded for policy in made] == [False, True, True, True]  # type: ignore[attr-defined]
    assert [policy.rules.max_batch for policy in made] == [512] * 4


def test_muxwise_is_the_only_one_that_runs_as_published() -> None:
    panel = SUITES["mux-sharegpt"].panels[0]
    pools = [pool_of(panel.setting(each, 1.0, as_published=True)) for each in (MUXWISE, CHUNKED)]
    assert [(pool.recipe.profiled, pool.recipe.by_layers) for pool in pools] == [(True, True), (False, False)]


def test_nanoflow_has_the_budget_that_was_tuned_for_chunked_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def each(work, searches, *, jobs, title):  # type: ignore[no-untyped-def]
        asked.extend(searches)
        return [GoodputResult(s.contender.name, 1.0, 512 if s.contender.budgets else s.budget, None) for s in searches]

    monkeypatch.setattr(goodput_run, "each", each)
    panel = SUITES["mux-sharegpt"].panels[0]
    results = goodput_run._results(
        [Search(panel=panel, contender=each) for each in (NANOFLOW, CHUNKED)], jobs=1, title=""
    )
    assert [(result.contender, result.budget) for result in results] == [("nanoflow", 512), ("chunked-prefill", 512)]


def test_traces_replace_prompts_and_caches_are_as_large_as_the_memory(tmp_path: Path) -> None:
    blocks = {"input_length": 1024, "output_length": 9, "hash_ids": [0, 1]}
    (tmp_path / "toolagent_trace.jsonl").write_text(json.dumps(blocks))
    panel = of_traces(SUITES["mux-tool-agent"], tmp_path).panels[1]
    whole, half = (panel.cache_tokens(contender) for contender in (MUXWISE, SGLANG_PD))
    assert whole and half and panel.cache_tokens(LOONGSERVE) == 0
    assert whole > 2 * half, "disaggregation halves the GPUs and not the weights"
    assert panel.setting(MUXWISE, 1.0).prompts == str(tmp_path / "toolagent_trace.jsonl")
    with pytest.raises(UserError, match="--trace-dir is not of --suite mux-loogle"):
        of_traces(SUITES["mux-loogle"], tmp_path)


def test_only_what_is_called_so_is_searched(tmp_path: Path) -> None:
    suite, json_file = SUITES["mux-tool-agent"], tmp_path / "out.json"
    run(suite, json=json_file, tiny=True, seed=0, jobs=1, only=("h100x8/muxwise, no",))
    [panel] = json.loads(json_file.read_text())["panels"]
    assert [result["contender"] for result in panel["results"]] == ["muxwise, no guard"]
    with pytest.raises(UserError, match="--only zzz: nothing of --suite mux-tool-agent is called so"):
        run(suite, json=json_file, tiny=True, seed=0, jobs=1, only=("zzz",))


def test_policies_of_the_suites_are_policies() -> None:
    assert {c.policy for suite in SUITES.values() for c in suite.contenders} <= set(RECIPES)
