"""`aegis plan`: the fewest GPUs, and what stands beside them."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from aegis.core.errors import UserError
from aegis.core.ids import ModelId
from aegis.core.model import Slo
from bench.plan.load_curve import LoadCurve
from bench.plan.load_table import load_sentence
from bench.plan.search import Plan, PlanSettings, deciding_of, most_kv_bytes, plan
from bench.plan.suite import memory, run, sentence, settings_of
from bench.simulate.cells.search import TTFT_GOAL, SearchResult
from bench.simulate.setting import Setting, pool_of
from bench.simulate.sweep import GOAL, Crossing
from tests.unit.bench.simulate.outcomes import record

NOTHING: dict[str, Any] = dict.fromkeys(
    ("workload", "trace", "models", "gpu", "slo", "policy", "most", "costs", "link", "seeds", "jobs", "json", "plot")
) | {"seed": 0, "loads": "none"}
WORKLOAD = "poisson:models=4,rps=0.2,duration=20"


def answered(**fields: Any) -> Plan:
    asked = {"workload": WORKLOAD, "gpu": "h100"} | fields
    most = asked.pop("most", None)
    return plan(PlanSettings(setting=Setting(policy="", **asked), seeds=(0, 1), most=most))


def test_the_answer_is_enough_and_one_less_is_not() -> None:
    answer = answered()
    ours, dedicated = answer.needs
    assert (ours.contender, dedicated.contender, answer.models) == ("least-slack", "dedicated", 4)
    assert dedicated.gpus.at == 4
    assert ours.gpus.at is not None
    assert ours.gpus.at < 4
    for need in answer.needs:
        assert need.enough.at == need.gpus.at == max(found.at.at or 0 for found in need.found)
        assert need.enough.attainment >= GOAL
        assert need.enough.ttft_attainment >= TTFT_GOAL
        if need.fewer:
            assert need.fewer.at == need.enough.at - 1
            assert need.fewer.attainment < GOAL or need.fewer.ttft_attainment < TTFT_GOAL
    assert sentence(answer).startswith(f"{ours.gpus.at:g} × h100 serve 4 models with 99 % of first tokens and 90 % of")
    assert sentence(answer).endswith("with an instance for each model it takes 4.")


def test_what_must_be_where_is_told() -> None:
    answer = answered()
    assert answer.largest_bytes < answer.weight_bytes <= 4 * answer.largest_bytes
    use = answer.needs[0].use
    assert 0 < use.link_busy < 1
    assert 0 < use.kv_bytes < answer.gpu_bytes
    assert "Weights 60.9 GB, of the largest model 15.2 GB" in memory(answer)


def test_packed_and_lazy_models_are_planned_with() -> None:
    dense, packed = answered(), answered(weights="int4", lazy=True, fetch_bytes_per_s=10**11, cache_bytes=10**12)
    assert packed.weight_bytes < 0.35 * dense.weight_bytes and packed.needs[0].gpus.at == 1
    use = packed.needs[0].use
    assert (use.fetches, use.fetched_bytes, use.unfetched) == (4, dense.weight_bytes, 0)
    assert memory(packed).splitlines()[-1] == "Lazy models took 4 fetches of 60.9 GB."
    assert len(memory(dense).splitlines()) == 2


def test_fetches_that_no_number_of_gpus_makes_shorter_are_told() -> None:
    answer = answered(lazy=True, fetch_bytes_per_s=10**9, most=2)
    assert answer.needs[0].gpus.at is None
    assert sentence(answer).startswith("2 × h100 are not enough for 4 models: ")


def test_a_seed_that_the_most_is_not_enough_for_decides_over_one_that_it_is() -> None:
    found = [SearchResult(seed, at, ()) for seed, at in enumerate((Crossing(at=4), Crossing(above=4), Crossing(at=2)))]
    assert deciding_of(found) is found[1]
    assert deciding_of(found[::-1]) is found[1]


@pytest.mark.long
def test_where_nothing_is_enough_the_most_is_told_with_what_it_reaches() -> None:
    answer = answered(slo=Slo(ttft_ns=1000), most=3)
    assert [need.gpus.above for need in answer.needs] == [3, 3]
    assert sentence(answer).startswith("3 × h100 are not enough for 4 models: 0.0 % of first tokens")


def test_policies_that_are_named_answer_before_dedicated_instances() -> None:
    setting = Setting(policy="", workload=WORKLOAD, gpu="h100")
    answer = plan(PlanSettings(setting=setting, policies=("aegaeon", "qlm")))
    assert [need.policy for need in answer.needs] == ["aegaeon"] * 3 + ["qlm", "dedicated"]
    ats = [need.gpus.at or 99 for need in answer.needs[:3]]
    assert ats == sorted(ats)


def test_a_model_that_no_gpu_holds_is_refused() -> None:
    with pytest.raises(UserError, match=r"m000 \(qwen2.5-72b\) has 145 GB of weights, and h100 holds .* like h100x4"):
        answered(models="qwen2.5-72b")


def test_kv_is_counted_from_the_first_token_to_the_last() -> None:
    records = [record(0, token_ms=(10, 20)), record(1, token_ms=(20, 30)), record(2, token_ms=(25, 40)), record(3)]
    assert most_kv_bytes(records, {ModelId("m000"): 10}) == 2 * (100 + 2) * 10
    assert most_kv_bytes([], {}) == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"weights": "int3"}, "--weights int3: should be one of dense, int8, int4"),
        ({"lazy": True, "cache_size": "20"}, "--cache-size 20 B: m0.* takes 30.5 GB in it, fetched and as an image"),
        ({"lazy": True, "cache_size": "much"}, "--cache-size: 'much' is no size"),
        ({"fetch": 2.0}, "--fetch is of lazy models: give --lazy"),
        ({"cache_size": "1GB"}, "--cache-size is of lazy models: give --lazy"),
    ],
)
def test_what_does_not_go_with_models_is_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        pool_of(settings_of(NOTHING | {"workload": WORKLOAD, "models": "qwen2.5-7b"} | given).setting)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({}, "give one of --workload and --trace"),
        ({"workload": WORKLOAD, "trace": Path("a.csv")}, "give one of --workload and --trace"),
        ({"trace": Path("a.csv"), "seeds": 2}, "--seeds is of --workload"),
        ({"workload": WORKLOAD, "policy": ["least-slak"]}, "did you mean 'least-slack'"),
        ({"workload": WORKLOAD, "policy": ["qlm", "aegaeon"], "most": 1}, "--most 1: aegaeon keeps prefill and decode"),
        ({"workload": WORKLOAD, "slo": "ttft=never"}, "--slo: 'ttft=never' is no limit"),
        ({"workload": WORKLOAD, "gpu": "b9000"}, "--gpu b9000: should be h100"),
        ({"workload": "poison:models=4"}, "unknown workload 'poison'"),
        ({"workload": ""}, "unknown workload ''"),
        ({"workload": "poisson:models=1,rps=0.2,duration=10"}, "no request with seed 0"),
        ({"trace": Path("away.csv")}, "away.csv: No such file"),
        ({"workload": WORKLOAD, "json": Path("away/plan.json")}, "away is no directory"),
        ({"workload": WORKLOAD, "loads": "much"}, "--loads much: expected numbers"),
        ({"workload": WORKLOAD, "plot": Path("plan.pdf")}, "--plot plan.pdf: should end in .png or .svg"),
        ({"workload": WORKLOAD, "plot": Path("plan.png")}, "--plot draws what --loads names"),
    ],
)
def test_mistakes_cost_a_line(given: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        run(NOTHING | given)


def test_a_trace_is_drawn_once_and_a_workload_three_times() -> None:
    assert settings_of(NOTHING | {"trace": Path("a.csv")}).seeds == (0,)
    assert settings_of(NOTHING | {"workload": WORKLOAD, "seed": 5}).seeds == (5, 6, 7)


def test_the_answer_comes_first_and_all_of_it_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    run(NOTHING | {"workload": WORKLOAD, "gpu": "h100", "seeds": 1, "jobs": 1, "json": file})
    held = msgspec.json.decode(file.read_bytes(), type=Plan)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(sentence(held)[:60])
    assert any(line.startswith("dedicated") for line in lines)
    assert not any("the traffic" in line for line in lines)
    assert msgspec.json.decode(file.read_bytes())["more_traffic"] is None


def test_more_traffic_is_told_after_the_answer_written_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"json": tmp_path / "plan.json", "plot": tmp_path / "plan.svg"}
    run(NOTHING | files | {"workload": WORKLOAD, "gpu": "h100", "seeds": 1, "jobs": 1, "loads": "1,2"})
    held = msgspec.json.decode(files["json"].read_bytes())
    curve = msgspec.convert(held["more_traffic"], LoadCurve)
    assert [point.load for point in curve.ours.points] == [1.0, 2.0]
    out = capsys.readouterr().out
    assert out.index("Host memory of") < out.index(load_sentence(curve, "h100")[:60])
    assert [line.split()[0] for line in out.splitlines()[-2:]] == ["1", "2"]
    assert files["plot"].read_bytes().startswith(b"<?xml")
