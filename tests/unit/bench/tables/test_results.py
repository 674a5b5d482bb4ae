"""Results files as tables."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.common.provenance import digest
from bench.tables.results import SUITES, crossings, files, goodput, results

DECODE: dict[str, Any] = {
    "checkpoint": "tiny",
    "dtype": "float32",
    "context": 128,
    "batch": 8,
    "aegis_tokens_per_s": 1234.6,
    "transformers_tokens_per_s": 400.0,
    "ratio": 3.0865,
    "times_one_sequence": 4.44,
}
FIGURE = {"name": "handed over", "value": 58.193, "unit": "ms", "wanted": "≤ 60", "ok": True}
HEAD = {"commit": "1234567", "date": "2025-06-01", "machine": "X, 2 cores", "code": "another"}
CELL = {"prompt_tokens": 7, "to": "same", "usual_gap_s": 0.0141, "longest_gap_s": 0.2, "p99_gap_s": 0.151}
CELL |= {"short_ttft_s": 0.0439, "long_ttft_s": 2.72, "alone_s": 2.0}
SIZE = {"nbytes": 64 << 20, "switch_ns": 12_340_000, "memcpy_ns": 11_000_000, "ratio": 1.1218, "prefetched_ns": 20_000}


@pytest.mark.parametrize(
    ("changes", "cell"),
    [
        ({}, "| ≤ 60 |"),
        ({"value": 61.0, "ok": False}, "| ≤ 60 **missed**: not explained |"),
        ({"wanted": "", "ok": None}, "|  |"),
    ],
)
def test_a_figure_that_misses_its_bar_is_marked(tmp_path: Path, changes: dict[str, Any], cell: str) -> None:
    (tmp_path / "memory.json").write_text(json.dumps({"measured": HEAD, "figures": [FIGURE | changes]}))
    assert results(tmp_path).endswith(cell)


def test_every_figure_that_missed_its_bar_is_explained() -> None:
    assert "not explained" not in results()


def test_no_results_are_said_to_be_none(tmp_path: Path) -> None:
    assert results(tmp_path).startswith("Nothing has been measured yet")


@pytest.mark.parametrize(
    ("suite", "content", "expected"),
    [
        (
            "decode",
            {"measured": HEAD | {"code": None}, "cases": [DECODE]},
            ["(2025-06-01, X, 2 cores, commit 1234567)", "| tiny | float32 | 128 | 8 | 1235 | 400 | 3.09 | 4.4 |"],
        ),
        (
            "switch",
            {"measured": HEAD, "sizes": [SIZE]},
            ["(2025-06-01, X, 2 cores, commit 1234567; code changed since)", "| 64MiB | 12.3 | 11.0 | 1.12 | 0.02 |"],
        ),
        (
            "interference",
            {"cells": [CELL]},
            ["| 7 tokens | of the stream | 14 | 200 | 151 **missed**: not explained | 44 | 2.72 | 1.36 **missed**:"],
        ),
        (
            "memory",
            {"figures": [FIGURE]},
            ["(unknown day, unknown machine, commit unknown)", "| handed over | 58.19 ms | ≤ 60 |"],
        ),
    ],
)
def test_a_case_is_a_row_and_the_machine_is_named(
    tmp_path: Path, suite: str, content: dict[str, Any], expected: list[str]
) -> None:
    head = content.get("measured", HEAD)
    if head["code"] is None:
        content = content | {"measured": head | {"code": digest(suite)}}
    (tmp_path / f"{suite}.json").write_text(json.dumps(content))
    table = results(tmp_path)
    assert all(part in table for part in expected)
    assert table.count("\n| ") == 3  # head, rule and row


def test_what_policies_serve_is_one_table(tmp_path: Path) -> None:
    many = [{"policy": "a", "crossing": {"at": 75.63}}, {"policy": "b", "crossing": {"above": 112}}]
    few = [{"policy": "a", "crossing": {"below": 16}}]
    for suite, title, curves in (("fig11a", "0.1 rps", many), ("fig11b", "0.5 rps", few)):
        (tmp_path / f"{suite}.json").write_text(
            json.dumps({"measured": HEAD, "panels": [{"title": title, "curves": curves}]})
        )
    lines = crossings(tmp_path).splitlines()
    assert lines[0] == "0.1 rps: 2025-06-01, X, 2 cores, commit 1234567; code changed since"
    assert lines[6:] == ["| `a` | 75.6 | < 16 |", "| `b` | > 112 |  |"]


def test_all_suites_with_results_are_shown(tmp_path: Path) -> None:
    empty: dict[str, Any] = {"measured": HEAD} | {suite.cases: [] for suite in SUITES.values()}
    for name, suite in SUITES.items():
        (tmp_path / f"{suite.file or name}.json").write_text(json.dumps(empty))
    assert results(tmp_path).count("**") == 2 * len(SUITES)


def test_every_file_is_a_row_that_says_whether_its_code_is_the_same(tmp_path: Path) -> None:
    heads = {"decode": HEAD | {"code": digest("decode")}, "switch": HEAD, "fidelity": None, "mine": HEAD}
    for name, head in heads.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"measured": head}))
    assert files(tmp_path).splitlines()[2:] == [
        "| `decode.json` | 2025-06-01 | X, 2 cores | 1234567 | unchanged |",
        "| `fidelity.json` | unknown day | unknown machine | unknown | unknown |",
        "| `mine.json` | 2025-06-01 | X, 2 cores | 1234567 | unknown |",
        "| `switch.json` | 2025-06-01 | X, 2 cores | 1234567 | changed since |",
    ]


def test_ratios_of_muxwise_are_missed_by_more_than_a_fifth_and_ours_by_any(tmp_path: Path) -> None:
    def found(contender: str, ratio: float, published: float | None, **more: float) -> dict[str, object]:
        at = {"ttft_p99_ms": 1500.0, "tbt_p99_ms": 40.2}
        result = {"contender": contender, "rps": 2.0, "muxwise_over_it": ratio, "published": published, "at": at}
        return result | more

    results = [
        found("muxwise", 1.0, None, ours_ttft_p99_ms=1950.0),
        found("muxwise, live", 1.1, None, rps=2.5, ours_ttft_p99_ms=2000.0),
        found("a", 1.5, 1.9, ours_ttft_p99_ms=9000.0),
        found("b", 1.6, 1.9),
        found("least-slack", 1.1, None),
        found("c", 3.0, None),
    ]
    content = {"title": "T", "panels": [{"panel": "p", "results": results}]}
    (tmp_path / "mux_x.json").write_text(json.dumps(content))
    table = goodput(tmp_path).replace("| p |", "|")
    assert "| `muxwise` | 2 | 1.00 |  | 1.50 | 1.95 | 40 |" in table
    assert "| 2.5 | 1.10 |  | 1.50 | 2.00 **missed**, at most 1.3 × its: not explained | 40 |" in table
    assert "| `a` | 2 | 1.50 | 1.9 **missed**: not explained | 1.50 | 9.00 | 40 |" in table
    assert "| `b` | 2 | 1.60 | 1.9 | 1.50 |  | 40 |" in table
    assert "| `least-slack` | 2 | 1.10 | at least 2.5 requests/s **missed**: not explained | 1.50 |  | 40 |" in table
    assert "| `c` | 2 | 3.00 |  | 1.50 |  | 40 |" in table
    assert "Nothing has been searched for yet" in goodput(tmp_path / "none")
