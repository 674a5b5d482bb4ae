"""Numbers in sentences."""

from aegis.core.wording import duration, since, when


def test_times_have_three_digits_and_a_unit() -> None:
    told = [duration(ns) for ns in (0, 7, 1_500, 450_000_000, 999_999_999, 1_234_000_000, 83_600_000_000, 4 * 10**12)]
    assert told == ["0 s", "7 ns", "1.5 µs", "450 ms", "1000 ms", "1.23 s", "83.6 s", "4000 s"]


def test_moments_are_seen_from_now() -> None:
    assert [when(ns) for ns in (1_200_000_000, 0, -450_000_000)] == ["in 1.2 s", "in 0 s", "450 ms ago"]
    assert [since(0), since(1_000_000)] == ["", ", as planned 1 ms ago"]
