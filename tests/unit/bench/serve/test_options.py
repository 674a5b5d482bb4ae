"""From the command line to the settings of a run."""

import inspect
from math import inf
from pathlib import Path
from typing import Any

import pytest

from aegis.admin_client import DEFAULT_URL
from aegis.core.errors import UserError
from aegis.core.model import Slo
from bench.serve.command import serve
from bench.serve.datasets import Dataset
from bench.serve.options import parse_goodput, settings_of
from bench.serve.results import Measures
from bench.serve.settings import Settings

DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(serve).parameters.items()} | {
    "base_url": DEFAULT_URL
}

OF_A_DATA_SET = {
    name.replace("_", "-"): {"workload": "poisson", name: value}
    for name, value in {
        "dataset_name": "random",
        "dataset_path": Path("sharegpt.json"),
        "random_input_len": 1024,
        "random_output_len": 64,
        "random_range_ratio": 0.0,
        "sharegpt_output_len": 64,
        "custom_output_len": 256,
        "burstiness": 1.0,
    }.items()
}
TIMED = {"dataset_name": "timed_trace", "dataset_path": Path("t.jsonl")}


def settings(**given: Any) -> Settings:
    return settings_of(DEFAULTS | given)


def test_without_options_the_defaults_hold() -> None:
    measures = Measures(goodput={}, metrics=["ttft", "tpot", "itl"], percentiles=[99])
    assert settings() == Settings(measures=measures, files=[])


def test_options_are_read() -> None:
    read = settings(
        slo="ttft=1,tbt=0.5",
        goodput=["ttft:500,tpot:50", "e2el:9"],
        percentile_metrics="e2el",
        metric_percentiles="50,99.9",
        request_rate=3.0,
        extra_body='{"temperature": 0}',
        json=Path("a.json"),
        save_result=True,
        result_dir=Path("results"),
        result_filename="b.json",
    )
    goodput = {"ttft": 500, "tpot": 50, "e2el": 9}
    assert read.measures == Measures(Slo(10**9, 5 * 10**8), goodput, ["e2el"], [50, 99.9])
    assert (read.request_rate, read.extra_body) == (3.0, {"temperature": 0})
    assert read.files == [Path("a.json"), Path("results/b.json")]
    assert read.directory == Path("results")
    assert settings(result_dir=Path("results")).directory is None


def test_a_file_is_named_as_vllm_names_it() -> None:
    (file,) = settings(save_result=True, model=["org/name"], request_rate=2.5, max_concurrency=4).files
    assert str(file).startswith("openai-2.5qps-concurrency4-name-")
    (file,) = settings(save_result=True, endpoint="/v1/chat/completions", label=None).files
    assert str(file).startswith("openai-chat-infqps-all-")


def test_answers_are_whole_where_their_lengths_are_given() -> None:
    assert not settings().whole_answers
    assert settings(trace=Path("t.csv")).whole_answers
    assert settings(workload="poisson").whole_answers
    assert not settings(workload="poisson", ignore_eos=False).whole_answers
    assert settings(ignore_eos=True).whole_answers


def test_a_timed_trace_is_a_trace() -> None:
    read = settings(dataset_name="timed_trace", dataset_path=Path("t.jsonl"), timed_trace_sec_multiplier=0.001)
    assert (read.trace, read.sec_multiplier, read.request_rate) == (Path("t.jsonl"), 0.001, inf)


def test_a_data_set_has_the_lengths_that_are_given() -> None:
    assert settings(random_input_len=64, custom_output_len=32).dataset == Dataset(
        random_input_len=64, custom_output_len=32
    )


def test_the_key_is_not_shown() -> None:
    assert "sk-secret" not in repr(settings(api_key="sk-secret"))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"base_url": "127.0.0.1:8000"}, "--base-url"),
        ({"base_url": "http://127.0.0.1:101951"}, "--base-url: 'http://127.0.0.1:101951' is no address of a server"),
        ({"endpoint": "/v1/embeddings"}, "--endpoint"),
        ({"workload": "poisson", "trace": Path("t.csv")}, "--workload and --trace are both given"),
        ({"workload": "poisson", "request_rate": 1.0}, "--request-rate is for data sets"),
        *((given, f"--{option} is for data sets") for option, given in OF_A_DATA_SET.items()),
        ({"trace": Path("t.csv"), "burstiness": 0.5}, "--burstiness is for data sets"),
        (TIMED | {"random_input_len": 64}, "--random-input-len is for data sets"),
        ({"workload": "poisson", "timed_trace_sec_multiplier": 0.001}, "--timed-trace-sec-multiplier is for traces"),
        ({"timed_trace_sec_multiplier": 0.001}, "--timed-trace-sec-multiplier is for traces"),
        ({"dataset_name": "timed_trace"}, "needs --dataset-path"),
        ({"dataset_name": "timed_trace", "dataset_path": Path("a"), "workload": "poisson"}, "is a trace itself"),
        ({"dataset_name": "timed_trace", "dataset_path": Path("a"), "trace": Path("b.csv")}, "is a trace itself"),
        ({"dataset_path": Path("sharegpt.json")}, "--dataset-path is of the data sets that are files"),
        ({"request_rate": 0.0}, "--request-rate must be a number, 1e-09 or more"),
        ({"request_rate": 1e-300}, "--request-rate must be a number, 1e-09 or more"),
        ({"request_rate": float("nan")}, "--request-rate must be a number, 1e-09 or more"),
        ({"burstiness": -1.0}, "--burstiness must be a number from 1e-09 to"),
        ({"burstiness": 1e-320}, "--burstiness must be a number from 1e-09 to"),
        ({"timeout": float("nan")}, "--timeout must be"),
        ({"timeout": inf}, "--timeout must be"),
        ({"burstiness": inf}, "--burstiness must be"),
        ({"percentile_metrics": "ttft,xyz"}, "--percentile-metrics: 'xyz'"),
        ({"metric_percentiles": "99,x"}, "--metric-percentiles: 'x'"),
        ({"metric_percentiles": "101"}, "beyond 100"),
        ({"extra_body": "[1]"}, "--extra-body"),
        ({"result_filename": "a.json"}, "needs --save-result"),
        ({"goodput": ["itl:5"]}, "--goodput: 'itl:5'"),
        ({"goodput": ["ttft"]}, "--goodput: ''"),
        ({"slo": "x"}, "--slo"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        settings(**given)


def test_limits_may_be_apart_as_vllm_has_them() -> None:
    assert parse_goodput(["ttft:5 tpot:6", "e2el:7"]) == parse_goodput(["ttft:5,tpot:6,e2el:7"])
