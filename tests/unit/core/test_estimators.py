"""Latency estimates: the analytic bound before there is data, the truth of eq. 4-6 after."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis.core.estimators import Hardware, Latency, LinearFit, Prior, _decode_features, _prefill_features
from aegis.core.model import Manifest
from aegis.core.rng import Stream
from aegis.sim.faults.fake_models import make_shape

HARDWARE = Hardware()
FAST = Hardware(copy_bytes_per_s=2e12, memory_bytes_per_s=2e13, flops_per_s=5e15, overhead_ns=10_000)
SLOW = Hardware(copy_bytes_per_s=2e8, memory_bytes_per_s=2e9, flops_per_s=1e12, overhead_ns=100_000_000)
H, M = 4096, 11008
TOKENS = (1, 7, 50, 300, 1000, 2000)


def manifest(*, image_bytes: int = 14 << 30, parameters: int = 7_000_000_000) -> Manifest:
    return Manifest(
        fingerprint="f",
        architecture="None",
        dtype="bfloat16",
        image_bytes=image_bytes,
        tensors=(),
        kv=make_shape(16 * 524_288),
        context_tokens=4096,
        vocab_size=1,
        eos_token_ids=(),
        hidden_size=H,
        intermediate_size=M,
        parameters=parameters,
    )


def switch_truth() -> float:
    """Eq. 4: 14 GiB over 32 GB/s, β = 1/0.625."""
    return (14 << 30) / 32e9 * 1e9 / 0.625


def prefill_truth(t: int) -> float:
    """Eq. 5 with a batch of one and block size 128."""
    c1, c2, c3 = 9e-4, 4e-5, 7e6
    return c1 * (4 * t * H * H + 2 * t * H * M) + c2 * 3 * H * t * t / 128 + c3


def decode_truth(t: int) -> float:
    """Eq. 6."""
    c4, c5 = 0.12, 0.03
    return c4 * (4 * H * H + 2 * H * M) + c5 * 3 * H * t


def r_squared(estimate: Callable[[int], float], truth: Callable[[int], float], at: Sequence[int]) -> float:
    true = [truth(t) for t in at]
    mean = sum(true) / len(true)
    residual = sum((estimate(t) - y) ** 2 for t, y in zip(at, true, strict=True))
    return 1 - residual / sum((y - mean) ** 2 for y in true)


@pytest.mark.parametrize("hardware", [HARDWARE, FAST, SLOW], ids=["default", "bound too low", "bound too high"])
@pytest.mark.parametrize("seed", range(3))
def test_noisy_observations_lead_to_the_truth(seed: int, hardware: Hardware) -> None:
    """However far the analytic bound was off."""
    latency, draw = Latency(manifest(), hardware), Stream(seed, "noise")

    def noisy(true_ns: float) -> int:
        return round(true_ns * (0.9 + 0.2 * draw.uniform()))

    for _ in range(200):
        t, context = 1 + draw.below(2048), 1 + draw.below(64 * 2048)
        latency.saw_prefill(t, noisy(prefill_truth(t)))
        latency.saw_decode(context, noisy(decode_truth(context)))
        latency.saw_switch(noisy(switch_truth()))
    assert r_squared(latency.prefill_ns, prefill_truth, TOKENS) >= 0.95
    assert r_squared(latency.decode_ns, decode_truth, [60 * t for t in TOKENS]) >= 0.95
    assert latency.switch_ns() == pytest.approx(switch_truth(), rel=0.05)


@pytest.mark.parametrize("seed", range(3))
def test_rows_cost_what_steps_show(seed: int) -> None:
    """Over as much context, batches of many rows take longer."""
    latency, draw = Latency(manifest(), HARDWARE), Stream(seed, "rows")

    def truth(context: int, rows: int) -> float:
        return decode_truth(context) + 500_000 * rows

    for _ in range(400):
        rows = 1 + draw.below(64)
        context = rows * (1 + draw.below(512))
        latency.saw_decode(context, round(truth(context, rows) * (0.9 + 0.2 * draw.uniform())), rows)
    for context, rows in ((100, 1), (8_000, 16), (8_000, 60)):
        assert latency.decode_ns(context, rows) == pytest.approx(truth(context, rows), rel=0.1)


def test_without_steps_rows_cost_nothing() -> None:
    latency = Latency(manifest(), HARDWARE)
    assert latency.decode_ns(5_000, 64) == pytest.approx(latency.decode_ns(5_000, 1), rel=1e-6)


@pytest.mark.parametrize("sigma", [0.1, 0.3, 0.5])
def test_steps_and_switches_that_vary_are_predicted_by_their_mean(sigma: float) -> None:
    """Or a plan of many runs would be too short by what they vary."""
    latency, draw = Latency(manifest(), HARDWARE), Stream(5, "noise")
    believed, took = dict.fromkeys(("switch", "decode"), 0.0), dict.fromkeys(("switch", "decode"), 0.0)
    for number in range(1500):
        tokens = 20 + draw.below(2000)
        now = {
            "switch": (latency.switch_ns(), switch_truth() * lognormal(draw, sigma)),
            "decode": (latency.decode_ns(tokens), decode_truth(tokens) * lognormal(draw, sigma)),
        }
        latency.saw_switch(round(now["switch"][1]))
        latency.saw_decode(tokens, round(now["decode"][1]))
        if number > 100:
            for kind, (expected, cost) in now.items():
                believed[kind] += expected
                took[kind] += cost
    for kind, total in believed.items():
        assert total == pytest.approx(took[kind], rel=0.08), kind


def test_prompts_that_take_a_reading_of_the_weights_at_least_are_not_believed_to_vary() -> None:
    """What a straight line misses of such costs is no chance: prompts of all lengths would be believed to take longer
    than they do."""
    latency, draw = Latency(manifest(), HARDWARE), Stream(7, "lengths")
    off = []
    for number in range(1000):
        tokens = 10 + draw.below(1500)
        took_ns = max(10e6, 22_700 * tokens)
        if number > 100:
            off.append(latency.prefill_ns(tokens) / took_ns)
        latency.saw_prefill(tokens, round(took_ns))
    assert 0.9 < sum(off) / len(off) <= 1.0


def lognormal(draw: Stream, sigma: float) -> float:
    """Box-Muller."""
    return math.exp(sigma * math.sqrt(-2 * math.log(1 - draw.uniform())) * math.cos(2 * math.pi * draw.uniform()))


def test_what_changes_is_followed() -> None:
    """Something else uses the link: half the bandwidth from now on."""
    latency = Latency(manifest(), HARDWARE)
    for factor in (1, 2):
        for _ in range(200):
            latency.saw_switch(round(factor * switch_truth()))
        assert latency.switch_ns() == pytest.approx(factor * switch_truth(), rel=0.05)


@pytest.mark.parametrize("tokens", TOKENS)
def test_without_observations_the_analytic_bound_answers(tokens: int) -> None:
    latency, m, hw = Latency(manifest(), HARDWARE), manifest(), HARDWARE
    prefill = hw.overhead_ns + 1e9 * 2 * m.parameters * tokens / hw.flops_per_s
    step = hw.overhead_ns + 1e9 * (m.image_bytes + m.kv.token_bytes * tokens) / hw.memory_bytes_per_s
    assert latency.switch_ns() == pytest.approx(1e9 * m.image_bytes / hw.copy_bytes_per_s, rel=0.01)
    assert latency.prefill_ns(tokens) == pytest.approx(prefill, rel=0.03)
    assert latency.decode_ns(tokens) == pytest.approx(step, rel=0.03)


@pytest.mark.parametrize("factor", [0.02, 3, 50])
def test_one_length_teaches_the_others_the_level(factor: float) -> None:
    """A single observation, however far from the bound, gives no other length a silly estimate."""
    latency = Latency(manifest(), HARDWARE)
    before = {t: latency.prefill_ns(t) for t in TOKENS}
    latency.saw_prefill(300, round(factor * before[300]))
    for t in TOKENS:
        assert latency.prefill_ns(t) == pytest.approx(factor * before[t], rel=0.05)


def test_lengths_near_each_other_do_not_mislead_about_others() -> None:
    """Noise between them is no slope."""
    latency, draw = Latency(manifest(), HARDWARE), Stream(1, "noise")
    before = {t: latency.prefill_ns(t) for t in TOKENS}
    for _ in range(300):
        t = 300 + draw.below(10)
        latency.saw_prefill(t, round(before[300] * (0.8 + 0.4 * draw.uniform())))
    for t in TOKENS:
        assert before[t] / 3 <= latency.prefill_ns(t) <= 3 * before[t]


def test_the_first_step_may_be_slow() -> None:
    """What a process does once, in its first step, is forgotten soon."""
    latency = Latency(manifest(), HARDWARE)
    latency.saw_decode(100, round(200 * decode_truth(100)))
    for _ in range(3):
        latency.saw_decode(100, round(decode_truth(100)))
    assert latency.decode_ns(100) == pytest.approx(decode_truth(100), rel=0.05)


@pytest.mark.parametrize("seed", range(8))
def test_noise_in_short_prompts_makes_no_long_one_short(seed: int) -> None:
    """What a long prompt is believed to take says whether it is cut."""
    latency, draw = Latency(manifest(), HARDWARE), Stream(seed, "noise")
    for start, stop in [(0, 50), (0, 128), (128, 256), (256, 384), (384, 512), (0, 50), (0, 512)]:
        took_ns = prefill_truth(stop) - prefill_truth(start) + 7e6
        latency.saw_prefill(stop, round(took_ns * (0.8 + 0.6 * draw.uniform())), start)
    assert latency.prefill_ns(4000) >= 4 * latency.prefill_ns(512)


@given(st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 10**12)), max_size=30), st.integers(1, 8192))
def test_more_tokens_never_take_less(seen: list[tuple[int, int]], tokens: int) -> None:
    latency = Latency(manifest(), HARDWARE)
    for stop, took_ns in seen:
        latency.saw_prefill(stop, took_ns)
        latency.saw_decode(stop, took_ns)
    assert latency.prefill_ns(tokens) <= latency.prefill_ns(tokens + 1000)
    assert latency.decode_ns(tokens) <= latency.decode_ns(tokens + 1000)


@given(
    st.lists(
        st.tuples(st.sampled_from(["switch", "prefill", "decode"]), st.integers(1, 1 << 15), st.integers(0, 10**13)),
        max_size=30,
    ),
    st.integers(1, 1 << 15),
)
def test_no_estimate_is_ever_negative(seen: list[tuple[str, int, int]], tokens: int) -> None:
    latency = Latency(manifest(image_bytes=1 << 20, parameters=500_000), HARDWARE)
    for kind, t, duration_ns in seen:
        if kind == "switch":
            latency.saw_switch(duration_ns)
        elif kind == "prefill":
            latency.saw_prefill(t, duration_ns)
        else:
            latency.saw_decode(t, duration_ns)
        assert min(latency.switch_ns(), latency.prefill_ns(tokens), latency.decode_ns(tokens)) > 0


@given(st.lists(st.tuples(st.integers(1, 4000), st.floats(0.5, 2)), max_size=40))
def test_who_is_not_told_sees_the_same_estimates(seen: list[tuple[int, float]]) -> None:
    """Sums of estimates are kept until estimates are said to have moved."""
    latency = Latency(manifest(), HARDWARE)

    def estimates() -> list[int]:
        return [latency.prefill_ns(t) for t in TOKENS] + [latency.decode_ns(t) for t in TOKENS] + [latency.switch_ns()]

    for tokens, factor in seen:
        before = estimates()
        moved = latency.saw_prefill(tokens, round(factor * prefill_truth(tokens)))
        moved |= latency.saw_decode(tokens, round(factor * decode_truth(tokens)))
        moved |= latency.saw_switch(round(factor * switch_truth()))
        assert moved == (estimates() != before)


def test_a_steady_device_moves_no_estimates() -> None:
    latency, draw = Latency(manifest(), HARDWARE), Stream(3, "noise")
    for _ in range(100):
        latency.saw_switch(round(switch_truth()))
    assert not any(latency.saw_switch(round(switch_truth() * (0.99 + 0.02 * draw.uniform()))) for _ in range(100))


@given(st.lists(st.integers(1, 4000), max_size=20))
def test_many_prefills_take_as_long_as_each(lengths: list[int]) -> None:
    latency = Latency(manifest(), HARDWARE)
    together = latency.prefills_ns(len(lengths), sum(lengths), sum(t * t for t in lengths))
    assert together == pytest.approx(sum(map(latency.prefill_ns, lengths)), abs=len(lengths))


def test_the_features_are_those_of_equations_5_and_6() -> None:
    latency = Latency(manifest(), HARDWARE)
    terms = latency._linear, latency._quadratic
    assert _prefill_features(*terms, 100) == (4 * 100 * H * H + 2 * 100 * H * M, 3 * H * 100**2, 1)
    assert _decode_features(*terms, 100, 8) == (4 * H * H + 2 * H * M, 3 * H * 100, 8)


@given(st.lists(st.floats(0.1, 100), min_size=3, max_size=3))
def test_a_fit_without_noise_is_exact(coefficients: list[float]) -> None:
    def cost(x: tuple[float, float, float]) -> float:
        return 1e6 * sum(c * v for c, v in zip(coefficients, x, strict=True))

    points = [(1.0, 0.0, 2.0), (0.0, 3.0, 1.0), (5.0, 1.0, 0.0), (2.0, 2.0, 2.0), (7.0, 0.5, 1.0)]
    fit = LinearFit(Prior([(x, cost(x)) for x in points[:3]]))
    for x in points:
        fit.observe(x, cost(x))
    assert fit.at((4.0, 4.0, 4.0)) == pytest.approx(cost((4.0, 4.0, 4.0)), rel=1e-6)


def test_what_one_instance_sees_another_one_does_not() -> None:
    """They believe the same at first."""
    one, other = Latency(manifest(), HARDWARE), Latency(manifest(), HARDWARE)
    before = other.prefill_ns(100), other.decode_ns(100), other.switch_ns()
    for _ in range(50):
        one.saw_prefill(100, 3 * before[0])
        one.saw_decode(100, 3 * before[1])
        one.saw_switch(3 * before[2])
    assert one.prefill_ns(100) == pytest.approx(3 * before[0], rel=0.05)
    assert before == (other.prefill_ns(100), other.decode_ns(100), other.switch_ns())
    fresh = Latency(manifest(), HARDWARE)
    assert before == (fresh.prefill_ns(100), fresh.decode_ns(100), fresh.switch_ns())


@cache
def taught() -> Latency:
    """That long prompts cost more than their tokens."""
    latency = Latency(manifest(), HARDWARE)
    for t in TOKENS * 20:
        latency.saw_prefill(t, 7_000_000 + 100_000 * t + 50 * t * t)
    return latency


@given(st.integers(500, 4000), st.integers(500, 4000))
def test_a_chunk_is_estimated_as_its_share_of_the_whole(start: int, tokens: int) -> None:
    """And all of them with the same constant."""

    def once_more_ns(start: int, stop: int) -> int:
        latency = taught()
        return latency.prefill_ns(start) + latency.prefill_ns(stop, start) - latency.prefill_ns(stop)

    assert abs(once_more_ns(start, start + tokens) - once_more_ns(1000, 2000)) <= 3


def test_chunks_teach_as_much_as_whole_prefills() -> None:
    """Of prompts in chunks of a quarter, the last ones costing most."""
    latency = Latency(manifest(), HARDWARE)
    c3 = prefill_truth(0)
    for _ in range(30):
        for t in TOKENS[2:]:
            for start, stop in ((t * part // 4, t * (part + 1) // 4) for part in range(4)):
                latency.saw_prefill(stop, round(prefill_truth(stop) - prefill_truth(start) + c3), start)
    assert r_squared(latency.prefill_ns, prefill_truth, TOKENS) >= 0.9


def test_what_prompts_share_is_learnt_from_steps_that_they_share() -> None:
    """Alone, prompts of one length tell nothing of it."""
    latency, twin = (Latency(manifest(), Hardware()) for _ in range(2))
    for _ in range(60):
        latency.saw_step([(0, 100)], 50_000_000)
        latency.saw_step([(0, 100)] * 5, 130_000_000)  # 30 ms, and 20 for each
        twin.saw_step([(0, 100)], 50_000_000)
        twin.saw_step([(0, 100)] * 5, 250_000_000)
    assert latency.fixed_ns() == pytest.approx(30_000_000, rel=0.1)
    assert latency.joined_ns(100) == pytest.approx(20_000_000, rel=0.1)
    assert latency.joins(100, 0, 0.5) and not latency.joins(100, 0, 0.7)
    assert not twin.joins(100, 0, 0.1)


def test_a_step_of_one_prompt_teaches_what_a_prefill_does_and_what_steps_take() -> None:
    one, other = (Latency(manifest(), Hardware()) for _ in range(2))
    for at in range(1, 40):
        one.saw_prefill(60 * at, 1_000_000 * at, 20)
        other.saw_step([(20, 60 * at)], 1_000_000 * at)
    assert [one.prefill_ns(t) for t in TOKENS] == [other.prefill_ns(t) for t in TOKENS]
    assert one.fixed_ns() == Latency(manifest(), Hardware()).fixed_ns() != other.fixed_ns()


def test_sharing_is_tried_before_anything_is_known_where_weights_take_longer_than_tokens() -> None:
    quick = Latency(manifest(), Hardware(memory_bytes_per_s=1e9, flops_per_s=1e13))
    slow = Latency(manifest(), Hardware(memory_bytes_per_s=1e13, flops_per_s=1e9, overhead_ns=0))
    assert quick.joins(100, 0, 0.5) and not slow.joins(1_000, 0, 0.1)


def test_rows_that_decode_beside_prompts_take_what_the_fit_of_decode_steps_says_but_no_step() -> None:
    latency = Latency(manifest(), Hardware())
    for rows in (1, 8, 32) * 30:
        latency.saw_decode(1_000 * rows, 5_000_000 + 400_000 * rows, rows)
    assert latency.beside_ns(8_000, 8) == pytest.approx(8 * 400_000, rel=0.2)
    assert latency.decode_ns(8_000, 8) - latency.beside_ns(8_000, 8) == pytest.approx(5_000_000, rel=0.2)
