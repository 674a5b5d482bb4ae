"""Runs side by side."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis.core.errors import UserError
from bench.compare.runs import ratio, run, verdict

FIGURES = {
    "completed": 100,
    "duration": 10.0,
    "output_throughput": 50.0,
    "slo_attainment": 0.5,
    "mean_ttft_ms": 20.0,
    "std_ttft_ms": 3.0,
    "max_lateness_ms": 1.0,
    "failed": 0,
    "request_goodput": None,
}
RESULT = FIGURES | {"num_prompts": 100, "workload": "abc", "per_model": {"m": FIGURES}}


def saved(directory: Path, name: str, **changes: Any) -> Path:
    file = directory / name
    file.write_text(json.dumps(RESULT | changes))
    return file


def rows(printed: str) -> dict[str, list[str]]:
    return {cells[0]: cells[1:] for line in printed.splitlines() if (cells := line.split())}


def test_each_metric_has_its_ratio_and_its_direction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"output_throughput": 75.0, "mean_ttft_ms": 30.0, "failed": 2, "slo_attainment": 0.25, "duration": 9}
    run([saved(tmp_path, "a.json"), saved(tmp_path, "b.json", **changes)])
    assert rows(capsys.readouterr().out) == {
        "metric": ["a", "b", "ratio"],
        "completed": ["100", "100", "1.000", "same"],
        "duration": ["10", "9", "0.900", "better"],
        "output_throughput": ["50", "75", "1.500", "better"],
        "slo_attainment": ["0.5", "0.25", "0.500", "worse"],
        "mean_ttft_ms": ["20", "30", "1.500", "worse"],
        "failed": ["0", "2", "-", "worse"],
    }


def test_many_runs_and_each_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [saved(tmp_path, "a.json"), saved(tmp_path, "b.json"), saved(tmp_path, "c.json", per_model={"m": RESULT})]
    run(files, per_model=True)
    printed = capsys.readouterr().out
    assert printed.count("mean_ttft_ms") == 2
    assert rows(printed)["mean_ttft_ms"] == ["20", "20", "1.000", "same", "20", "1.000", "same"]
    assert "m" in rows(printed)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"workload": "xyz"}, 'workload is "abc" in the one and "xyz" in the other'),
        ({"num_prompts": 7}, "num_prompts is 100 in the one and 7 in the other"),
    ],
)
def test_other_workloads_are_not_compared(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        run([saved(tmp_path, "a.json"), saved(tmp_path, "b.json", **changes)])


def test_a_result_of_vllm_says_less_and_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = tmp_path / "vllm.json"
    kept = ("completed", "duration", "num_prompts", "mean_ttft_ms")
    theirs.write_text(json.dumps({name: RESULT[name] for name in kept}))
    run([theirs, saved(tmp_path, "b.json")], per_model=True)
    assert list(rows(capsys.readouterr().out)) == ["metric", "completed", "duration", "mean_ttft_ms"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "no JSON object"),
        ("{", "no JSON object"),
        ('{"duration": 1}', "it has no 'completed'"),
        ('{"completed": 1, "duration": 1, "num_prompts": 1, "per_model": {"m": 5}}', "'per_model' should be"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    other = tmp_path / "b.json"
    other.write_text(text)
    with pytest.raises(UserError, match=reason):
        run([saved(tmp_path, "a.json"), other])


def test_one_file_is_too_few_and_a_missing_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="two or more"):
        run([saved(tmp_path, "a.json")])
    with pytest.raises(UserError, match=r"none\.json: No such file"):
        run([saved(tmp_path, "a.json"), tmp_path / "none.json"])


def test_a_device_which_may_have_no_end_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "b.json").symlink_to("/dev/zero")
    with pytest.raises(UserError, match=r"b\.json: is no regular file or pipe$"):
        run([saved(tmp_path, "a.json"), tmp_path / "b.json"])


@given(
    st.sampled_from(["output_throughput", "mean_ttft_ms", "failed", "slo_attainment"]), st.floats(1, 9), st.floats(1, 9)
)
def test_what_is_better_one_way_is_worse_the_other(metric: str, before: float, after: float) -> None:
    turned = {"same": "same", "better": "worse", "worse": "better"}
    assert verdict(metric, after, before) == turned[verdict(metric, before, after)]
    assert (ratio(before, after) or 0) * (ratio(after, before) or 0) == pytest.approx(1)


@pytest.mark.parametrize("terminal", [True, False])
def test_no_figure_is_cut_off_where_there_are_many_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    names = [f"{'long' * 10}-{number}.json" for number in range(5)]
    run([saved(tmp_path, name) for name in names])
    printed = capsys.readouterr().out
    assert "…" not in printed
    figures = ["20", *["20", "1.000", "same"] * 4]
    assert [line.split()[1:] for line in printed.splitlines() if line.startswith("mean_")][-1] == figures
