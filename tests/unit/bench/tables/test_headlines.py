"""The README's table."""

import json
from pathlib import Path

from bench.tables.headlines import headlines


def test_what_has_a_result_has_a_row(tmp_path: Path) -> None:
    cells = [
        {"ratio": ratio, "contenders": [{"contender": "least-slack, undivided"}, {"contender": f"{rival} 6+10"}]}
        for ratio, rival in ((1.5, "b"), (1.25, "a"), (None, "c"), (2.0, "a"))
    ]
    (tmp_path / "cells.json").write_text(json.dumps({"cells": cells}))
    rounds = [{"whole": {"added_p50_ms": each}} for each in (3.0, 1.0, 2.0)]
    (tmp_path / "proxy.json").write_text(json.dumps({"aegis_rounds": rounds, "litellm_rounds": rounds[:1]}))
    assert headlines(tmp_path).splitlines()[2:] == [
        "| models that 16 GPUs serve with 90 % of tokens on time, in 3 markets, simulated "
        "| 1.25 to 2.00 × as many, 1.50 × in the median | the best measured in each, tuned, of `a`, `b`, `c` |",
        "| what the proxy adds to a request, median | 2.0 ms | LiteLLM 3.0 ms |",
    ]


def test_loads_up_to_the_one_that_is_judged_are_told_and_nobody_is_left_out(tmp_path: Path) -> None:
    runs = [
        {"contender": name, "factor": factor, "saw": {"good_tokens_per_s": factor * good}}
        for name, good in (("least-slack", 200.0), ("least-slack, refusing", 150.0), ("x", 300.0))
        for factor in (0.5, 1.0, 2.0, 4.0, 8.0)
    ]
    (tmp_path / "overload_live.json").write_text(json.dumps({"runs": runs}))
    assert headlines(tmp_path).splitlines()[2:] == [
        "| tokens/s on time at 1, 2 and 4 times what two instances can do, live, on 2 cores "
        "| 200, 400, 800 | `x` 300, 600, 1200 |"
    ]
