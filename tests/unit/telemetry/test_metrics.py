from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from aegis.core.clock import NS_PER_MS, NS_PER_S
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.messages import SlabsOfShape, SwitchDone, Telemetry
from aegis.core.model import Slo
from aegis.core.request import FinishReason
from aegis.telemetry.metrics import Metrics

M = ModelId("m")
R, R2 = RequestId(1), RequestId(2)
DECODE = InstanceId("decode-0")
SLO = Slo(ttft_ns=1000 * NS_PER_MS, tbt_ns=100 * NS_PER_MS)


def arrived(*requests: RequestId, max_tokens: int = 10, now_ns: int = 0) -> Metrics:
    metrics = Metrics()
    for request in requests:
        metrics.arrived(request, M, SLO, now_ns, prompt_tokens=7, max_tokens=max_tokens)
    return metrics


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"aegis:{name}", labels)


def of_model(metrics: Metrics, name: str, **labels: str) -> float | None:
    return value(metrics, name, model_name="m", **labels)


def queue(metrics: Metrics) -> tuple[float | None, float | None]:
    return of_model(metrics, "num_requests_waiting"), of_model(metrics, "num_requests_running")


def test_a_request_is_waiting_or_running_until_it_ends() -> None:
    metrics = arrived(R, R2)
    assert queue(metrics) == (2, 0)
    metrics.started(R, NS_PER_S)
    assert queue(metrics) == (1, 1)
    metrics.phase([R], running=False)
    assert queue(metrics) == (2, 0)
    metrics.phase([R], running=True)
    metrics.finished(R, FinishReason.STOP, 2 * NS_PER_S)
    assert queue(metrics) == (1, 0)
    metrics.cancelled(R2)
    assert queue(metrics) == (0, 0)
    assert of_model(metrics, "request_success_total", finished_reason="stop") == 1
    assert of_model(metrics, "request_failure_total", reason="cancelled") == 1


def test_times_are_those_of_the_request_s_life() -> None:
    metrics = arrived(R, now_ns=5 * NS_PER_S)
    metrics.started(R, 6 * NS_PER_S)
    metrics.token(R, 8 * NS_PER_S)
    metrics.token(R, 8 * NS_PER_S + 4 * NS_PER_MS)
    metrics.token(R, 9 * NS_PER_S)
    metrics.finished(R, FinishReason.LENGTH, 10 * NS_PER_S)
    sums = {
        "request_queue_time_seconds": 1,
        "request_prefill_time_seconds": 2,
        "time_to_first_token_seconds": 3,
        "inter_token_latency_seconds": 1,
        "request_time_per_output_token_seconds": 0.5,
        "e2e_request_latency_seconds": 5,
    }
    assert {name: of_model(metrics, f"{name}_sum") for name in sums} == sums
    assert of_model(metrics, "inter_token_latency_seconds_count") == 2
    assert of_model(metrics, "inter_token_latency_seconds_bucket", le="0.001") == 0
    assert of_model(metrics, "inter_token_latency_seconds_bucket", le="0.005") == 1
    assert of_model(metrics, "generation_tokens_total") == 3
    assert of_model(metrics, "prompt_tokens_total") == 7


def test_losing_a_turn_is_a_preemption_once() -> None:
    metrics = arrived(R)
    metrics.phase([R], running=True)
    metrics.phase([R, RequestId(99)], running=False)
    metrics.phase([R], running=False)
    assert of_model(metrics, "num_preemptions_total") == 1


def test_a_replayed_request_waits_again_and_is_not_a_new_one() -> None:
    metrics = arrived(R)
    metrics.started(R, 1)
    metrics.token(R, 2)
    metrics.replayed(R)
    assert queue(metrics) == (1, 0)
    metrics.started(R, 3)
    metrics.token(R, 4)
    metrics.finished(R, FinishReason.STOP, 5)
    assert of_model(metrics, "request_replays_total") == 1
    assert of_model(metrics, "request_queue_time_seconds_count") == 1
    assert of_model(metrics, "time_to_first_token_seconds_count") == 1


@given(st.lists(st.integers(0, 300), min_size=1, max_size=20), st.integers(0, 3000), st.booleans())
def test_attainment_is_the_share_of_tokens_on_time(gaps_ms: list[int], ttft_ms: int, fails: bool) -> None:
    metrics = arrived(R, max_tokens=30, now_ns=NS_PER_S)
    now_ms, met = 1000 + ttft_ms, 0
    for index, gap_ms in enumerate(gaps_ms):
        metrics.token(R, now_ms * NS_PER_MS)
        met += now_ms <= 1000 + 1000 + index * 100
        now_ms += gap_ms
    if fails:
        metrics.failed(R)
    due = 30 if fails else len(gaps_ms)
    assert of_model(metrics, "slo_attainment_ratio") == met / due
    assert of_model(metrics, "slo_tokens_total") == due


