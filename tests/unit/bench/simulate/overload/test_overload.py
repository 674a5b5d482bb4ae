"""The suite `overload`: what it holds and writes, what its figures are, and that an interrupted run goes on."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aegis.core.errors import UserError
from aegis.core.ids import ModelId, RequestId
from aegis.core.model import Slo
from aegis.sim.simulation import Outcome
from aegis.telemetry.records import Record
from bench.common import provenance
from bench.simulate.contenders import OURS, UNDIVIDED, Contender, rivals
from bench.simulate.overload.figures import (
    LoadFigures,
    Measured,
    OverloadCell,
    better_of,
    compared,
    load_figures,
    measured,
    summary,
)
from bench.simulate.overload.run import Choice, run
from bench.simulate.overload.suite import REFUSING, Cell, OverloadSuite, overload
from bench.simulate.setting import Setting, models_of, pool_of
from bench.simulate.tuning import Knob, Tuned, TuningProbe
from tests.long_forms import first_rows_of

HEAD = "arrival_s,model,input_tokens,output_tokens"
ONE = Choice(policies=("serverlessllm", OURS), only=("0.5rps/x1.5",))


def written(suite: OverloadSuite, place: Path, choice: Choice) -> dict[str, Any]:
    run(suite, choice, json=place / "overload.json", plot=place / "overload.png")
    result: dict[str, Any] = msgspec.json.decode((place / "overload.json").read_bytes())
    return result


def with_trace(directory: Path, name: str) -> Path:
    rows = ["0,arena-small,100,20", "1.5,arena-large,100,20", "2.5,arena-large,100,20"]
    (directory / name).write_bytes(gzip.compress("\n".join([HEAD, *rows]).encode()))
    return directory


def test_recorded_traffic_is_there_with_its_directory_and_poisson_always() -> None:
    suite = overload()
    names = [cell.name for cell in suite.cells]
    assert [name for name in names if name.startswith("servegen")] == [
        f"servegen/{gpus}gpus" for gpus in (6, 9, 12, 18, 24, 30, 38)
    ]
    assert {cell.name for cell, _ in suite.pairs()} == {
        f"poisson-{rps}rps/x{factor}" for rps in (0.1, 0.5) for factor in (1, 1.5, 2, 4)
    }
    by_name = {cell.name: cell for cell in suite.cells}
    assert by_name["poisson-0.5rps/x4"].setting.workload == "poisson:models=106,rps=2,duration=600"
    assert by_name["arena/3gpus"].setting.mixed == 3 and by_name["gentd/8gpus"].seconds == 14 * 24 * 3600 / 300


def test_traces_are_cut_made_faster_and_have_the_shapes_of_their_names(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("\n".join([HEAD, "0,sg-small,100,20", "600,sg-large,100,20", "1200,sg-large,100,20"]))
    setting = Setting(policy=OURS, trace=str(trace), models="qwen2.5-14b", named_shapes=(("small", "qwen2.5-7b"),))
    roots = {spec.model: spec.root for spec in pool_of(setting).specs}
    assert roots == {"sg-small": "qwen2.5-7b", "sg-large": "qwen2.5-14b"}
    assert models_of(replace(setting, trace_s=600)) == 1
    assert models_of(replace(setting, trace_s=600, trace_speed=2)) == 2


def test_no_rival_needs_more_gpus_than_there_are_and_all_others_are_in_every_cell(tmp_path: Path) -> None:
    suite = overload(with_trace(tmp_path, "arena27.csv.gz"))
    markets = {OURS, UNDIVIDED, REFUSING, *(contender.name for contender in rivals())}
    for cell in suite.cells:
        of = {contender.name for where, contender in suite.pairs() if where is cell}
        assert of == ((markets - {"aegaeon"} if cell.setting.mixed == 1 else markets) if cell.available else set())
    assert suite.missing == ("servegen_market.csv.gz", "gentd26_86models.csv.gz")


def test_a_directory_without_any_of_the_traces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has none of servegen_market\.csv\.gz, arena27"):
        overload(tmp_path)


@pytest.mark.long
def test_the_suite_runs_draws_and_says_what_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = written(overload(tiny=True), tmp_path, Choice())
    assert [cell["cell"].partition("/")[0] for cell in result["cells"]] == ["poisson-0.1rps"] * 4 + [
        "poisson-0.5rps"
    ] * 4
    for cell in result["cells"]:
        names = [OURS, UNDIVIDED, REFUSING, *(each.name for each in rivals())]
        assert [each["contender"] for each in cell["contenders"]] == names
        tuned = {each["contender"]: each["tuned"]["probes"] for each in cell["contenders"] if "tuned" in each}
        assert tuned.keys() == {each.name for each in rivals() if each.knobs} and all(tuned.values())
        assert cell["ratio"] == 1.0
    assert result["summary"] in (told := capsys.readouterr().out)
    assert "are left out: servegen_market.csv.gz, arena27.csv.gz, gentd26_86models.csv.gz" in told
    assert (tmp_path / "overload.png").read_bytes().startswith(b"\x89PNG")


def test_what_a_file_holds_is_not_simulated_again_and_the_whole_is_the_same(tmp_path: Path) -> None:
    suite = overload(tiny=True)
    written(suite, tmp_path, replace(ONE, policies=(OURS,)))
    in_parts = written(suite, tmp_path, ONE)
    file = tmp_path / "overload.json"
    held = file.read_bytes()
    file.unlink()
    assert written(suite, tmp_path, replace(ONE, jobs=2)) == in_parts and file.read_bytes() == held
    other = held.replace(b'"on_time": 1.0', b'"on_time": 0.95')
    file.write_bytes(other)
    written(suite, tmp_path, ONE)
    assert file.read_bytes() == other != held
    written(suite, tmp_path, replace(ONE, again=True))
    assert file.read_bytes() == held
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    ("cell", "file"),
    first_rows_of(1, [("arena/1gpus", "arena27.csv.gz"), ("servegen/6gpus", "servegen_market.csv.gz")]),
)
def test_cells_of_traces_stay_in_the_file_when_the_directory_is_not_given_or_another_one(
    cell: str, file: str, tmp_path: Path
) -> None:
    choice = replace(ONE, only=(cell, "0.5rps/x1.5"))
    directory = with_trace(tmp_path, file)
    first = written(overload(directory, tiny=True), tmp_path, choice)
    assert [each["cell"] for each in first["cells"]] == [cell, "poisson-0.5rps/x1.5"]
    assert first["cells"][0]["setting"]["trace"] == file
    assert [each["figures"]["requests"] for each in first["cells"][0]["contenders"]] == [3, 3, 3, 3]
    assert written(overload(tiny=True), tmp_path, choice) == first


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"{}", "holds something else than results of --suite overload"),
        (
            b'{"suite":"overload","title":"","tiny":true,"seed":4,"summary":"","cells":[]}',
            "holds results of --suite overload --tiny --seed 4; name another file",
        ),
        (
            b'{"suite":"overload","title":"","tiny":true,"seed":0,"summary":"","cells":[{"cell":"arena/1gpus",'
            b'"setting":{},"seconds":1,"contenders":[],"best_rival":null,"ratio":null,"ttft_ratio":null}]}',
            "arena/1gpus was simulated with other settings; name another file",
        ),
    ],
)
def test_a_file_of_something_else_is_refused_and_kept(content: bytes, line: str, tmp_path: Path) -> None:
    (tmp_path / "overload.json").write_bytes(content)
    with pytest.raises(UserError, match=line):
        written(overload(tiny=True), tmp_path, ONE)
    assert (tmp_path / "overload.json").read_bytes() == content


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--only x9: .* which are like poisson-0\.5rps/x4/least-slack"):
        written(overload(tiny=True), tmp_path, Choice(only=("x9",)))


@pytest.mark.long
def test_the_head_of_older_figures_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "RESULTS", tmp_path)
    first = written(overload(tiny=True), tmp_path, replace(ONE, policies=(OURS,)))
    assert first["measured"]["code"] == provenance.digest("overload")
    head = first["measured"] | {"code": "older"}
    (tmp_path / "overload.json").write_bytes(msgspec.json.encode(first | {"measured": head}))
    assert written(overload(tiny=True), tmp_path, ONE)["measured"] == head


def record(at_s: int, first_s: float | None, on_time: int) -> Record:
    first_ns = None if first_s is None else round(first_s * 1e9)
    return Record(RequestId(f"r{at_s}"), ModelId("m"), at_s * 10**9, 10, 10, "finished", on_time, first_ns, first_ns)


def test_figures_are_shares_of_what_was_asked_for_and_rates_of_the_workloads_time() -> None:
    records = [record(0, 1.0, 10), record(1, 12.0, 4), record(2, None, 0), record(3, 13.0, 10)]
    outcome = Outcome(records, [], [], {}, 100 * 10**9, [], [])
    outcome.counters["a"] = {}  # type: ignore[index]
    found = load_figures(outcome, {ModelId("m"): Slo()}, seconds=8)
    assert (found.on_time, found.on_time_per_s, found.first_on_time) == (0.6, 3.0, 0.5)
    assert (found.ttft_p50_ms, found.ttft_p99_ms, found.makespan_s) == (10_000, 11_000, 100)


def crowd(knob: Knob | None) -> tuple[Cell, Contender, int]:
    setting = Setting(policy="", workload="poisson:models=8,rps=0.4,duration=60", mixed=1)
    cell = Cell(name="crowd", setting=setting, seconds=60, tuning_seconds=30)
    return cell, Contender(name="it", policy="serverlessllm", rival=True, knobs=(knob,) if knob else ()), 3


def test_a_rival_counts_with_its_best_parameters_and_never_with_worse_ones() -> None:
    plain = measured(crowd(None))
    one = measured(crowd(Knob("max_batch", (1, 64), 1)))
    assert one.tuned and one.tuned.parameters == {"max_batch": 64}
    assert one.figures == plain.figures and one.untuned is not None and one.untuned < plain.figures.on_time
    whole, contender, seed = crowd(Knob("max_batch", (1, 64), 1))
    same = measured((replace(whole, tuning_seconds=60), contender, seed))
    assert same.figures == one.figures and same.tuned and same.tuned.probes[1].attainment == one.figures.on_time
    good = measured(crowd(Knob("max_batch", (1, 64), 64)))
    assert good.tuned and good.tuned.parameters == {"max_batch": 64} and good.untuned is None
    assert [probe.parameters["max_batch"] for probe in good.tuned.probes] == [64, 1]


def figures(on_time: float, ttft_ms: float | None = 100.0) -> LoadFigures:
    return LoadFigures(10, 0, on_time, 10.0, 1.0, ttft_ms, ttft_ms, 0, 0.5, 10.0)


def test_what_only_looked_better_in_a_shorter_run_does_not_count() -> None:
    contender = Contender(name="it", policy="qlm", rival=True, knobs=(Knob("max_batch", (1, 64), 64),))
    tuned = Tuned({"max_batch": 1}, (TuningProbe({"max_batch": 1}, 0.9),))
    worse = better_of(contender, tuned, figures(0.6), figures(0.5))
    assert worse == Measured("it", True, figures(0.6), Tuned({"max_batch": 64}, tuned.probes))
    assert better_of(contender, tuned, figures(0.6), figures(0.7)) == Measured("it", True, figures(0.7), tuned, 0.6)


def test_ours_is_compared_with_the_best_rival_and_bars_are_told() -> None:
    cell = overload().cells[-1]
    found = [
        Measured(OURS, False, figures(0.6)),
        Measured("qlm", True, figures(0.5, 40.0)),
        Measured("muxserve", True, figures(0.2, 10.0)),
        Measured("serverlessllm-oracle-sjf", False, figures(0.9)),
    ]
    one = compared(cell, found)
    assert (one.best_rival, one.ratio, one.ttft_ratio) == ("qlm", 1.2, 2.5)
    assert compared(cell, found[1:]).ratio is None and compared(cell, found[:1]).best_rival is None
    assert compared(cell, [found[0], Measured("qlm", True, figures(0.0, None))]).ratio is None

    def cells(*ratios: float) -> list[OverloadCell]:
        return [OverloadCell(f"c{at}", {}, 1, [], "qlm", ratio, None) for at, ratio in enumerate(ratios)]

    over = "least-slack over the best rival, in 3 cells: "
    assert summary(cells(1.2, 1.3, 0.99)) == f"{over}0.99 at least, 1.20 in the median"
    assert summary(cells(1.1, 1.3, 0.99)).endswith("; the median is below 1.15")
    assert summary(cells(1.3, 0.97, 0.5)).endswith("; first cell below 0.98: c1")
    assert summary([]) == "nothing to compare yet"
