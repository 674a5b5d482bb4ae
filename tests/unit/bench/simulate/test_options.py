"""`aegis simulate`: what it prints and writes, and that each mistake costs one line."""

import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aegis.cli.main import main
from aegis.core.decision import Decision
from aegis.telemetry.records import REFUSED, Record
from aegis.telemetry.spans import Span
from tests.long_forms import first_rows_of

SMALL = "poisson:models=4,rps=0.2,duration=10"


@pytest.fixture
def simulate(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(*arguments: object) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["aegis", "simulate", "--jobs", "1", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        return exit_.value.code, *capsys.readouterr()

    return run


def test_a_sweep_is_told_written_and_drawn(simulate: Any, tmp_path: Path) -> None:
    json, plot = tmp_path / "out.json", tmp_path / "out.png"
    policies = ("--policy", "aegaeon", "--policy", "serverlessllm")
    sweep = ("--workload", SMALL, "--sweep", "rps=0.1:0.3:0.1", *policies, "--json", json, "--plot", plot)
    code, out, _ = simulate(*sweep)
    assert code == 0
    assert "rps at 90 % attainment" in out
    result = msgspec.json.decode(json.read_bytes())
    assert [curve["policy"] for curve in result["curves"]] == ["aegaeon", "serverlessllm"]
    assert [[point["at"] for point in curve["points"]] for curve in result["curves"]] == [[0.1, 0.2, 0.3]] * 2
    before = json.read_bytes(), plot.read_bytes()
    simulate(*sweep)
    assert before == (json.read_bytes(), plot.read_bytes())


def test_records_spans_and_decisions_are_those_of_the_figures(simulate: Any, tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("json", "records", "spans", "decisions")}
    simulate(
        "--workload", SMALL, "--roles", "fixed", *(word for name, file in files.items() for word in (f"--{name}", file))
    )
    [point] = msgspec.json.decode(files["json"].read_bytes())["curves"][0]["points"]
    records = [msgspec.json.decode(line, type=Record) for line in files["records"].read_bytes().splitlines()]
    spans = [msgspec.json.decode(line, type=Span) for line in files["spans"].read_bytes().splitlines()]
    assert len(records) == point["figures"]["requests"]
    assert sum(len(record.token_times_ns) for record in records) == point["figures"]["tokens"]
    assert sum(span.requests for span in spans if span.kind == "prefill") == len(records)
    decisions = [msgspec.json.decode(line, type=Decision) for line in files["decisions"].read_bytes().splitlines()]
    assert sum(each.kind == "prefill" for each in decisions) == len(records)


def test_a_trace_a_gpu_costs_and_deadlines_are_taken(simulate: Any, tmp_path: Path) -> None:
    trace, costs = tmp_path / "trace.csv", tmp_path / "costs.yaml"
    trace.write_text("arrival_s,model,input_tokens,output_tokens\n0,a,100,50\n1,b,100,50\n")
    costs.write_text("costs: {qwen2.5-7b: {decode_ms: {step: 150}}}")
    plain = ("--trace", trace, "--gpu", "h100", "--prefill", 1, "--decode", 2, "--models", "qwen2.5-7b")
    assert " 100.00 " in simulate(*plain)[1]
    assert " 100.00 " not in simulate(*plain, "--costs", costs, "--slo", "ttft=1")[1]
    assert " 100.00 " in simulate(*plain, "--costs", costs, "--slo", "ttft=1,tbt=0.2")[1]


def test_models_that_costs_say_nothing_of_are_named(simulate: Any, tmp_path: Path) -> None:
    costs = tmp_path / "costs.yaml"
    given = ("--workload", SMALL, "--gpu", "h100", "--costs", costs)
    costs.write_text("costs: {m001: {decode_ms: {step: 3}}}")
    code, _, err = simulate(*given)
    named = f"aegis: --costs {costs} has no costs of m000, m002, m003; those of --gpu h100 stand in\n"
    assert (code, err) == (0, named)
    costs.write_text("costs: {bakery: {decode_ms: {step: 3}}}")
    code, out, err = simulate(*given)
    assert (code, out) == (2, "")
    assert err == f"aegis: --costs {costs}: has costs of bakery, but of no model here: m000, m001, m002 and 1 more\n"


def test_noise_is_what_is_said_or_what_was_measured(simulate: Any, tmp_path: Path) -> None:
    json, costs = tmp_path / "out.json", tmp_path / "costs.yaml"
    costs.write_text("noise: 0.07\ncosts: {qwen2.5-7b: {decode_ms: {step: 8}}, yi-1.5-9b: {decode_ms: {step: 9}}}")
    found = []
    for words in ((), ("--noise", 0.1), ("--noise", "measured", "--costs", costs)):
        simulate("--workload", SMALL, "--json", json, *words)
        found.append(msgspec.json.decode(json.read_bytes()))
    assert [each["setting"].get("noise") for each in found] == [None, 0.1, 0.07]
    assert found[0]["curves"] != found[1]["curves"]


def test_mixed_instances_are_as_many_as_the_others_unless_said(simulate: Any, tmp_path: Path) -> None:
    json = tmp_path / "out.json"
    for words, mixed in ((("--prefill", 2, "--decode", 3), 5), (("--mixed", 7), 7), ((), 16)):
        simulate("--workload", SMALL, "--policy", "serverlessllm", "--json", json, *words)
        assert msgspec.json.decode(json.read_bytes())["setting"]["mixed"] == mixed


def test_policies_of_both_kinds_have_mixed_instances_and_the_two_apart(simulate: Any, tmp_path: Path) -> None:
    json = tmp_path / "out.json"
    policies = ("--policy", "serverlessllm", "--policy", "aegaeon")
    simulate("--workload", SMALL, "--json", json, *policies, "--mixed", 3, "--prefill", 1, "--decode", 2)
    setting = msgspec.json.decode(json.read_bytes())["setting"]
    assert (setting["mixed"], setting["prefill"], setting["decode"]) == (3, 1, 2)


@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        ((), {"mixed"}),
        (("--prefill", 1, "--decode", 2), {"prefill", "decode"}),
        (("--prefill", 1, "--decode", 2, "--roles", "auto"), {"mixed"}),
        (("--roles", "fixed"), {"prefill", "decode"}),
    ],
)
def test_unless_it_is_said_what_roles_are_ours_has_a_split_where_instances_are_counted(
    simulate: Any, tmp_path: Path, words: tuple[object, ...], kinds: set[str]
) -> None:
    spans = tmp_path / "spans"
    simulate("--workload", SMALL, "--spans", spans, *words)
    instances = {msgspec.json.decode(line, type=Span).instance for line in spans.read_bytes().splitlines()}
    assert {instance.partition("-")[0] for instance in instances} == kinds


