"""From the options of `aegis bench serve` to the settings of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from math import inf, isfinite
from pathlib import Path
from typing import Any

import msgspec

from aegis.admin_client import check_address
from aegis.config.slo import parse_slo
from aegis.core.errors import UserError
from bench.serve.datasets import Dataset
from bench.serve.results import METRICS, Measures
from bench.serve.settings import Settings

_LIMITED = ("ttft", "tpot", "e2el")
_LEAST, _MOST = 1e-9, 1e9  # of an option that is a number

# The options of a data set, which a workload and a trace have no use for.
_WHICH = ("dataset_name", "dataset_path")
_LENGTHS = (
    "random_input_len",
    "random_output_len",
    "random_range_ratio",
    "sharegpt_output_len",
    "custom_output_len",
)
_TIMES = ("request_rate", "burstiness")


def settings_of(given: Mapping[str, Any]) -> Settings:
    """Raises UserError if options contradict each other or cannot be read."""
    trace, timed_trace = given["trace"], given["dataset_name"] == "timed_trace"
    if timed_trace:
        if given["dataset_path"] is None:
            raise UserError("--dataset-name timed_trace needs --dataset-path FILE")
        if trace is not None or given["workload"] is not None:
            raise UserError("--dataset-name timed_trace is a trace itself; leave out --workload and --trace")
        trace = given["dataset_path"]
    if trace is not None or given["workload"] is not None:
        _refuse_of_data_sets(given, (*(() if timed_trace else _WHICH), *_LENGTHS, *_TIMES))
    if given["dataset_name"] in (None, "random") and given["dataset_path"] is not None:
        raise UserError("--dataset-path is of the data sets that are files; name one by --dataset-name")
    if trace is None and given["timed_trace_sec_multiplier"] is not None:
        raise UserError("--timed-trace-sec-multiplier is for traces, whose rows have times")
    _check(given)
    return Settings(
        base_url=given["base_url"],
        endpoint=given["endpoint"],
        api_key=given["api_key"] or None,
        models=given["model"] or (),
        map=given["map"],
        workload=given["workload"],
        trace=trace,
        sec_multiplier=1.0 if given["timed_trace_sec_multiplier"] is None else given["timed_trace_sec_multiplier"],
        dataset=_dataset(given),
        num_prompts=given["num_prompts"],
        request_rate=inf if given["request_rate"] is None else given["request_rate"],
        burstiness=1.0 if given["burstiness"] is None else given["burstiness"],
        max_concurrency=given["max_concurrency"],
        seed=given["seed"],
        ignore_eos=given["ignore_eos"],
        prompt_as=given["prompt_as"],
        extra_body=_object("--extra-body", given["extra_body"] or "{}"),
        silence_s=given["timeout"],
        label=given["label"],
        measures=_measures(given),
        directory=given["result_dir"] if given["save_result"] else None,
        files=_files(given),
        records=given["records"],
    )


def parse_goodput(texts: Sequence[str]) -> dict[str, float]:
    """Limits in ms by metric, of `ttft:500,tpot:50` and the like. Raises UserError."""
    limits = {}
    for part in (part for text in texts for part in text.replace(",", " ").split()):
        name, _, value = part.partition(":")
        if name not in _LIMITED:
            raise UserError(f"--goodput: {part!r} is none of {', '.join(_LIMITED)} with a limit, like ttft:500")
        limits[name] = _number("--goodput", value)
    return limits


def _refuse_of_data_sets(given: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in names:
        if given[name] is not None:
            raise UserError(
                f"{_option(name)} is for data sets; a workload and a trace have times and lengths of their own"
            )


def _check(given: Mapping[str, Any]) -> None:
    check_address(given["base_url"], "--base-url")
    if not given["endpoint"].startswith("/") or not given["endpoint"].endswith("/completions"):
        raise UserError(f"--endpoint: {given['endpoint']!r} is neither /v1/completions nor /v1/chat/completions")
    if given["workload"] is not None and given["trace"] is not None:
        raise UserError("--workload and --trace are both given; the requests are those of one of them")
    if given["request_rate"] is not None and not given["request_rate"] >= _LEAST:
        raise UserError(f"--request-rate must be a number, {_LEAST:g} or more")
    for option in ("burstiness", "timeout", "timed_trace_sec_multiplier"):
        if given[option] is not None and not _LEAST <= given[option] <= _MOST:
            raise UserError(f"{_option(option)} must be a number from {_LEAST:g} to {_MOST:g}")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _dataset(given: Mapping[str, Any]) -> Dataset:
    said = {name: given[name] for name in _LENGTHS if given[name] is not None}
    return Dataset(name=given["dataset_name"] or "random", path=given["dataset_path"], **said)


def _measures(given: Mapping[str, Any]) -> Measures:
    metrics = given["percentile_metrics"].split(",")
    for metric in metrics:
        if metric not in METRICS:
            raise UserError(f"--percentile-metrics: {metric!r} is none of {', '.join(METRICS)}")
    percentiles = [_number("--metric-percentiles", text) for text in given["metric_percentiles"].split(",")]
    if max(percentiles) > 100:
        raise UserError("--metric-percentiles: there is none beyond 100")
    return Measures(
        slo=parse_slo(given["slo"]),
        goodput=parse_goodput(given["goodput"] or ()),
        metrics=metrics,
        percentiles=percentiles,
    )


def _files(given: Mapping[str, Any]) -> list[Path]:
    files = [given["json"]] if given["json"] is not None else []
    if given["save_result"]:
        files.append(given["result_dir"] / (given["result_filename"] or _filename(given)))
    elif given["result_filename"] is not None:
        raise UserError("--result-filename needs --save-result; --json FILE writes a file by itself")
    return files


def _filename(given: Mapping[str, Any]) -> str:
    """The name of the results file, as vLLM names its own."""
    backend = "openai-chat" if given["endpoint"].endswith("/chat/completions") else "openai"
    rate = "inf" if given["request_rate"] is None else given["request_rate"]
    width = f"-concurrency{given['max_concurrency']}" if given["max_concurrency"] else ""
    model = given["model"][0].split("/")[-1] if given["model"] else "all"
    date = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return f"{given['label'] or backend}-{rate}qps{width}-{model}-{date}.json"


def _number(option: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not (isfinite(number) and number >= 0):
        raise UserError(f"{option}: {text!r} is no number of at least 0")
    return number


def _object(option: str, text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        raise UserError(f"{option}: {text!r} is no JSON object") from None
