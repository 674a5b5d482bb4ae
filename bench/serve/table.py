"""A run's figures as text: first as `vllm bench serve` prints them, line for line, then what that lacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bench.serve.results import METRICS

_WIDTH = 50
_TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
_REASONS_MAX = 10
_MODELS_MAX = 100


def table(result: Mapping[str, Any]) -> Iterator[str]:
    """Line by line, from the content of a results file."""
    yield f"{' Serving Benchmark Result ':=^{_WIDTH}}"
    yield from _totals(result)
    for metric in METRICS:
        yield from _spread(metric, result)
    yield f"{'SLO Attainment':-^{_WIDTH}}"
    yield _row("Tokens on time (%):", 100 * result["slo_attainment"])
    yield _row("TTFT SLO (s):", result["slo"]["ttft_s"])
    yield _row("TBT SLO (s):", result["slo"]["tbt_s"])
    yield f"{'Client':-^{_WIDTH}}"
    yield _row("Mean lateness (ms):", result["mean_lateness_ms"])
    yield _row("Max lateness (ms):", result["max_lateness_ms"])
    yield from _failures(result["failures"])
    yield from _models(result["per_model"])
    yield "=" * _WIDTH


def _totals(result: Mapping[str, Any]) -> Iterator[str]:
    yield _row("Successful requests:", result["completed"])
    yield _row("Failed requests:", result["failed"])
    if result["max_concurrency"] is not None:
        yield _row("Maximum request concurrency:", result["max_concurrency"])
    if isinstance(result["request_rate"], float):
        yield _row("Request rate configured (RPS):", result["request_rate"])
    yield _row("Benchmark duration (s):", result["duration"])
    yield _row("Total input tokens:", result["total_input_tokens"])
    yield _row("Total generated tokens:", result["total_output_tokens"])
    yield _row("Request throughput (req/s):", result["request_throughput"])
    if result["request_goodput"] is not None:
        yield _row("Request goodput (req/s):", result["request_goodput"])
    yield _row("Output token throughput (tok/s):", result["output_throughput"])
    yield _row("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"])
    yield _row("Peak concurrent requests:", float(result["max_concurrent_requests"]))
    yield _row("Total token throughput (tok/s):", result["total_token_throughput"])


def _spread(metric: str, result: Mapping[str, Any]) -> Iterator[str]:
    """Nothing, where the metric was not asked for."""
    short, title = _TITLES[metric]
    suffix = f"_{metric}_ms"
    told = [name.removesuffix(suffix) for name in result if name.endswith(suffix)]
    if not told:
        return
    yield f"{title:-^{_WIDTH}}"
    for name in told:
        if name != "std":
            yield _row(f"{name.capitalize()} {short} (ms):", result[name + suffix])


def _failures(failures: Mapping[str, int]) -> Iterator[str]:
    """Each reason on a line with how often it was one, the most frequent first."""
    if not failures:
        return
    yield f"{'Failures':-^{_WIDTH}}"
    counted = sorted(failures.items(), key=lambda entry: (-entry[1], entry[0]))
    for reason, count in counted[:_REASONS_MAX]:
        yield f"{count:>7} {reason}"
    if rest := counted[_REASONS_MAX:]:
        yield f"{sum(count for _, count in rest):>7} for {len(rest)} other reasons"


def _models(per_model: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A line for each, where there are many."""
    if len(per_model) < 2:
        return
    yield f"{'Per Model':-^{_WIDTH}}"
    columns = {"done": "completed", "failed": "failed", "tok/s": "output_throughput"}
    metrics = next(iter(per_model.values()))
    columns |= {_TITLES[metric][0]: f"mean_{metric}_ms" for metric in METRICS if f"mean_{metric}_ms" in metrics}
    name_width = max(map(len, ("model", *per_model)))
    titles = "".join(f"{title:>10}" for title in (*columns, "on time"))
    yield f"{'model':<{name_width}}{titles}"
    for model, figures in list(per_model.items())[:_MODELS_MAX]:
        cells = "".join(f"{_shown(figures[key]):>10}" for key in columns.values())
        yield f"{model:<{name_width}}{cells}{figures['slo_attainment']:>10.1%}"
    if len(per_model) > _MODELS_MAX:
        yield f"and {len(per_model) - _MODELS_MAX} more; --json FILE has them all"


def _row(label: str, value: float) -> str:
    return f"{label:<40} {_shown(value):<10}"


def _shown(value: float) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
