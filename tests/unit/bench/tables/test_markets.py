"""Tables of markets, from the results of their suites."""

import json
from pathlib import Path

import msgspec

from bench.simulate.cells.figures import CellFigures, ContenderFigures
from bench.simulate.cells.search import SearchResult
from bench.simulate.overload.figures import LoadFigures, Measured, OverloadCell
from bench.simulate.sweep import Crossing
from bench.simulate.tuning import Tuned
from bench.tables.markets import cells, overload, overload_rivals
from bench.tables.missed_bars import reason_of

HEAD = {"commit": "1234567", "date": "2025-06-01", "machine": "X, 2 cores", "code": "another"}


def contender(name: str, at: Crossing, *, seeds: int = 3) -> ContenderFigures:
    return ContenderFigures(name, at, [SearchResult(seed, at, ()) for seed in range(seeds)])


def test_what_was_found_in_each_cell_is_one_table(tmp_path: Path) -> None:
    everybody = [
        contender("least-slack", Crossing(at=163.21)),
        contender("least-slack, undivided", Crossing(at=120.4), seeds=1),
        contender("least-slack 6+10", Crossing(at=101.0)),
        contender("serverlessllm", Crossing(at=95.0), seeds=1),
        contender("qlm", Crossing(above=96)),
    ]
    found = [
        CellFigures("0.1rps/slo1/ix2", {}, everybody, "qlm", 1.7001),
        CellFigures("0.5rps/slo1/ix2", {}, everybody[:1], None, None),
        CellFigures("0.5rps/slo1/ox2", {}, everybody, "qlm", 1.149),
    ]
    content = {"measured": HEAD, "title": "Models on GPUs", "cells": msgspec.to_builtins(found)}
    (tmp_path / "cells.json").write_text(json.dumps(content))
    lines = cells(tmp_path).splitlines()
    assert lines[0] == "**Models on GPUs** (2025-06-01, X, 2 cores, commit 1234567; code changed since), seeds: 1 to 3"
    assert lines[4:6] == [
        "| 0.1rps/slo1/ix2 | 163 | 120 | 101 | > 96 | `qlm` | 1.70 |",
        "| 0.5rps/slo1/ix2 | 163 |  |  |  |  |  |",
    ]
    assert "| `qlm` | 1.1490 **missed**, at least 1.15: not explained |" in lines[6]
    assert lines[-1] == "least-slack: at least the best rival in 2 of 2, 1.42 times it in the median"
    (tmp_path / "cells.json").write_text(json.dumps(content | {"cells": msgspec.to_builtins(found[1:])}))
    assert "1.15 times it in the median; the median **missed** 1.4: not explained" in cells(tmp_path)


def test_what_a_rival_is_tuned_to_is_beside_it(tmp_path: Path) -> None:
    parameters: dict[str, int | float] = {"prefill_share": 0.1875, "max_batch": 128}
    tuned = SearchResult(0, Crossing(at=96), (), Tuned(parameters, ()))
    rival = ContenderFigures("aegaeon", Crossing(at=96), [tuned])
    cell = CellFigures("0.1rps/slo1/ix2", {"mixed": 16}, [rival], "aegaeon", None)
    content = {"measured": HEAD, "title": "Models on GPUs", "cells": msgspec.to_builtins([cell])}
    (tmp_path / "cells.json").write_text(json.dumps(content))
    assert "| 96 | `aegaeon` (3+13, batches of 128) |" in cells(tmp_path)


def test_what_is_on_time_under_too_much_load_is_one_table(tmp_path: Path) -> None:
    assert overload(tmp_path).startswith("Nothing has been measured yet")
    ours, theirs = (LoadFigures(9, 0, share, 1000 * share, 1.0, 5.0, 9.0, 70, 0.5, 600.0) for share in (0.75, 0.5))
    measured = [
        Measured("least-slack", False, ours),
        Measured("least-slack, undivided", False, theirs),
        Measured("aegaeon", True, theirs, Tuned({"prefill_share": 0.25, "q_max_s": 8}, ())),
        Measured("least-slack, refusing", False, msgspec.structs.replace(theirs, on_time=0.64, ttft_p99_ms=4.5)),
    ]
    found = [
        OverloadCell("arena/2gpus", {"mixed": 16}, 600, measured, "aegaeon", 1.5, 0.8),
        OverloadCell("arena/3gpus", {"mixed": 3}, 600, measured[:1], None, None, None),
        OverloadCell("poisson-0.1rps/x4", {"mixed": 16}, 600, measured, "aegaeon", 1.5, 2.04),
        OverloadCell("poisson-0.5rps/x4", {"mixed": 16}, 600, measured, "aegaeon", 0.9751, 0.5),
    ]
    content = {"measured": HEAD, "title": "On time", "summary": "all told", "cells": msgspec.to_builtins(found)}
    (tmp_path / "overload.json").write_text(json.dumps(content))
    lines, rival = overload(tmp_path).splitlines(), "`aegaeon` (4+12, Q_MAX 8 s)"
    assert lines[0] == "**On time** (2025-06-01, X, 2 cores, commit 1234567; code changed since)"
    assert lines[4:6] == [
        f"| arena/2gpus | 75.0 | 750 | 50.0 | 50.0 | {rival} | 1.50 | 0.80 | 64.0 | 0.50 | 70 | 50 |",
        "| arena/3gpus | 75.0 | 750 |  |  |  |  |  |  |  | 70 | 50 |",
    ]
    assert "| 2.04 **missed**, at most 2: batches put off wait" in lines[6]
    assert "| 0.975 **missed**, at least 0.98: not explained | 0.50 |" in lines[7]
    assert lines[-1] == "all told"
    heads, _, *rows = (row.split("|") for row in overload_rivals(tmp_path).splitlines())
    columns = [heads.index(f" `{name}` ") for name in ("aegaeon", "qlm")]
    assert [[row[at].strip() for at in columns] for row in rows] == [["50.0", ""], ["", ""], ["50.0", ""], ["50.0", ""]]
    (tmp_path / "overload.json").write_text(json.dumps(content | {"cells": msgspec.to_builtins(found[3:])}))
    assert overload(tmp_path).endswith(f"all told **missed**: {reason_of('overload: median')}")


def test_cells_that_nobody_searched_are_said_to_be_none(tmp_path: Path) -> None:
    assert cells(tmp_path).startswith("Nothing has been searched for yet")