def test_a_cancelled_request_owes_nothing() -> None:
    metrics = arrived(R)
    metrics.token(R, 1)
    metrics.cancelled(R)
    assert of_model(metrics, "slo_attainment_ratio") == 1
    assert of_model(metrics, "slo_tokens_total") == 1


def test_switches_are_timed_by_phase() -> None:
    metrics = Metrics()
    metrics.switch(SwitchDone(M, True, 0, 2 * NS_PER_S, 1 * NS_PER_S, 5))
    metrics.switch(SwitchDone(M, False, 0, 4 * NS_PER_S, 0, 5))
    assert value(metrics, "model_switch_seconds_sum", phase="copy") == 6
    assert value(metrics, "model_switch_seconds_sum", phase="kv") == 1
    assert value(metrics, "model_switch_seconds_count", phase="make_room") == 2
    assert of_model(metrics, "model_switches_total", prefetched="true") == 1
    assert of_model(metrics, "model_switches_total", prefetched="false") == 1


def report(accounts: dict[str, int] | None = None, **counters: int) -> Telemetry:
    return Telemetry(M, (M,), 3, 2, {f"{name}_total": count for name, count in counters.items()}, accounts or {})


def test_counters_of_an_instance_go_on_over_its_restarts() -> None:
    metrics = Metrics()
    metrics.telemetry(DECODE, report(swap_in_bytes=10, swap_out_bytes=1, steps=5, engine_initialisations=1))
    metrics.telemetry(DECODE, report(swap_in_bytes=30, swap_out_bytes=1, steps=7, engine_initialisations=1))
    metrics.restarted(DECODE)
    metrics.telemetry(DECODE, report(swap_in_bytes=40, steps=1, engine_initialisations=1))
    assert value(metrics, "kv_swap_bytes_total", instance="decode-0", direction="in") == 70
    assert value(metrics, "kv_swap_bytes_total", instance="decode-0", direction="out") == 1
    assert value(metrics, "instance_steps_total", instance="decode-0") == 8
    assert value(metrics, "engine_initialisations_total", instance="decode-0") == 2
    assert value(metrics, "instance_restarts_total", instance="decode-0") == 1


def test_gauges_of_an_instance_are_those_of_now() -> None:
    metrics = Metrics()
    metrics.up(DECODE, True)
    metrics.telemetry(DECODE, report({"device_pages_free": 5}))
    metrics.telemetry(DECODE, report({"device_pages_free": 4}))
    assert value(metrics, "instance_up", instance="decode-0") == 1
    assert value(metrics, "memory_device_pages_free", instance="decode-0") == 4
    assert value(metrics, "instance_queued", instance="decode-0") == 3
    assert value(metrics, "instance_running", instance="decode-0") == 2
    metrics.restarted(DECODE)
    assert value(metrics, "instance_up", instance="decode-0") == 0
    assert value(metrics, "memory_device_pages_free", instance="decode-0") is None


def test_fragmentation_is_told_by_region() -> None:
    metrics = Metrics()
    slabs = SlabsOfShape(
        "device",
        (M,),
        slab_bytes=100,
        block_bytes=30,
        slabs=2,
        free_blocks=3,
        reserved_blocks=1,
        used_blocks=1,
        moving_blocks=1,
    )
    metrics.telemetry(DECODE, Telemetry(M, (M,), 0, 0, {}, {}, shapes=(slabs,)))
    ratio = "kv_slab_fragmentation_ratio"
    assert value(metrics, ratio, instance="decode-0", region="device") == 1 - 90 / 200
    assert value(metrics, ratio, instance="decode-0", region="host") == 0
    metrics.restarted(DECODE)
    assert value(metrics, ratio, instance="decode-0", region="device") is None


def test_everything_is_exposed_in_prometheus_text_once() -> None:
    metrics = arrived(R)
    metrics.telemetry(DECODE, report({"device_pages": 1}, steps=1))
    metrics.telemetry(InstanceId("prefill-0"), report({"device_pages": 2}, steps=1))
    lines = generate_latest(metrics.registry).decode().splitlines()
    samples = [line.rsplit(" ", 1)[0] for line in lines if not line.startswith("#")]
    assert len(samples) == len(set(samples))
    assert len([line for line in lines if line.startswith("# TYPE aegis:memory_device_pages ")]) == 1
    assert all(sample.startswith("aegis:") for sample in samples)
