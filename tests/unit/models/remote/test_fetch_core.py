"""The laws of `FetchCore`, for sources that break off, lie, change, and hurry, in orders drawn at random."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aegis.models.remote.fetch_core import (
    AT_ONCE,
    FIRST_WAIT_NS,
    LONGEST_WAIT_NS,
    TRIES,
    Answered,
    Arrived,
    Ask,
    Begun,
    Discard,
    Due,
    Effect,
    Ended,
    Event,
    Failed,
    FetchCore,
    Finished,
    Hopeless,
    Keep,
    Leave,
    Lost,
    Verified,
    Verify,
    Wake,
    WantedFile,
)

Draw = Callable[[int], int]


@dataclass
class Stand:
    """A source and a disk; `content` is what the source has. Each step one thing happens of those that may."""

    content: dict[str, bytes]
    tells_sizes: bool
    tells_digests: bool
    draw: Draw
    disk: dict[str, bytes] = field(default_factory=dict)
    sending: dict[str, bytes] = field(default_factory=dict)  # what is still to come of each
    answers: dict[str, Answered | None] = field(default_factory=dict)
    verifying: list[str] = field(default_factory=list)
    kept: dict[str, bytes] = field(default_factory=dict)
    wakes: list[int] = field(default_factory=list)
    ends: list[Effect] = field(default_factory=list)
    lost_in_a_row: Counter[str] = field(default_factory=Counter)
    now_ns: int = 0

    def wanted(self) -> list[WantedFile]:
        return [
            WantedFile(
                name,
                len(content) if self.tells_sizes else None,
                sha256(content).hexdigest() if self.tells_digests else None,
                len(self.disk.get(name, b"")),
            )
            for name, content in self.content.items()
        ]

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            assert not self.ends, "nothing is asked for after the end"
            match effect:
                case Ask(name, start):
                    assert name not in self.sending and name not in self.kept and name not in self.verifying
                    assert start == len(self.disk.get(name, b"")), "from the byte that is on disk"
                    self._answer(name, start)
                case Leave(name):
                    del self.sending[name]
                case Discard(name):
                    self.disk.pop(name, None)
                case Verify(name):
                    self.verifying.append(name)
                case Keep(name, digest):
                    assert digest == sha256(self.disk[name]).hexdigest()
                    self.kept[name] = self.disk.pop(name)
                case Wake(at_ns):
                    assert self.now_ns < at_ns <= self.now_ns + LONGEST_WAIT_NS
                    self.wakes.append(at_ns)
                case Finished() | Failed():
                    self.ends.append(effect)
            assert len(self.sending) + len(self.verifying) <= AT_ONCE

    def _answer(self, name: str, start: int) -> None:
        content = self.content[name]
        if self.draw(8) == 0:
            start = 0  # it does not resume
        self.answers[name] = Answered(name, start, len(content) if self.draw(2) else None)
        sent = content[start:]
        if self.draw(12) == 0 and sent:
            sent = sent[:-1] + bytes([sent[-1] ^ 1])
        self.sending[name] = sent + (b"more" if self.draw(20) == 0 else b"")

    def happens(self) -> Event | None:
        """The next event; None where there is nothing to wait for."""
        choices = [*self.sending, *self.verifying, *(["wake"] if self.wakes else [])]
        if not choices:
            return None
        chosen = choices[self.draw(len(choices))]
        if chosen == "wake":
            self.now_ns = max(self.now_ns, min(self.wakes))
            self.wakes.remove(min(self.wakes))
            return Due()
        if chosen in self.verifying:
            self.verifying.remove(chosen)
            there = self.disk.setdefault(chosen, b"")
            return Verified(chosen, len(there), sha256(there).hexdigest())
        return self._sends(chosen)

    def _sends(self, name: str) -> Event:
        if (answer := self.answers.pop(name, None)) is not None:
            if answer.start == 0:
                self.disk.setdefault(name, b"")
            return answer
        self.now_ns += 1
        if self.draw(6) == 0:
            del self.sending[name]
            self.lost_in_a_row[name] += 1
            return Lost(name, "it broke off", self.draw(3) * FIRST_WAIT_NS)
        left = self.sending[name]
        if not left:
            del self.sending[name]
            return Ended(name)
        count = 1 + self.draw(len(left))
        self.disk[name] = self.disk.get(name, b"") + left[:count]
        self.sending[name] = left[count:]
        self.lost_in_a_row[name] = 0
        return Arrived(name, len(self.disk[name]))


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(st.sampled_from("abcdefgh"), st.binary(max_size=40), min_size=1),
    st.booleans(),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_the_laws_hold_for_any_source(
    content: dict[str, bytes], tells_sizes: bool, tells_digests: bool, random: object
) -> None:
    draw: Draw = lambda count: random.randrange(count)  # type: ignore[attr-defined]  # noqa: E731
    stand = Stand(content, tells_sizes, tells_digests, draw)
    stand.disk = {name: whole[: draw(len(whole) + 1)] for name, whole in content.items() if draw(2)}
    core = FetchCore(stand.wanted())
    stand.take(core.on(Begun(), 0))
    for _ in range(5000):
        event = stand.happens()
        if event is None or stand.ends:
            break
        stand.take(core.on(event, stand.now_ns))
    (end,) = stand.ends
    assert core.over
    if isinstance(end, Finished):
        assert stand.kept.keys() == content.keys()
        if tells_digests:
            assert stand.kept == content
    if tells_digests:
        assert all(stand.kept[name] == content[name] for name in stand.kept)
    assert core.on(Due(), stand.now_ns) == []


def test_waits_double_up_to_a_bound_and_end() -> None:
    core = FetchCore([WantedFile("a", 10)])
    assert core.on(Begun(), 0) == [Ask("a", 0)]
    waits, now_ns = [], 0
    for _ in range(TRIES - 1):
        (wake,) = core.on(Lost("a", "busy"), now_ns)
        assert isinstance(wake, Wake)
        assert core.on(Due(), wake.at_ns - 1) == [wake], "not before its time"
        waits.append(wake.at_ns - now_ns)
        now_ns = wake.at_ns
        assert core.on(Due(), now_ns) == [Ask("a", 0)]
    assert waits == [FIRST_WAIT_NS << n for n in range(TRIES - 1)]
    assert core.on(Lost("a", "busy"), now_ns) == [Failed(f"a: busy, {TRIES} times in a row; what came of it is kept")]


def test_a_byte_more_counts_tries_anew_and_a_source_may_ask_for_a_longer_wait() -> None:
    core = FetchCore([WantedFile("a", 10)])
    core.on(Begun(), 0)
    for n in range(3 * TRIES):
        core.on(Arrived("a", min(9, n)), 0)
        effects = core.on(Lost("a", "busy", retry_after_ns=3 * FIRST_WAIT_NS), 0)
        if n < 9:
            assert effects == [Wake(3 * FIRST_WAIT_NS)]
        if not core.over:
            core.on(Due(), 3 * FIRST_WAIT_NS)
    assert core.over, "without a byte more it ends"


def test_what_is_wrong_once_is_fetched_anew_and_twice_is_refused() -> None:
    core = FetchCore([WantedFile("a", 2, "right")])
    assert core.on(Begun(), 0) == [Ask("a", 0)]
    core.on(Arrived("a", 2), 0)
    assert core.on(Ended("a"), 0) == [Verify("a")]
    assert core.on(Verified("a", 2, "wrong"), 0) == [Discard("a"), Ask("a", 0)]
    core.on(Arrived("a", 2), 0)
    core.on(Ended("a"), 0)
    discarded, failed = core.on(Verified("a", 2, "wrong"), 0)
    assert discarded == Discard("a") and isinstance(failed, Failed) and "sha256" in failed.reason


def test_what_the_disk_has_in_another_size_is_wrong_though_all_had_arrived() -> None:
    core = FetchCore([WantedFile("a", 2)])
    core.on(Begun(), 0)
    core.on(Arrived("a", 2), 0)
    assert core.on(Ended("a"), 0) == [Verify("a")]
    assert core.on(Verified("a", 1, "any"), 0) == [Discard("a"), Ask("a", 0)]


def test_a_whole_file_of_an_earlier_fetch_is_only_verified() -> None:
    core = FetchCore([WantedFile("a", 3, "right", have_bytes=3)])
    assert core.on(Begun(), 0) == [Verify("a")]
    assert core.on(Verified("a", 3, "right"), 0) == [Keep("a", "right"), Finished()]


def test_nothing_to_fetch_is_the_end_at_once() -> None:
    assert FetchCore([]).on(Begun(), 0) == [Finished()]


@pytest.mark.parametrize("count", [1, AT_ONCE + 3])
def test_what_is_hopeless_ends_all(count: int) -> None:
    core = FetchCore(WantedFile(str(n), 1) for n in range(count))
    asked = core.on(Begun(), 0)
    assert len(asked) == min(count, AT_ONCE)
    *left, failed = core.on(Hopeless("the disk is full"), 0)
    assert failed == Failed("the disk is full") and len(left) == len(asked)
