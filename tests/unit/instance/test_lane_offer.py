"""What an instance offers its core, and what its log says where it cannot offer what was asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing

import msgspec
import pytest

from aegis.control.settings import BusSettings
from aegis.core.estimators import Hardware
from aegis.core.ids import InstanceId
from aegis.core.role import LaneCount, Role
from aegis.device.cpu.device import CpuDevice
from aegis.device.cpu.pool import CpuPool
from aegis.device.divisions import WHOLE
from aegis.device.shared_events import SharedWords
from aegis.instance.lane_offer import lane_shares
from aegis.instance.settings import InstanceSettings
from tests.unit.device.cuda_parts import Rig


@pytest.fixture
def pool() -> Iterator[CpuPool]:
    pool = CpuPool(8 << 20)
    yield pool
    pool.close()


def settings(lanes: LaneCount, **others: object) -> InstanceSettings:
    made = InstanceSettings(
        instance=InstanceId("mixed-0"),
        incarnation=1,
        role=Role.MIXED,
        address="",
        words_path="",
        words=(),
        host_kv_path="",
        images_path="",
        device="cpu",
        device_address="",
        slab_bytes=0,
        host_slabs=0,
        instances=1,
        bus=BusSettings(address="", cluster="", prefix=""),
        policy="least-slack",
        memory_bytes=0,
        max_group_size=8,
        q_max_ns=0,
        switching_share=0.0,
        hardware=Hardware(),
        lanes=lanes,
    )
    return msgspec.structs.replace(made, **others)


def offered(pool: CpuPool, threads: int, asked: InstanceSettings) -> tuple[tuple[int, ...], ...]:
    words = SharedWords.create(8)
    device = CpuDevice(pool.address, words, threads=threads)
    shares = lane_shares(asked, device)
    device.close()
    words.close()
    return shares


def test_lanes_are_offered_where_they_are_asked_for(pool: CpuPool, caplog: pytest.LogCaptureFixture) -> None:
    assert offered(pool, 2, settings("2")) == (WHOLE, (500, 500))
    assert offered(pool, 2, settings("auto")) == (WHOLE, (500, 500))
    assert offered(pool, 2, settings("off")) == (WHOLE,)
    assert offered(pool, 1, settings("auto"))[1] == (97, 903), "one thread shares the time of its cores out"
    assert offered(pool, 1, settings("off")) == (WHOLE,)
    assert not caplog.records, "nobody asked for what there is not"


def test_a_gpu_is_divided_unless_asked_where_an_instance_has_it_alone() -> None:
    with closing(SharedWords.create(8)) as words, closing(Rig(words)) as rig:
        device = rig.open()
        divided = device.partitions()
        assert len(divided) > 1
        assert lane_shares(settings("auto"), device) == divided
        assert lane_shares(settings("auto", on_device=2), device) == (WHOLE,)
        assert lane_shares(settings("2", on_device=2), device) == divided
        assert lane_shares(settings("off"), device) == (WHOLE,)


@pytest.mark.parametrize(
    ("threads", "others", "why"),
    [
        (2, {"policy": "serverlessllm"}, "the policy 'serverlessllm' runs one step at a time"),
        (2, {"ranks": 2}, "the ranks of an instance run the same steps"),
        (2, {"engine": "vllm"}, "vLLM runs one step at a time"),
        (2, {"role": Role.PREFILL}, "a prefill instance runs one prompt at a time"),
    ],
)
def test_where_they_cannot_be_had_one_line_says_why_and_there_are_none(
    pool: CpuPool, caplog: pytest.LogCaptureFixture, threads: int, others: dict[str, object], why: str
) -> None:
    caplog.set_level(logging.INFO)
    assert offered(pool, threads, settings("2", **others)) == (WHOLE,)
    (line,) = caplog.records
    assert line.levelno == logging.WARNING
    assert why in str(vars(line))
