"""The printed table: what scripts that read `vllm bench serve` find in it."""

from typing import Any

from bench.serve.table import table

FIGURES: dict[str, Any] = {
    "completed": 10,
    "failed": 0,
    "total_input_tokens": 1369,
    "total_output_tokens": 2212,
    "request_throughput": 1.731,
    "request_goodput": None,
    "output_throughput": 382.891,
    "total_token_throughput": 619.851,
    "max_output_tokens_per_s": 400.0,
    "max_concurrent_requests": 9,
    "slo_attainment": 0.5,
    "mean_ttft_ms": 71.544,
    "median_ttft_ms": 73.881,
    "std_ttft_ms": 5.0,
    "p99_ttft_ms": 79.491,
}
RESULT: dict[str, Any] = {
    "max_concurrency": None,
    "request_rate": "inf",
    "duration": 5.779,
    "slo": {"ttft_s": 10.0, "tbt_s": 0.1},
    "mean_lateness_ms": 0.25,
    "max_lateness_ms": 1.5,
    "failures": {},
    "per_model": {"m": FIGURES},
} | FIGURES


def test_the_table_is_vllms_and_then_ours() -> None:
    lines = list(table(RESULT))
    assert lines == [
        "============ Serving Benchmark Result ============",
        "Successful requests:                     10        ",
        "Failed requests:                         0         ",
        "Benchmark duration (s):                  5.78      ",
        "Total input tokens:                      1369      ",
        "Total generated tokens:                  2212      ",
        "Request throughput (req/s):              1.73      ",
        "Output token throughput (tok/s):         382.89    ",
        "Peak output token throughput (tok/s):    400.00    ",
        "Peak concurrent requests:                9.00      ",
        "Total token throughput (tok/s):          619.85    ",
        "---------------Time to First Token----------------",
        "Mean TTFT (ms):                          71.54     ",
        "Median TTFT (ms):                        73.88     ",
        "P99 TTFT (ms):                           79.49     ",
        "------------------SLO Attainment------------------",
        "Tokens on time (%):                      50.00     ",
        "TTFT SLO (s):                            10.00     ",
        "TBT SLO (s):                             0.10      ",
        "----------------------Client----------------------",
        "Mean lateness (ms):                      0.25      ",
        "Max lateness (ms):                       1.50      ",
        "==================================================",
    ]


def test_what_was_set_is_told() -> None:
    changed = RESULT | {"max_concurrency": 8, "request_rate": 2.0, "request_goodput": 1.5}
    added = [line for line in table(changed) if line not in set(table(RESULT))]
    assert added == [
        "Maximum request concurrency:             8         ",
        "Request rate configured (RPS):           2.00      ",
        "Request goodput (req/s):                 1.50      ",
    ]


def test_each_reason_is_one_line_and_the_most_frequent_first() -> None:
    failures = {f"reason {number}": number for number in range(1, 13)}
    lines = list(table(RESULT | {"failures": failures}))
    first = lines.index("     12 reason 12")
    assert lines[first + 9 : first + 11] == ["      3 reason 3", "      3 for 2 other reasons"]


def test_many_models_are_a_line_each() -> None:
    lines = list(table(RESULT | {"per_model": {"a": FIGURES, "bcd": FIGURES}}))
    assert lines[-4:-1] == [
        "model      done    failed     tok/s      TTFT   on time",
        "a            10         0    382.89     71.54     50.0%",
        "bcd          10         0    382.89     71.54     50.0%",
    ]
    some = list(table(RESULT | {"per_model": {f"m{index:03d}": FIGURES for index in range(103)}}))
    assert some[-2] == "and 3 more; --json FILE has them all"
