"""Suites of cells: what they hold, what they write, and that an interrupted run goes on."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from aegis.core.errors import UserError
from aegis.policies import RECIPES
from bench.common import provenance
from bench.simulate.cells.figures import Key, cell_figures, summary
from bench.simulate.cells.run import Choice, run
from bench.simulate.cells.search import SearchResult
from bench.simulate.cells.suites import CELL_SUITES, CellSuite, cells, cells_links, gpus, untuned
from bench.simulate.contenders import OURS
from bench.simulate.setting import Setting, pool_of
from bench.simulate.sweep import Crossing
from tests.long_forms import first_of

WORKLOAD = "poisson:models=3,rps=0.5,duration=5"
TINY = Choice(seeds=(0, 1), policies=("serverlessllm", OURS), only=("/slo1/sharegpt",))


def written(suite: CellSuite, place: Path, choice: Choice) -> tuple[bytes, bytes]:
    run(suite, choice, json=place / "cells.json", plot=place / "cells.png")
    return (place / "cells.json").read_bytes(), (place / "cells.png").read_bytes()


def test_every_rate_deadline_and_length_is_a_cell() -> None:
    by_name = {cell.name: cell.setting for cell in cells().cells}
    assert len(by_name) == 2 * 3 * 3
    strict = by_name["0.5rps/slo0.3/ox2"]
    assert strict.workload == "poisson:rps=0.5,ox=2,duration=600"
    assert (strict.slo.ttft_ns, strict.slo.tbt_ns) == (3_000_000_000, 30_000_000)
    assert strict.link_bytes_per_s is strict.switch_ns is None


def test_links_and_switches_are_those_of_the_gpu_where_nothing_is_said() -> None:
    by_name = {cell.name: cell.setting for cell in cells_links().cells}
    assert len(by_name) == 2 * 3 * 4
    for link, rate, switch_ns in (("link16", 16, 2), ("link55", 55, 2), ("switch0.1", 49.5, 100)):
        setting = by_name[f"0.1rps/slo1/ix2/{link}"]
        gpu = pool_of(replace(setting, policy="qlm", workload=WORKLOAD)).gpu
        assert (gpu.in_bytes_per_s, gpu.out_bytes_per_s) == (rate * 1e9, rate * 1e9)
        assert gpu.switch_ns == switch_ns * 1e6


def test_all_policies_contend_ours_on_fixed_instances_too_and_oracles_are_no_rivals() -> None:
    suite, setting = cells(), Setting(policy="", workload=WORKLOAD)
    for each in (suite, gpus(setting, "trace")):
        assert {contender.policy for contender in each.contenders} == RECIPES.keys()
        assert {contender.name for contender in each.contenders if contender.rival} == {
            name for name in RECIPES.keys() - {OURS} if "oracle" not in name
        }
    searches = {each.name: suite.search(suite.cells[0], each, 0, None).setting for each in suite.contenders}
    pools = {name: pool_of(replace(setting, workload=WORKLOAD)) for name, setting in searches.items()}
    assert (pools[OURS].mixed, pools[OURS].prefills, pools[OURS].decodes) == (16, 0, 0)
    fixed = pools[f"{OURS} 6+10"]
    assert (fixed.mixed, fixed.prefills, fixed.decodes) == (0, 6, 10)
    assert len(fixed.instances()) == 16
    splits = {"6+10": (6, 10), "4+12": (4, 12), "3+13": (3, 13)}
    for policy in (OURS, "aegaeon"):
        assert {
            text: (pools[f"{policy} {text}"].prefills, pools[f"{policy} {text}"].decodes) for text in splits
        } == splits


def test_a_search_begins_where_another_seed_ended() -> None:
    suite = cells()
    search = suite.search(suite.cells[0], suite.contenders[0], 1, 61.3)
    assert (search.start, search.width, search.setting.seed) == (62, 4, 1)
    assert suite.search(suite.cells[0], suite.contenders[0], 1, 0.4).start == 2
    assert suite.search(suite.cells[0], suite.contenders[0], 1, 5000.0).start == search.limit
    assert suite.search(suite.cells[0], suite.contenders[0], 1, None, screen_at=84.8).screen_at == 84


@pytest.mark.parametrize("name", first_of(1, list(CELL_SUITES)))
def test_a_suite_writes_its_cells_and_a_plot(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite = CELL_SUITES[name](tiny=True)
    choice = Choice(seeds=(0,), policies=("dedicated",))
    json, plot = written(suite, tmp_path, choice)
    result = msgspec.json.decode(json)
    assert [cell["cell"] for cell in result["cells"]] == [cell.name for cell in suite.cells]
    assert all(cell["best_rival"] == "dedicated" for cell in result["cells"])
    assert plot.startswith(b"\x89PNG")
    assert suite.title in capsys.readouterr().out


@pytest.mark.long
def test_what_a_file_holds_is_not_simulated_again_and_the_whole_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite, parts, whole = cells(tiny=True), tmp_path / "parts", tmp_path / "whole"
    parts.mkdir()
    whole.mkdir()
    for only in (f"0.1rps/slo1/sharegpt/{OURS}", "slo1/sharegpt/server"):
        written(suite, parts, replace(TINY, only=(only,)))
    in_parts = written(suite, parts, TINY)
    assert in_parts == written(suite, whole, replace(TINY, jobs=2))
    assert not list(whole.glob("*.part"))
    held = in_parts[0].replace(b'"attainment": 1.0', b'"attainment": 0.95')
    assert held != in_parts[0]
    (parts / "cells.json").write_bytes(held)
    assert written(suite, parts, TINY)[0] == held
    assert written(suite, parts, replace(TINY, again=True)) == in_parts


@pytest.mark.long
def test_what_goes_on_from_older_figures_keeps_the_head_of_those(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "RESULTS", tmp_path)
    suite, one = cells(tiny=True), replace(TINY, only=(f"0.1rps/slo1/sharegpt/{OURS}",))
    first = msgspec.json.decode(written(suite, tmp_path, one)[0])
    assert first["measured"]["code"] == provenance.digest("cells")
    head = first["measured"] | {"commit": "1234567", "code": "older"}
    (tmp_path / "cells.json").write_bytes(msgspec.json.encode(first | {"measured": head}))
    assert msgspec.json.decode(written(suite, tmp_path, one)[0])["measured"] == head
    again = written(suite, tmp_path, replace(one, again=True))[0]
    assert msgspec.json.decode(again)["measured"]["code"] == provenance.digest("cells")


def test_gpus_are_searched_for_a_workload_with_rivals_tuned(tmp_path: Path) -> None:
    suite = gpus(Setting(policy="", workload=WORKLOAD), "small", tiny=True)
    result = msgspec.json.decode(written(suite, tmp_path, Choice(seeds=(0,), policies=("aegaeon", "serverlessllm")))[0])
    [cell] = result["cells"]
    assert [each["contender"] for each in cell["contenders"]] == ["aegaeon", "serverlessllm"]
    assert [each["median"] for each in cell["contenders"]] == [{"at": 2.0}, {"at": 1.0}]
    assert all(each["found"][0]["tuned"]["parameters"] for each in cell["contenders"])
    assert (cell["best_rival"], cell["ratio"]) == ("serverlessllm", None)


def test_rivals_are_screened_by_the_best_that_a_file_holds(tmp_path: Path) -> None:
    suite = gpus(Setting(policy="", workload=WORKLOAD), "small", tiny=True)
    written(suite, tmp_path, Choice(seeds=(0,), policies=("serverlessllm",)))
    file = written(suite, tmp_path, Choice(seeds=(0,), policies=("dedicated",), screen=True))[0]
    (cell,) = msgspec.json.decode(file)["cells"]
    ends = {each["contender"]: each["median"] for each in cell["contenders"]}
    assert ends == {"serverlessllm": {"at": 1.0}, "dedicated": {"above": 1.0}}
    assert cell["best_rival"] == "serverlessllm"


def test_results_on_divided_gpus_are_not_taken_for_those_on_whole_ones(tmp_path: Path) -> None:
    choice = Choice(seeds=(0,), policies=("serverlessllm",))
    setting = Setting(policy="", workload=WORKLOAD)
    written(gpus(setting, "w"), tmp_path, choice)
    with pytest.raises(UserError, match="w was simulated with other settings"):
        written(gpus(replace(setting, lanes=True), "w"), tmp_path, choice)
    written(gpus(setting, "w"), tmp_path, choice)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"{}", "holds something else than results of --suite cells"),
        (b"no json", "holds something else than results of --suite cells"),
        (b'{"suite":"gpus","title":"","aim":"","tiny":true,"cells":[]}', "holds results of --suite gpus --tiny"),
        (b'{"suite":"cells","title":"","aim":"","tiny":false,"cells":[]}', "holds results of --suite cells$"),
        (
            b'{"suite":"cells","title":"","aim":"","tiny":true,"cells":'
            b'[{"cell":"0.1rps/slo1/ix2","setting":{},"contenders":[],"best_rival":null,"ratio":null}]}',
            "0.1rps/slo1/ix2 was simulated with other settings; name another file",
        ),
    ],
)
def test_a_file_of_something_else_is_refused_and_kept(content: bytes, line: str, tmp_path: Path) -> None:
    (tmp_path / "cells.json").write_bytes(content)
    with pytest.raises(UserError, match=line):
        written(cells(tiny=True), tmp_path, TINY)
    assert (tmp_path / "cells.json").read_bytes() == content


def test_a_search_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"--only slo9: is in no name .* which are like 0\.5rps/slo0\.3/ox2/least-slack"
    ):
        written(cells(tiny=True), tmp_path, replace(TINY, only=("slo9",)))


def known(cell: str, medians: dict[str, Crossing]) -> dict[Key, SearchResult]:
    return {(cell, name, 0): SearchResult(0, at, ()) for name, at in medians.items()}


def test_ours_is_compared_with_the_best_of_the_rivals() -> None:
    suite, name = cells(), cells().cells[0].name
    medians = {OURS: Crossing(at=60), "qlm": Crossing(at=40), "muxserve": Crossing(at=20)}
    medians |= {"serverlessllm-oracle-sjf": Crossing(at=80), f"{OURS} 6+10": Crossing(at=70)}
    figures = cell_figures(suite, name, {}, known(name, medians))
    assert (figures.best_rival, figures.ratio) == ("qlm", 1.5)
    behind = cell_figures(suite, name, {}, known(name, medians | {"muxserve": Crossing(above=120)}))
    assert (behind.best_rival, behind.ratio) == ("muxserve", 0.5)
    screened = cell_figures(suite, name, {}, known(name, medians | {"muxserve": Crossing(below=44)}))
    assert (screened.best_rival, screened.ratio) == ("qlm", 1.5)
    alone = cell_figures(suite, name, {}, known(name, {OURS: Crossing(at=60)}))
    assert (alone.best_rival, alone.ratio) == (None, None)
    assert (
        summary([figures, behind, alone]) == f"{OURS}: at least the best rival in 1 of 2, 1.00 times it in the median"
    )


def test_fewer_gpus_are_better_and_who_never_gets_there_is_no_rival() -> None:
    suite = gpus(Setting(policy="", workload=WORKLOAD), "trace")
    medians = {
        OURS: Crossing(at=5),
        "qlm": Crossing(above=4),
        "aegaeon": Crossing(at=10),
        "dedicated": Crossing(at=20),
    }
    figures = cell_figures(suite, "trace", {}, known("trace", medians))
    assert (figures.best_rival, figures.ratio) == ("aegaeon", 2.0)


def test_on_a_split_ours_is_compared_with_aegaeon_there() -> None:
    suite, name = cells(), cells().cells[0].name
    medians = {OURS: Crossing(at=60), f"{OURS} 6+10": Crossing(at=44), "aegaeon 6+10": Crossing(at=40)}
    medians |= {f"{OURS} 3+13": Crossing(at=45), "aegaeon 3+13": Crossing(at=50), "aegaeon 4+12": Crossing(at=70)}
    figures = cell_figures(suite, name, {}, known(name, medians))
    assert figures.on_splits == {"6+10": 1.1, "3+13": 0.9}
    assert figures.best_rival is None, "what is given a split is no rival"
    more = cell_figures(suite, name, {}, known(name, medians | {"qlm": Crossing(at=30)}))
    assert summary([more]).endswith("; at least aegaeon on the same split in 1 of 2, 0.90 times it or more")


def test_what_is_untuned_in_a_file_is_refused_or_searched_again(tmp_path: Path) -> None:
    suite, only = cells(tiny=True), ("0.1rps/slo1/sharegpt",)
    choice = Choice(seeds=(0, 1), policies=("serverlessllm",), only=only)
    result = msgspec.json.decode(written(suite, tmp_path, choice)[0])
    [contender] = result["cells"][0]["contenders"]
    first, second = (found["tuned"] for found in contender["found"])
    assert first["parameters"] == second["parameters"] == {"max_batch": 64} and not second["probes"]
    del contender["found"][0]["tuned"]
    (tmp_path / "cells.json").write_bytes(msgspec.json.encode(result))
    with pytest.raises(UserError, match=r"serverlessllm was not tuned there in 0.1rps/slo1/sharegpt; name another"):
        written(suite, tmp_path, choice)
    again = msgspec.json.decode(written(suite, tmp_path, replace(choice, again=True))[0])
    assert all("tuned" in found for found in again["cells"][0]["contenders"][0]["found"])


def test_untuned_contenders_have_several_splits() -> None:
    suite = untuned(gpus(Setting(policy="", workload=WORKLOAD), "trace"))
    names = [each.name for each in suite.contenders]
    assert names[:4] == [OURS, "aegaeon 1/8", "aegaeon 1/4", "aegaeon 3/8"] and "qlm" in names
    search = suite.search(suite.cells[0], suite.contenders[1], 0, None)
    assert (search.placed(16).prefill, search.placed(16).decode) == (2, 14)
    assert search.found().tuned is None


def test_the_median_is_one_of_those_found() -> None:
    suite, name = cells(), cells().cells[0].name
    answers = {
        (name, "qlm", seed): SearchResult(seed, Crossing(at=at), ()) for seed, at in ((2, 7.0), (0, 9.0), (1, 8.0))
    }
    [qlm] = cell_figures(suite, name, {}, answers).contenders
    assert (qlm.median, [found.seed for found in qlm.found]) == (Crossing(at=8.0), [0, 1, 2])


def test_rivals_are_all_other_policies_that_know_no_more() -> None:
    suite = gpus(Setting(policy="", workload=WORKLOAD), "a")
    of_ours, of_aegaeon = ({each.policy for each in suite.rivals_of(policy)} for policy in (OURS, "aegaeon"))
    assert of_ours == {each.policy for each in suite.contenders if each.rival}
    assert of_aegaeon == (of_ours | {OURS}) - {"aegaeon"}
    assert not any("oracle" in policy for policy in of_ours | of_aegaeon)
