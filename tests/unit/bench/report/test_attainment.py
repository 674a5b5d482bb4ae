"""A suite's own file in a report: curves, what was published beside them, and what a paper says in words."""

import re
from html import unescape
from pathlib import Path

import msgspec
from msgspec import structs

from aegis.telemetry import files
from bench.report.attainment import attainment, published
from bench.report.folder import read
from bench.simulate.references import CLAIMS, Comparison
from bench.simulate.suite_run import Choice, run
from bench.simulate.suites import SUITES, suite
from tests.unit.bench.report.made import record


def visible(html: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split())


def test_what_a_suite_writes_is_shown(tmp_path: Path) -> None:
    choice = Choice(policies=("aegaeon",), tiny=True)
    run(suite("fig13"), choice, json=tmp_path / "fig13.json", plot=tmp_path / "fig13.png")
    folder = read(tmp_path)
    told, drawn = visible(published(folder)), visible(attainment(folder))
    assert f"fig13 : {CLAIMS['fig13']}." in told
    assert folder.sweeps[0].beside
    for panel, sweep in zip(SUITES["fig13"].panels, folder.sweeps, strict=True):
        assert sweep.name == f"fig13: {panel.title}" and sweep.name in drawn
        assert f"policy 16 24 at 90% aegaeon 100.0 % 100.0 % {sweep.curves[0].crossing}" in drawn
        for each in sweep.beside:
            assert f"fig13: {panel.title} {each.policy} {each.ours} {each.theirs} – {each.source}" in told


def test_a_difference_is_told_with_its_sign(tmp_path: Path) -> None:
    beside = (Comparison("a", "80", "64", 25.0, "one"), Comparison("b", "60", "64", -6.2, "another"))
    panels = [{"title": "t", "key": "models", "curves": [], "beside": beside}]
    (tmp_path / "f.json").write_bytes(msgspec.json.encode({"suite": "f", "claim": None, "panels": panels}))
    told = visible(published(read(tmp_path)))
    assert "f: t a 80 64 +25.0 % one f: t b 60 64 -6.2 % another" in told
    assert "No published figures" not in told


def test_without_a_suite_the_section_says_what_writes_one(tmp_path: Path) -> None:
    (tmp_path / "f.json").write_bytes(msgspec.json.encode({"curves": []}))
    assert "No published figures of" in visible(published(read(tmp_path)))


def test_requests_that_asked_for_no_token_have_no_share_over_time(tmp_path: Path) -> None:
    nothing = structs.replace(record(1, 0, 5, 5), output_tokens=0, on_time=0)
    files.write(tmp_path / "a.records.jsonl", [nothing])
    assert "By time of arrival" not in visible(attainment(read(tmp_path)))
    files.write(tmp_path / "a.records.jsonl", [nothing, record(2, 1, 5, 9)])
    assert "By time of arrival" in visible(attainment(read(tmp_path)))
