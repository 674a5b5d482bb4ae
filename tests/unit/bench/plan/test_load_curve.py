"""What becomes of a market when its traffic grows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from aegis.core.clock import NS_PER_MS, NS_PER_S
from aegis.core.errors import UserError
from aegis.core.model import Slo
from aegis.sim.simulation import Outcome
from bench.plan.load_curve import LOADS, LoadCurve, LoadLine, LoadPoint, best_rivals, load_curve, parse_loads, point_of
from bench.plan.load_table import draw, load_sentence, load_table
from bench.plan.search import Plan, PlanSettings, plan
from bench.simulate.setting import Setting, pool_of
from bench.simulate.table import plain_console
from tests.unit.bench.simulate.outcomes import outcome, record

WORKLOAD = "poisson:models=4,rps=0.2,duration=10"


def asked(**fields: Any) -> PlanSettings:
    policies = fields.pop("policies", ("least-slack",))
    setting = Setting(policy=policies[0], workload=WORKLOAD, gpu="h100", **fields)
    return PlanSettings(setting=setting, policies=policies, seeds=(0, 1))


@pytest.fixture(scope="module")
def answered() -> tuple[PlanSettings, Plan]:
    settings = asked(slo=Slo(ttft_ns=NS_PER_S, tbt_ns=30 * NS_PER_MS))
    return settings, plan(settings)


@pytest.fixture(scope="module")
def curve(answered: tuple[PlanSettings, Plan]) -> LoadCurve:
    return load_curve(*answered, (0.5, 1.0, 100.0))


def on(count: int, answer: Plan) -> Plan:
    """The answer, as if it were so many GPUs."""
    need = answer.needs[0]
    return structs.replace(answer, needs=[structs.replace(need, gpus=structs.replace(need.gpus, at=float(count)))])


def line(name: str, *attainments: float, refused: int = 0, ttft_ms: int = 100) -> LoadLine:
    """At 1, 2, ... times 100 tokens a second."""
    points = []
    for load, attainment in enumerate(attainments, start=1):
        seen = point_of(load, outcome(records=[record(0, at_ms=1000, token_ms=(1000 + ttft_ms,))]))
        figures = structs.replace(seen.figures, attainment=attainment)
        points.append(LoadPoint(load, 100.0 * load, 100 * load * attainment, refused, figures))
    return LoadLine(name, points)


def shown(curve: LoadCurve, capsys: pytest.CaptureFixture[str]) -> list[str]:
    plain_console().print(load_table(curve))
    return capsys.readouterr().out.splitlines()


@pytest.mark.long
def test_at_each_load_the_plan_has_its_gpus_and_so_many_times_the_requests(
    answered: tuple[PlanSettings, Plan], curve: LoadCurve
) -> None:
    _, answer = answered
    need = answer.needs[0]
    assert curve.gpus == need.gpus.at
    assert curve.seed == next(found.seed for found in need.found if found.at == need.gpus)
    assert [point.load for point in curve.ours.points] == [0.5, 1.0, 100.0]
    half, once, most = (point.figures for point in curve.ours.points)
    assert once.requests * 100 == most.requests
    assert half.requests == once.requests // 2
    assert once.attainment == need.enough.attainment
    assert most.attainment < once.attainment, "a hundred times as much is too much"
    for point in curve.ours.points:
        assert point.on_time_per_s == pytest.approx(point.asked_per_s * point.figures.attainment)


@pytest.mark.long
def test_the_best_rival_is_the_best_at_each_load(curve: LoadCurve) -> None:
    names = [rival.contender for rival in curve.rivals]
    assert {"qlm", "serverlessllm", "dedicated"} <= set(names)
    assert "least-slack" not in names and not any("oracle" in name for name in names)
    for at, (_, _, theirs) in enumerate(curve.beside()):
        assert theirs.figures.attainment == max(rival.points[at].figures.attainment for rival in curve.rivals)


def test_of_equally_good_rivals_the_one_with_earlier_first_tokens_is_the_best() -> None:
    late, soon = line("qlm", 0.5, 0.4, ttft_ms=900), line("muxserve", 0.5, 0.5, ttft_ms=100)
    assert best_rivals([late, soon]) == [1, 1]
    assert best_rivals([soon, late]) == [0, 0]
    assert best_rivals([late, line("muxserve", 0.4, 0.3, ttft_ms=100)]) == [0, 0]


def test_a_policy_is_no_rival_of_its_own() -> None:
    settings = asked(policies=("aegaeon",))
    answer = plan(settings)
    found = load_curve(settings, on(8, answer), (1.0,))
    assert found.ours.contender == answer.needs[0].contender
    names = [rival.contender for rival in found.rivals]
    assert "least-slack" in names and not any(name.startswith("aegaeon") for name in names)


@pytest.mark.long
@pytest.mark.parametrize(("count", "ways"), [(1, 0), (2, 1), (8, 3)])
def test_each_way_to_prefill_apart_is_tried_once(answered: tuple[PlanSettings, Plan], count: int, ways: int) -> None:
    settings, answer = answered
    found = load_curve(settings, on(count, answer), (1.0,))
    assert found.gpus == count
    assert sum(rival.contender.startswith("aegaeon") for rival in found.rivals) == ways


def test_models_are_the_same_at_any_load() -> None:
    setting = asked().setting
    thin = Setting(policy="least-slack", workload=WORKLOAD, load=0.1)
    assert pool_of(thin).specs == pool_of(Setting(policy="least-slack", workload=WORKLOAD)).specs
    assert "load" not in setting.conditions() and thin.conditions()["load"] == 0.1


def test_tokens_are_of_a_second_in_which_requests_come() -> None:
    """However long the last answers take."""
    late: Outcome = outcome(
        records=[record(0, token_ms=(500, 900)), record(1, at_ms=2000, token_ms=(90_000,), asked=3)], ended_ms=90_000
    )
    point = point_of(2.0, late)
    assert (point.asked_per_s, point.on_time_per_s, point.refused) == (2.5, 1.5, 0)


def test_refusing_is_shown_beside_not_refusing(capsys: pytest.CaptureFixture[str]) -> None:
    refused = structs.replace(record(1, asked=4), ended="refused")
    assert point_of(1.0, outcome(records=[record(0, token_ms=(5,)), refused])).refused == 1
    _, *rows = shown(of([line("qlm", 0.9, 0.25)], 1.0, 0.5), capsys)
    own, refusing, theirs = rows[1].split()[3:8], rows[1].split()[8:14], rows[1].split()[14:]
    assert own == ["50.0", "%", "100", "100", "ms"]
    assert refusing == ["1,234", "60.0", "%", "120", "100", "ms"]
    assert theirs == ["qlm", "25.0", "%", "50", "100", "ms"]


def test_a_terminal_that_is_narrow_cuts_no_figure_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    head, row = shown(of([line("chunked-prefill", 0.9)], 1.0), capsys)
    assert "…" not in head + row and "\x1b" not in row
    assert row.split()[-6:] == ["chunked-prefill", "90.0", "%", "90", "100", "ms"]


def of(rivals: list[LoadLine], *ours: float) -> LoadCurve:
    refusing = line("least-slack, refusing", *([0.6] * len(ours)), refused=1234)
    return LoadCurve(3, 0, line("least-slack", *ours), refusing, rivals, best_rivals(rivals))


@pytest.mark.long
def test_who_refuses_has_the_same_requests(curve: LoadCurve) -> None:
    assert curve.refusing.contender == "least-slack, refusing"
    for ours, refusing in zip(curve.ours.points, curve.refusing.points, strict=True):
        assert (refusing.asked_per_s, ours.refused) == (ours.asked_per_s, 0)
    half, _, most = curve.refusing.points
    assert half.refused == 0 < most.refused


@pytest.mark.long
def test_under_too_much_load_who_refuses_has_more_on_time_and_sooner(curve: LoadCurve) -> None:
    refusing, ours = (line.points[-1].figures for line in (curve.refusing, curve.ours))
    assert refusing.attainment > ours.attainment
    assert refusing.ttft_p50_ms and ours.ttft_p50_ms and refusing.ttft_p50_ms < ours.ttft_p50_ms


def test_the_sentence_is_of_twice_the_traffic_or_of_the_most() -> None:
    found = of([line("qlm", 0.9, 0.25, 0.2)], 1.0, 0.5, 0.3)
    assert load_sentence(found, "h100") == (
        "At 2 × the traffic 3 × h100 have 50.0 % of tokens on time with least-slack, and 25.0 % with the best rival, "
        "qlm."
    )
    once = of([line("qlm", 0.9)], 1.0)
    assert load_sentence(once, "h100").startswith("At 1 × the traffic 3 × h100 have 100.0 %")


def test_the_plot_names_the_policy_and_who_is_best_somewhere(tmp_path: Path) -> None:
    rivals = [line("qlm", 0.9, 0.1), line("serverlessllm", 0.5, 0.2), line("muxserve", 0.1, 0.1)]
    found = of(rivals, 1.0, 0.5)
    for file in ("a.svg", "b.svg"):
        draw(found, "h100", tmp_path / file)
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn == (tmp_path / "b.svg").read_text()
    assert all(
        f"<!-- {name} -->" in drawn
        for name in ("least-slack", "least-slack, refusing", "qlm", "serverlessllm", "asked for")
    )
    assert "<!-- muxserve -->" not in drawn
    with pytest.raises(UserError, match="cannot write"):
        draw(found, "h100", tmp_path / "away" / "a.svg")


@pytest.mark.parametrize(
    ("text", "loads"), [(None, LOADS), ("none", ()), ("2,0.5,2", (0.5, 2.0)), ("0.01,100", (0.01, 100.0))]
)
def test_loads_are_read(text: str | None, loads: tuple[float, ...]) -> None:
    assert parse_loads(text) == loads


@pytest.mark.parametrize("text", ["", "two", "0", "-1", "nan", "inf", "1,,2", "101"])
def test_what_is_no_load_costs_a_line(text: str) -> None:
    with pytest.raises(UserError, match=r"expected numbers from 0\.01 to 100, or none"):
        parse_loads(text)
