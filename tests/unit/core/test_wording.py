"""Numbers in sentences, and sentences that more than one reason says."""

from aegis.core.ids import ModelId, RequestId
from aegis.core.wording import among, count, due, duration, given_up, leaves, request_of, since, stays, takes, when


def test_times_have_three_digits_and_a_unit() -> None:
    told = [duration(ns) for ns in (0, 7, 1_500, 450_000_000, 999_999_999, 1_234_000_000, 83_600_000_000, 4 * 10**12)]
    assert told == ["0 s", "7 ns", "1.5 µs", "450 ms", "1000 ms", "1.23 s", "83.6 s", "4000 s"]


def test_moments_are_seen_from_now() -> None:
    assert [when(ns) for ns in (1_200_000_000, 0, -450_000_000)] == ["in 1.2 s", "in 0 s", "450 ms ago"]
    assert [since(0), since(1_000_000)] == ["", ", as planned 1 ms ago"]


def test_counts_have_their_plural() -> None:
    assert [count(n, "token") for n in (0, 1, 2)] == ["0 tokens", "1 token", "2 tokens"]
    assert [count(n, "batch", "batches") for n in (1, 2)] == ["1 batch", "2 batches"]


def test_sentences_of_several_reasons() -> None:
    assert due("first token", 1_200_000_000) == "first token due in 1.2 s"
    assert takes("prefill", 400_000_000) == "prefill 400 ms"
    assert given_up(RequestId(12), ModelId("a"), 1) == "request 12 of a is given up after 1 token"
    assert given_up(RequestId(12), ModelId("a"), 2, 3) == "request 12 of a, of priority 3, is given up after 2 tokens"
    assert request_of(RequestId(12), ModelId("a"), -1) == "request 12 of a, of priority -1,"
    assert among([0, 0]) == among([]) == ""
    assert among([2, 0, -1, 2, 1]) == ", with requests of priority -1, 1 and 2"
    assert leaves("weights of a leave", ModelId("b")) == "weights of a leave for b"
    assert leaves("weights of a leave", None) == "weights of a leave for another instance"
    assert stays("nobody waits for it", "b", "it is next") == "nobody waits for it; b stays, it is next"
