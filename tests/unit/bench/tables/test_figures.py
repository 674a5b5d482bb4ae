"""The tables of the papers' figures, from files written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.tables.figures import ends, figure, fragmentation, prism, stages, switch_times, switches, utilisation

HEAD = {"title": "A figure", "form": "shares", "claims": []}


def cell(contender: str, at: float, result: dict[str, Any], panel: str = "p") -> dict[str, Any]:
    return {"panel": panel, "title": "bursts", "key": "load", "at": at, "contender": contender, "result": result}


def write(directory: Path, name: str, **content: Any) -> None:
    (directory / f"{name}.json").write_text(json.dumps(HEAD | content), encoding="utf-8")


def test_without_files_nothing_is_said_to_be_found(tmp_path: Path) -> None:
    for said in (prism(tmp_path), figure("fig7", switches, tmp_path)):
        assert said.startswith("Nothing has been simulated yet")


def test_shares_are_a_row_for_each_contender_and_claims_are_held_or_missed(tmp_path: Path) -> None:
    cells = [
        cell(name, at, {"ttft": share, "tpot": 0.5})
        for at in (1, 2)
        for name, share in (("prism", 0.991), ("qlm", 0.5 / at))
    ]
    claims = [
        {"says": "one", "found": "x", "held": True},
        {"says": "two", "found": "y", "held": False},
        {"says": "three", "found": "z", "held": None},
    ]
    write(tmp_path, "prism_fig5", cells=cells, claims=claims)
    lines = prism(tmp_path).splitlines()
    assert "| p: bursts | load 1 | load 2 |" in lines
    assert "| `prism` | 99.1 / 50 | 99.1 / 50 |" in lines and "| `qlm` | 50.0 / 50 | 25.0 / 50 |" in lines
    assert "| one | x | held |" in lines and "| two | y | **missed**: not explained |" in lines
    assert "| three | z | cannot be told |" in lines


def test_time_lines_and_activations_have_tables_of_their_own(tmp_path: Path) -> None:
    line = {"every_s": 5, "tokens_per_s": [10.0, 30.0], "kv_ktokens": [0.0, 1.0], "came": [[1, 2]]}
    write(tmp_path, "prism_fig6", form="timeline", cells=[cell("prism", 1, line)])
    load = {"weights_gb": 2.5, "load_s": 0.05, "first_token_s": 0.06}
    write(tmp_path, "prism_fig10", form="activation", cells=[cell("llama-3.2-1b", 1, load)])
    lines = prism(tmp_path).splitlines()
    assert "| `prism` | 20 | 30 | 10 |" in lines and "| llama-3.2-1b | 2.5 | 0.05 | 0.06 |" in lines


def test_switches_and_utilisation_have_a_row_for_each_panel(tmp_path: Path) -> None:
    points = [{"at": at, "figures": {"attainment": share}} for at, share in ((8, 1.0), (24, 0.5))]
    curve = {"policy": "aegaeon", "points": points, "crossing": {"at": 11.2}}
    write(tmp_path, "fig7", panels=[{"title": "T0", "curves": [curve]}])
    said = figure("fig7", switches, tmp_path)
    assert said.startswith("**A figure** (unknown day") and "| T0 | 11.2 | 100, 50 |" in said.splitlines()
    result = {"gpus": 16, "lowest": 0.1, "highest": 0.9, "mean": 0.5, "by_minute": [0.5], "attainment": 1.0}
    panels = [{"title": "after", "result": result}]
    assert "| after | 16 | 10.0 | 90.0 | 50.0 | 100.0 |" in utilisation(panels).splitlines()


def test_ends_have_a_column_for_each_panel() -> None:
    panels = [
        {"title": title, "curves": [{"policy": "qlm", "crossing": end}, {"policy": "aegaeon", "crossing": {"at": 7}}]}
        for title, end in (("strict", {"at": 8.49}), ("loose", {"above": 12.0}))
    ]
    assert ends(panels).splitlines()[2:] == ["| `qlm` | 8.49 | > 12 |", "| `aegaeon` | 7 | 7 |"]


def test_stages_switches_and_waste_have_a_row_for_each_panel() -> None:
    shares = {"prefill_wait": 0.08, "prefill": 0.01, "decode_wait": 0.1, "decode": 0.8, "kv_copies": 0.007}
    panel = {"title": "24 models", "result": {**shares, "messages": 0.003, "mean_s": 3.67}}
    assert "| 24 models | 8.0 | 1.0 | 10.0 | 80.0 | 0.7 | 0.3 | 3.7 |" in stages([panel]).splitlines()
    switches_to = {"qwen2.5-7b": {"count": 9, "cdf_ms": list(range(1, 101))}}
    panel = {"title": "64 models", "result": {"switches": switches_to}}
    assert "| 64 models | qwen2.5-7b | 9 | 25 | 50 | 75 | 99 |" in switch_times([panel]).splitlines()
    panel = {"title": "1 GiB", "result": {"shapes": {"all": {"of_held": 0.7, "of_peak": 0.329}}}}
    assert "| 1 GiB | 32.9 |" in fragmentation([panel]).splitlines()
