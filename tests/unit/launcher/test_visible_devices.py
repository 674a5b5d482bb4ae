"""What the instances run on, where the configuration leaves it to the machine."""

from __future__ import annotations

from typing import Any

import pytest

from aegis.config.config import Config
from aegis.config.sources import load
from aegis.core.errors import UserError
from aegis.device.cuda.gpus import VisibleGpu
from aegis.launcher.visible_devices import counts_ignored, crowded, dealt, missing_cuda, on_this_machine, with_gpus

GIB = 1 << 30
TWO = (VisibleGpu(0, "H100", 80 * GIB, 79 * GIB), VisibleGpu(1, "H100", 80 * GIB, 60 * GIB))


def chosen(gpus: tuple[VisibleGpu, ...] = TWO, **options: Any) -> Config:
    return with_gpus(load(options, {}), gpus)


def test_gpus_are_used_where_there_are_any_all_of_them_with_nine_tenths_of_their_free_memory() -> None:
    config = chosen(mixed="4")
    assert (config.device, config.instances.devices, config.memory.device) == ("cuda", 2, 54 * GIB)
    assert dealt(config, TWO) == "4 instances on 2 of 2 GPUs (H100), up to 2 on each; 54GiB of each for weights and KV"
    assert dealt(chosen(mixed="2"), TWO).startswith("2 instances on 2 of 2 GPUs (H100), one on each;")


def test_what_is_said_stays() -> None:
    config = chosen(devices="1", device_memory="20GiB")
    assert (config.device, config.instances.devices, config.memory.device) == ("cuda", 1, 20 * GIB)
    assert chosen(device="cpu") == load({"device": "cpu"}, {})


def test_without_gpus_it_is_the_processor() -> None:
    config = chosen(())
    assert (config.device, config.instances.devices, config.memory.device) == ("cpu", 1, GIB)
    assert dealt(config, ()) == ""


def test_far_more_instances_than_processors_are_said_to_be_slow() -> None:
    many = load({"device": "cpu", "mixed": "12"}, {})
    assert crowded(many, 2) == (
        "12 processes of instances share 2 processors: while all are busy, steps take about 6 times as long; "
        "as many as there are processors waste nothing"
    )
    assert crowded(many, 6) == "" and crowded(load({"device": "cpu"}, {}), 1) == ""
    parallel = load({"device": "cpu", "mixed": "1", "tensor_parallel_size": "5"}, {})
    assert "5 processes of instances share 2 processors" in (line := crowded(parallel, 2)) and "2.5 times" in line
    assert crowded(load({"device": "cpu", "mixed": "12", "ray": "local"}, {}), 2) == ""
    assert crowded(chosen(mixed="12"), 2) == ""


def test_memory_that_nobody_tells_is_taken_as_free() -> None:
    assert chosen((VisibleGpu(0, "A10", 24 * GIB),)).memory.device == int(21.6 * GIB) // (2 << 20) * (2 << 20)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"devices": "3", "mixed": "3"}, "--devices 3: there are 2 GPUs; leave it out to use all"),
        ({"device_memory": "61GiB"}, "--device-memory 61GiB: a GPU has 60GiB free; leave it out, or say 54GiB at most"),
        (
            {"mixed": "40"},
            "20 instances on one GPU: each takes about 512MiB beside --device-memory 54GiB, so 12 fit; have 24 "
            "instances at most, or less --device-memory",
        ),
    ],
)
def test_more_than_there_is_is_refused_with_what_would_fit(options: dict[str, str], line: str) -> None:
    with pytest.raises(UserError) as raised:
        with_gpus(load(options, {}), TWO)
    assert raised.value.message == line


def test_cuda_that_is_asked_for_is_not_replaced_by_the_processor() -> None:
    assert on_this_machine(load({"device": "cpu"}, {})) == (load({"device": "cpu"}, {}), ())
    if missing_cuda():
        with pytest.raises(UserError, match=r"^--device cuda: "):
            on_this_machine(load({"device": "cuda"}, {}))


def test_counts_that_the_policy_does_not_keep_apart_are_said() -> None:
    apart = {"prefill": "6", "decode": "10"}
    assert counts_ignored(load(apart, {})) == ""
    assert counts_ignored(load({"mixed": "3"}, {})) == ""
    assert counts_ignored(load(apart | {"policy": "serverlessllm"}, {})).startswith(
        "all 16 instances prefill and decode"
    )
    assert counts_ignored(load(apart | {"policy": "serverlessllm", "roles": "fixed"}, {})) == ""