def test_who_waits_too_long_fails_only_if_that_is_said(simulate: Any, tmp_path: Path) -> None:
    json = tmp_path / "out.json"
    crowd = ("--workload", "poisson:models=8,rps=0.3,duration=40", "--policy", "serverlessllm", "--mixed", 1)
    failed = []
    for words in ((), ("--give-up", 30), ("--give-up", 2.5)):
        simulate(*crowd, "--json", json, *words)
        result = msgspec.json.decode(json.read_bytes())
        failed.append(result["curves"][0]["points"][0]["figures"]["failed"])
    assert result["setting"]["give_up_ns"] == 2_500_000_000
    assert 0 == failed[0] < failed[1] < failed[2]


def test_what_no_context_holds_is_made_shorter(simulate: Any, tmp_path: Path) -> None:
    records = tmp_path / "records"
    long = "poisson:models=1,rps=1,duration=10,lengths=fixed,input=4000,output=2000"
    simulate("--workload", long, "--models", "llama-2-13b", "--records", records)
    lengths = {
        (record.input_tokens, record.output_tokens)
        for record in (msgspec.json.decode(line, type=Record) for line in records.read_bytes().splitlines())
    }
    assert lengths == {(2716, 1358)}  # 4000 and 2000 x 4096 / 6032


def test_links_switches_and_fixed_instances_are_those_of_the_setting(simulate: Any, tmp_path: Path) -> None:
    json = tmp_path / "out.json"
    words = ("--link", 25, "--switch", 0, "--roles", "fixed", "--prefill", 1, "--decode", 2)
    code, _, _ = simulate("--workload", SMALL, "--policy", "serverlessllm", "--json", json, *words)
    setting = msgspec.json.decode(json.read_bytes())["setting"]
    assert (code, setting["link_bytes_per_s"], setting["switch_ns"]) == (0, 25_000_000_000, 0)
    assert (setting["roles"], setting["prefill"], setting["decode"]) == ("fixed", 1, 2)


