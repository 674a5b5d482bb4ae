"""`aegis bench figures`: what it runs, and what it says has changed."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aegis.cli.main import main
from bench.common.provenance import DEPENDENCIES
from bench.figures import suite
from bench.figures.suite import changed, names, said


def test_what_has_changed_is_counted_and_the_largest_is_named() -> None:
    before = {"measured": {"commit": "1"}, "a": 10, "b": [1.0, 2.0], "c": "x"}
    assert said(changed("fig", None, before)) == "fig: 4 figures, for the first time"
    assert said(changed("fig", before, before | {"measured": {"commit": "2"}})) == "fig: all 4 figures as before"
    more = changed("fig", before, before | {"a": 11, "b": [1.0, 2.5]})
    assert said(more) == "fig: 2 of 4 figures differ, most of all b/1 by 20 %"
    other = changed("fig", before, before | {"c": "y", "a": 11})
    assert said(other) == "fig: 2 of 4 figures differ, most of all c is another one"
    assert changed("fig", before, {"a": 10}).differ == 3


def test_all_figures_are_in_the_order_of_the_papers_and_may_be_results() -> None:
    assert names()[:2] == ("fig7", "fig11a") and names()[-1].startswith("mux-")
    assert {name.replace("-", "_") for name in names()} <= DEPENDENCIES.keys()


@pytest.fixture
def figures(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(*words: object) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["aegis", "bench", "figures", "--jobs", "1", *map(str, words)])
        with pytest.raises(SystemExit) as exit_:
            main()
        return exit_.value.code, *capsys.readouterr()

    return run


def test_a_file_is_made_anew_and_what_differs_is_said(figures: Any, tmp_path: Path) -> None:
    words = ("--tiny", "--only", "prism-fig10", "--into", tmp_path)
    code, out, _ = figures(*words)
    assert code == 0 and "figures, for the first time" in out
    file = tmp_path / "prism_fig10.json"
    whole = file.read_bytes()
    assert "figures as before" in figures(*words)[1] and file.read_bytes() == whole
    content = msgspec.json.decode(whole)
    content["cells"][0]["result"]["load_s"] *= 2
    file.write_bytes(msgspec.json.encode(content))
    assert "1 of " in figures(*words)[1] and file.read_bytes() == whole


def test_what_is_not_known_or_no_result_is_refused(figures: Any, tmp_path: Path) -> None:
    code, _, err = figures("--only", "fig99", "--into", tmp_path)
    assert code == 2 and "--only fig99: should be one of fig7, fig11a" in err
    code, _, err = figures("--tiny")
    assert code == 2 and "name a directory with --into" in err
    code, _, err = figures("--only", "fig15", "--into", tmp_path, "--trace-dir", tmp_path)
    assert code == 2 and "has no arena27.csv.gz" in err


def test_what_there_was_stays_while_it_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However that ends: also where nothing of Python runs any more."""
    kept = tmp_path / "fig15.json"
    kept.write_text("{}")
    held = []

    def ended(*_: object, **__: object) -> None:
        held.append(kept.read_text())
        raise KeyboardInterrupt

    monkeypatch.setattr(suite, "run", ended)
    with pytest.raises(KeyboardInterrupt):
        suite.renew("fig15", suite.Renewal(into=tmp_path, tiny=True))
    assert held == ["{}"] and kept.read_text() == "{}"
    assert [file.name for file in tmp_path.iterdir()] == ["fig15.json"]


def test_sigterm_leaves_no_directory_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "fig15.json"
    kept.write_text("{}")

    def ended(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)  # where that ends nothing

    monkeypatch.setattr(suite, "run", ended)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # else it would be the tests that end
    try:
        with pytest.raises(SystemExit):
            suite.renew("fig15", suite.Renewal(into=tmp_path, tiny=True))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert list(tmp_path.iterdir()) == [kept]
