"""Every suite in tiny form: what it writes, and that it writes the same again."""

import gzip
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aegis.core.errors import UserError
from aegis.policies import RECIPES
from bench.simulate import plot_files
from bench.simulate.suite_run import Choice, run
from bench.simulate.suites import SUITES, Form, suite
from tests.long_forms import first_of

TINY = Choice(policies=("aegaeon", "serverlessllm"), tiny=True)
SECTIONS = {
    Form.BREAKDOWN: {"prefill_wait", "prefill", "decode_wait", "decode", "kv_copies", "messages", "mean_s"},
    Form.SWITCHING: {"switches", "prefetched", "kv_copies"},
    Form.FRAGMENTATION: {"shapes"},
    Form.UTILISATION: {"gpus", "lowest", "highest", "mean", "by_minute", "attainment"},
}


def written(name: str, place: Path, choice: Choice = TINY) -> tuple[bytes, bytes]:
    run(suite(name), choice, json=place / "figure.json", plot=place / "figure.png")
    return (place / "figure.json").read_bytes(), (place / "figure.png").read_bytes()


@pytest.mark.parametrize("name", first_of(2, list(SUITES)))
def test_a_suite_writes_all_its_panels_and_a_plot(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json, plot = written(name, tmp_path)
    result = msgspec.json.decode(json)
    assert [panel["panel"] for panel in result["panels"]] == [panel.name for panel in SUITES[name].panels]
    for panel in result["panels"]:
        if SUITES[name].form is Form.CURVES:
            _check_curves(panel, SUITES[name].policies or TINY.policies)
        else:
            assert set(panel["result"]) == SECTIONS[SUITES[name].form]
    assert plot.startswith(b"\x89PNG")
    assert SUITES[name].title in capsys.readouterr().out
    assert written(name, tmp_path) == (json, plot)


def _check_curves(panel: dict[str, Any], policies: tuple[str, ...]) -> None:
    assert [curve["policy"] for curve in panel["curves"]] == list(policies)
    for curve in panel["curves"]:
        assert len(curve["points"]) == 2
        assert all(point["figures"]["requests"] > 0 for point in curve["points"])
        assert set(curve["crossing"]) <= {"at", "above", "below"}


@pytest.mark.long
def test_every_policy_runs_in_a_suite_in_several_processes_as_in_one(tmp_path: Path) -> None:
    alone = Choice(policies=tuple(RECIPES), tiny=True)
    beside = Choice(policies=tuple(RECIPES), tiny=True, jobs=2)
    assert written("fig11a", tmp_path, alone) == written("fig11a", tmp_path, beside)


def test_another_seed_makes_other_figures(tmp_path: Path) -> None:
    assert written("fig14", tmp_path)[0] != written("fig14", tmp_path, replace(TINY, seed=1))[0]


@pytest.mark.long
def test_policies_as_published_run_on_recorded_inputs(tmp_path: Path) -> None:
    header, row = "arrival_s,model,input_tokens,output_tokens\n", "{},m0,100,20\n"
    traces = tmp_path / "traces"
    traces.mkdir()
    (traces / "M16_rps0.10.csv.gz").write_bytes(gzip.compress((header + row.format(0.5)).encode()))
    choice = Choice(policies=("serverlessllm",), as_published=True, tiny=True, trace_dir=traces)
    result = msgspec.json.decode(written("fig11a", tmp_path, choice)[0])
    [point] = result["panels"][0]["curves"][0]["points"]
    assert (point["at"], point["figures"]["requests"]) == (16.0, 1)
    with pytest.raises(UserError, match="holds no file like"):
        written("fig11b", tmp_path, choice)


def test_panels_of_policies_of_their_own_and_of_costs_of_their_own(tmp_path: Path) -> None:
    before, after, ours = msgspec.json.decode(written("fig18", tmp_path)[0])["panels"]
    assert [panel["policy"] for panel in (before, after, ours)] == ["dedicated", "aegaeon", "least-slack"]
    assert (before["result"]["gpus"], after["result"]["gpus"]) == (47, 16)
    slow, fast = SUITES["fig7"].panels[0].setting, SUITES["fig7"].panels[-1].setting
    assert (slow.switch_ns, fast.switch_ns, dict(slow.rules), dict(fast.rules)) == (
        22_300_000_000,
        None,
        {"prefetches": False},
        {"prefetches": True},
    )
    with pytest.raises(UserError, match="--as-published is not of --suite fig18"):
        written("fig18", tmp_path, replace(TINY, as_published=True))


def test_an_unknown_suite_is_refused() -> None:
    with pytest.raises(UserError, match="--suite fig99: should be one of fig11a, "):
        suite("fig99")


def test_plots_are_files_of_two_kinds(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"should end in \.png or \.svg"):
        plot_files.check(tmp_path / "figure.pdf")
    for ending in ("svg", "png"):
        sheets = []
        for _ in range(2):
            figure, [axes] = plot_files.sheet(1)
            axes.plot([1, 2], [3, 4], label="line")
            plot_files.save(figure, tmp_path / f"figure.{ending}")
            assert [text.get_text() for text in figure.legends[0].get_texts()] == ["line"]
            sheets.append((tmp_path / f"figure.{ending}").read_bytes())
        assert sheets[0] == sheets[1]