def test_the_gpus_that_a_trace_needs_are_told_and_written(simulate: Any, tmp_path: Path) -> None:
    trace, json = tmp_path / "trace.csv", tmp_path / "gpus.json"
    trace.write_text("arrival_s,model,input_tokens,output_tokens\n0,a,100,50\n1,b,100,50\n")
    gpus = ("--suite", "gpus", "--trace", trace, "--json", json, "--plot", tmp_path / "gpus.svg")
    code, out, _ = simulate(*gpus, "--policy", "dedicated", "--policy", "serverlessllm")
    assert code == 0
    assert "best rival" in out
    [cell] = msgspec.json.decode(json.read_bytes())["cells"]
    found = {each["contender"]: each["median"]["at"] for each in cell["contenders"]}
    assert (cell["cell"], found) == ("trace.csv", {"dedicated": 2.0, "serverlessllm": 1.0})


@pytest.mark.parametrize(
    ("arguments", "line"),
    first_rows_of(
        10,
        [
            ([], "give one of --workload, --trace and --suite"),
            (["--workload", SMALL, "--trace", "x.csv"], "give one of --workload, --trace and --suite"),
            (["--workload", "posson"], "unknown workload 'posson'"),
            (["--workload", ""], "unknown workload ''"),
            (["--workload", "poisson:rps=1e-6,duration=0.001"], "no request with seed 0"),
            (["--workload", SMALL, "--models", "qwen2.5-72b:4"], "m000 (qwen2.5-72b) has 145 GB of weights"),
            (["--workload", SMALL, "--mixed", "99999999"], "--mixed: should be "),
            (["--trace", "/nowhere.csv"], "/nowhere.csv: No such file"),
            (["--trace", "x.csv", "--sweep", "rps=1:2:1"], "--sweep changes a key of --workload; a trace has none"),
            (["--workload", SMALL, "--sweep", "rps=1:2"], "should be KEY=LOW:HIGH:STEP"),
            (["--workload", SMALL, "--sweep", "speed=1:2:1"], "workload poisson has no key 'speed'"),
            (["--workload", SMALL, "--policy", "aegeon"], "unknown policy 'aegeon'; did you mean 'aegaeon'?"),
            (["--workload", SMALL, "--policy", "qlm", "--as-published"], "policy 'qlm' has no published setting"),
            (["--workload", SMALL, "--gpu", "h999"], "--gpu h999: should be h100"),
            (["--workload", SMALL, "--models", "mix:2"], "--models mix:2: 2 models, but the workload asks for 4"),
            (["--workload", SMALL, "--slo", "soon"], "--slo: 'soon' is no limit from a microsecond to a day"),
            (["--workload", SMALL, "--costs", "/nowhere.yaml"], "/nowhere.yaml: cannot be read"),
            (["--workload", SMALL, "--prefill", "0"], "--prefill: should be "),
            (["--workload", SMALL, "--json", "/nowhere/out.json"], "/nowhere is no directory"),
            (["--workload", SMALL, "--plot", "out.gif"], "should end in .png or .svg"),
            (
                ["--workload", SMALL, "--sweep", "rps=0.1:0.2:0.1", "--spans", "x"],
                "--records, --spans and --decisions are of",
            ),
            (["--workload", SMALL, "--tiny"], "--tiny is of a --suite"),
            (["--suite", "fig10"], "--suite fig10: should be one of fig11a"),
            (["--workload", SMALL, "--give-up", "0"], "--give-up: should be "),
            (["--workload", SMALL, "--give-up", "inf"], "--give-up: should be "),
            (["--suite", "fig11a", "--give-up", "9"], "--give-up is not of a --suite"),
            (["--suite", "fig11a", "--models", "mix:9"], "--models is not of a --suite"),
            (["--suite", "fig11a", "--suite", "fig12", "--json", "x.json"], "--json and --plot are of one --suite"),
            (["--suite", "cells", "--suite", "fig10"], "--suite fig10: should be one of fig11a"),
            (["--suite", "cells", "--slo", "ttft=5"], "--slo is not of --suite cells, which sets it itself"),
            (["--suite", "cells", "--switch", "0"], "--switch is not of --suite cells, which sets it itself"),
            (["--suite", "fig7", "--tiny", "--policy", "qlm"], "--policy is not of --suite fig7, which sets it itself"),
            (["--suite", "fig18", "--tiny", "--policy", "qlm"], "--policy is not of --suite fig18, which sets"),
            (["--suite", "fig14", "--policy", "qlm", "--policy", "aegaeon"], "--suite fig14 is of one --policy"),
            (["--suite", "fig14", "--tiny", "--trace-dir", "x"], "--trace-dir is not of --suite fig14, whose requests"),
            (["--workload", SMALL, "--only", "x"], "--only is of --suite cells, cells-links, gpus, mux-tool-agent, "),
            (["--suite", "cells", "--lanes"], "--lanes is not of --suite cells, which sets it itself"),
            (["--suite", "cells", "--no-lanes"], "--lanes is not of --suite cells, which sets it itself"),
            (["--suite", "cells", "--decisions", "x"], "--decisions is not of --suite cells, which sets it itself"),
            (["--suite", "fig11a", "--no-lanes"], "--lanes is not of a --suite"),
            (["--suite", "overload", "--no-lanes"], "--lanes is not of --suite overload, which sets it itself"),
            (["--faults", "--no-lanes"], "--lanes is not of --faults"),
            (["--suite", "cells", "--policy", "aegeon"], "unknown policy 'aegeon'; did you mean 'aegaeon'?"),
            (
                ["--suite", "cells", "--only", "slo9", "--json", "cells.json"],
                "--only slo9: is in no name of a search of",
            ),
            (["--suite", "gpus"], "--suite gpus needs one of --trace and --workload"),
            (["--suite", "gpus", "--workload", SMALL, "--mixed", "4"], "--mixed is not of --suite gpus, which sets it"),
            (["--suite", "fig11a", "--roles", "auto"], "--roles is not of a --suite"),
            (
                ["--workload", SMALL, "--policy", "aegaeon", "--mixed", "2"],
                "--mixed 2: aegaeon has instances that prefill and others that decode",
            ),
            (
                ["--workload", SMALL, "--roles", "fixed", "--mixed", "2"],
                "--mixed 2: least-slack has instances that prefill and others that decode",
            ),
            (
                ["--workload", SMALL, "--mixed", "2", "--prefill", "3", "--decode", "5"],
                "--prefill 3 has no effect on least-slack with --mixed 2; leave out either --mixed, or --prefill",
            ),
            (
                ["--workload", SMALL, "--mixed", "2", "--decode", "5", "--policy", "aegaeon"],
                "--mixed 2 has no effect on aegaeon with --decode 5; leave out either --mixed, or --prefill",
            ),
            (["--workload", SMALL, "--roles", "both"], "--roles: should be 'auto' or 'fixed', not 'both'"),
            (["--suite", "fig11a", "--seeds", "2"], "--seeds is of --suite cells, cells-links and gpus"),
            (
                ["--workload", SMALL, "--noise", "much"],
                "--noise much: should be a share from 0 to 1, like 0.05, or measured",
            ),
            (["--workload", SMALL, "--noise", "nan"], "--noise nan: should be a share from 0 to 1"),
            (["--workload", SMALL, "--noise", "measured"], "--noise measured: needs --costs of a file"),
            (["--suite", "cells", "--noise", "0.1"], "--noise is not of --suite cells, which sets it itself"),
            (["--suite", "fig11a", "--noise", "0.1"], "--noise is not of a --suite"),
            (["--workload", SMALL, "--again"], "--again is of --suite cells, cells-links, gpus and overload"),
            (["--suite", "overload", "--slo", "ttft=5"], "--slo is not of --suite overload, which sets it itself"),
            (["--suite", "overload", "--seeds", "2"], "--seeds is not of --suite overload, which sets it itself"),
            (["--suite", "overload", "--trace-dir", "/nowhere"], "--trace-dir /nowhere: has none of servegen_market"),
        ],
    ),
)
def test_a_mistake_costs_one_line_and_exit_code_2(simulate: Any, arguments: list[str], line: str) -> None:
    code, out, err = simulate(*arguments)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"aegis: [^\n]+\n", err)
    assert line in err


def test_who_is_refused_gets_nothing_and_has_missed_its_tokens(simulate: Any, tmp_path: Path) -> None:
    """The same requests either way."""
    asked = ["--workload", "poisson:models=6,rps=3,duration=10", "--mixed", "1", "--slo", "ttft=1,tbt=0.03"]
    found = []
    for refuses in ([], ["--refuse-late"]):
        file = tmp_path / "records.jsonl"
        assert simulate(*asked, *refuses, "--records", file)[0] == 0
        found.append(msgspec.json.Decoder(Record).decode_lines(file.read_bytes()))
    plain, refusing = ({record.request: record for record in records} for records in found)
    refused = [record for record in refusing.values() if record.ended == REFUSED]
    assert plain.keys() == refusing.keys() and all(record.ended == "finished" for record in plain.values())
    assert 0 < len(refused) < len(plain)
    for record in refused:
        assert record.first_ns is None and record.on_time == 0
        assert record.output_tokens == plain[record.request].output_tokens
