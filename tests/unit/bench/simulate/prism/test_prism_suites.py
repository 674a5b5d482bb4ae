"""The suites of Prism's evaluation: deadlines, shares, claims, and each suite in tiny form."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aegis.cli.main import main
from aegis.core.clock import NS_PER_MS, NS_PER_S
from aegis.core.errors import UserError
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.model import Slo
from aegis.sim.simulation import Outcome
from aegis.telemetry.records import Record
from aegis.telemetry.spans import Span, SpanKind
from bench.simulate.prism.claims import claims, least, ordering, savings
from bench.simulate.prism.figures import measured, share_figures, timeline
from bench.simulate.prism.run import Choice, run
from bench.simulate.prism.slos import scaled
from bench.simulate.prism.suite import TRACE, suites
from bench.simulate.setting import Setting
from tests.long_forms import LONG, first_of

X, Y = InstanceId("mixed-0"), InstanceId("mixed-1")
SLO = Slo(ttft_ns=100 * NS_PER_MS, tbt_ns=10 * NS_PER_MS)
EIGHT = suites(None)["prism-fig7"].panels[0].setting


def record(number: int, *, first_ms: int | None, last_ms: int = 0, tokens: int = 11, **fields: Any) -> Record:
    """Came at one second."""
    given = {"ended": "finished" if first_ms is not None else "failed", "on_time": 0} | fields
    return Record(
        RequestId(number),
        ModelId("a"),
        NS_PER_S,
        5,
        tokens,
        first_ns=None if first_ms is None else NS_PER_S + first_ms * NS_PER_MS,
        last_ns=None if first_ms is None else NS_PER_S + last_ms * NS_PER_MS,
        **given,
    )


def outcome(records: list[Record], spans: list[Span] | None = None) -> Outcome:
    return Outcome(records, [], spans or [], {X: {}, Y: {}}, 60 * NS_PER_S, [], [])


def test_a_request_counts_by_its_first_token_and_by_its_mean_pace() -> None:
    records = [
        record(0, first_ms=500, last_ms=999),
        record(1, first_ms=100, last_ms=200),
        record(2, first_ms=101, last_ms=202),
        record(3, first_ms=50, last_ms=50, tokens=1),
        record(4, first_ms=None),
    ]
    found = share_figures(outcome(records), {ModelId("a"): SLO})
    assert (found.requests, found.failed, found.ttft, found.tpot) == (5, 1, 0.5, 0.5), "but for the first of all"
    assert found.tokens_per_s == pytest.approx(34 / 60, abs=0.05)


def test_imbalance_is_the_mean_difference_of_the_busiest_and_the_idlest() -> None:
    """One works for 45 s, the other one for 15: half of 30 s, then half again."""
    spans = [
        Span(X, SpanKind.DECODE, ModelId("a"), 0, 45 * NS_PER_S),
        Span(Y, SpanKind.PREFILL, ModelId("a"), 0, 15 * NS_PER_S),
        Span(Y, SpanKind.LOAD, ModelId("a"), 30 * NS_PER_S, 60 * NS_PER_S),
    ]
    assert share_figures(outcome([record(1, first_ms=1)], spans), {ModelId("a"): SLO}).imbalance == 0.5


def test_deadlines_are_multiples_of_what_a_device_of_its_own_gives_whatever_the_load() -> None:
    once, twice = scaled(EIGHT, 1.0, 1.0), scaled(replace(EIGHT, load=3.0), 2.0, 4.0)
    assert [model for model, _ in once.slos] == [f"m{number:03}" for number in range(8)]
    for (_, one), (_, other) in zip(once.slos, twice.slos, strict=True):
        assert (other.ttft_ns, other.tbt_ns) == (2 * one.ttft_ns, 4 * one.tbt_ns)
    large, small = once.slos[1][1], once.slos[0][1]
    assert large.tbt_ns > 1.5 * small.tbt_ns, "of 8B and of 1B"


def test_a_timeline_counts_what_comes_is_made_and_is_held() -> None:
    setting = Setting(policy="prism", workload="poisson:models=2,rps=1,duration=20", mixed=1)
    found = timeline(setting)
    assert len(found.came) == 2 and sum(map(sum, found.came)) > 20
    assert len(found.tokens_per_s) == len(found.kv_ktokens) == len(found.came[0])
    assert found.kv_ktokens[0] == 0 < max(found.kv_ktokens)


# --- claims ---------------------------------------------------------------------------------------------------------


def test_enough_is_the_least_from_which_on_nothing_is_missing() -> None:
    assert least({2: 0.995, 3: 0.98, 4: 0.99, 6: 1.0}) == 4
    assert least({2: 0.5}) is None and least({2: 1.0}) == 2


def test_who_is_behind_is_named() -> None:
    held = ordering("p", {"prism": {1: 0.9}, "qlm": {1: 0.904}, "least-slack": {1: 1.0}})
    missed = ordering("p", {"prism": {1: 0.9}, "qlm": {1: 0.91}})
    assert held.held and not missed.held and missed.found == "qlm at 1: 91.0 to 90.0 %"


def test_savings_are_held_missed_or_cannot_be_told() -> None:
    enough = {8: 1.0, 16: 1.0, 20: 1.0}
    late, never = {8: 0.5, 16: 1.0, 20: 1.0}, {8: 0.5, 16: 0.5, 20: 0.5}
    lines = {"prism": enough, "least-slack": late, "muxserve++": late, "s-partition": never}
    assert [claim.held for claim in savings("p", lines)] == [False, True, True]
    lines = {"prism": late, "least-slack": enough, "muxserve++": {8: 1.0, 16: 1.0, 20: 1.0}}
    assert [claim.held for claim in savings("p", lines)] == [True, False, False]
    lines = {"prism": late, "muxserve++": {8: 0.5, 16: 0.5, 20: 1.0}}
    assert [claim.held for claim in savings("p", lines)] == [False, True, False], "four fifths are not half"
    assert [claim.held for claim in savings("p", {"prism": late, "muxserve++": never})] == [False, True, None]
    assert [claim.held for claim in savings("p", {"prism": never})] == [None]
    assert [claim.held for claim in savings("p", {"prism": never, "qlm": late})] == [False], "others need fewer"


def test_a_suite_has_the_claims_of_its_figure() -> None:
    cells = [
        {"panel": "p", "at": at, "contender": name, "result": {"ttft": share}}
        for at in (1.0, 2.0)
        for name, share in (("prism", 0.9), ("prism, models stay", 0.8))
    ]
    assert [claim.held for claim in claims("prism-fig7", cells)] == [True]
    assert claims("prism-fig10", cells) == []


@pytest.mark.long
def test_prism_has_more_first_tokens_in_time_than_who_swaps_and_no_fewer_than_who_is_static() -> None:
    """The order of Figure 5, on a few seconds of it."""
    setting = scaled(replace(EIGHT, workload="market:models=8,rps=2,duration=20"), 5.0, 10.0)
    found = {name: measured(replace(setting, policy=name)).ttft for name in ("prism", "muxserve++", "qlm")}
    assert found["prism"] >= found["muxserve++"] - 0.005 and found["prism"] > found["qlm"] + 0.1


# --- suites ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", first_of(2, list(reversed(suites(None)))))
def test_a_suite_writes_all_its_cells_and_the_same_again(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = suites(None)[name]
    suite = replace(suite, panels=suite.panels[-1:], contenders=suite.contenders[:2])
    written = []
    for _ in range(2 if LONG or name == "prism-fig6" else 1):
        json, plot = tmp_path / "figure.json", tmp_path / "figure.png"
        run(suite, Choice(tiny=True), json=json, plot=plot)
        written.append((json.read_bytes(), plot.read_bytes()))
    assert written[0] == written[-1] and written[0][1].startswith(b"\x89PNG")
    result = msgspec.json.decode(written[0][0])
    assert len(result["cells"]) == len(list(suite.cells(tiny=True))) and suite.title in capsys.readouterr().out


def test_as_published_engines_are_started_anew_where_models_are_swapped() -> None:
    suite = suites(None)["prism-fig7"]
    for contender in suites(None)["prism-fig5"].contenders:
        cell = replace(next(iter(suite.cells(tiny=True))), contender=contender)
        costs = [cell.setting(seed=0, tiny=True, as_published=published).switch_ns for published in (False, True)]
        swaps = contender.policy in ("qlm", "serverlessllm")
        assert costs == [None, 4 * NS_PER_S if swaps else None]


def test_panels_of_the_trace_are_there_where_it_is(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=TRACE):
        suites(tmp_path)
    (tmp_path / TRACE).write_bytes(b"")
    with_trace, without = suites(tmp_path), suites(None)
    assert len(with_trace["prism-fig5"].panels) == 2 * len(without["prism-fig5"].panels)


def test_a_trace_is_reduced_to_models_from_the_most_to_the_least_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    rows = [f"{number},{name},10,5" for number, name in enumerate("ddddcccbba")]
    file.write_text("\n".join(["arrival_s,model,input_tokens,output_tokens", *rows]))
    setting = Setting(policy="prism", trace=str(file), trace_models=2, models="llama-3.2-1b:2", mixed=1)
    assert [model for model, _ in scaled(setting, 1, 1).slos] == ["b", "d"]
    with pytest.raises(UserError, match="asks for 4 models, and not for 5"):
        scaled(replace(setting, trace_models=5, models="llama-3.2-1b:5"), 1, 1)


@pytest.mark.parametrize("words", [("--gpu", "a10"), ("--policy", "qlm"), ("--seeds", "2")])
def test_a_suite_sets_all_by_itself(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["aegis", "simulate", "--suite", "prism-fig7", *words])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2 and "is not of --suite prism-fig7" in capsys.readouterr().err
