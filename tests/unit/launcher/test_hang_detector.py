"""A proxy that hangs is found in time, a busy one never is, and none is when the watcher itself stood still."""

from __future__ import annotations

from aegis.core.clock import NS_PER_S
from aegis.core.ids import ProxyId
from aegis.launcher.hang_detector import BUSY_NS, LOOK_NS, SILENT_NS, STARTING_NS, HangDetector

A, B = ProxyId(1), ProxyId(2)


class Watched:
    """A watcher that looks as often as it should."""

    def __init__(self) -> None:
        self.detector = HangDetector()
        self.now_ns = 7 * NS_PER_S
        self.used_ns = {A: 0, B: 0}
        self.detector.check(self.used_ns, self.now_ns)
        for proxy in (A, B):
            self.detector.saw_message(proxy, self.now_ns)

    def pass_ns(
        self, time_ns: int, *, speaking: ProxyId | None = None, working: ProxyId | None = None
    ) -> list[ProxyId]:
        """Who was found to hang meanwhile, first to last."""
        found: list[ProxyId] = []
        for _ in range(time_ns // LOOK_NS):
            self.now_ns += LOOK_NS
            if speaking:
                self.detector.saw_message(speaking, self.now_ns)
            if working:
                self.used_ns[working] += 1
            found += self.detector.check(self.used_ns, self.now_ns)
        return found


def test_who_says_nothing_and_does_nothing_hangs() -> None:
    watched = Watched()
    assert watched.pass_ns(SILENT_NS - LOOK_NS, speaking=A) == []
    assert watched.pass_ns(LOOK_NS, speaking=A) == [B]


def test_who_works_is_busy_for_a_minute() -> None:
    watched = Watched()
    assert watched.pass_ns(BUSY_NS - LOOK_NS, speaking=A, working=B) == []
    assert watched.pass_ns(LOOK_NS, speaking=A, working=B) == [B]


def test_who_has_not_joined_yet_has_longer() -> None:
    watched = Watched()
    watched.detector.forget(B)
    watched.detector.started(B, watched.now_ns)
    assert watched.pass_ns(2 * BUSY_NS, speaking=A, working=B) == [], "it imports what it needs"
    assert watched.pass_ns(STARTING_NS - LOOK_NS, speaking=A) == []
    assert watched.pass_ns(LOOK_NS, speaking=A) == [B]
    watched.detector.saw_message(B, watched.now_ns)
    assert watched.pass_ns(SILENT_NS, speaking=A) == [B]


def test_who_has_left_is_not_found() -> None:
    watched = Watched()
    watched.detector.forget(B)
    assert watched.pass_ns(BUSY_NS, speaking=A) == []


def test_time_in_which_the_watcher_stood_still_is_nobodys() -> None:
    watched = Watched()
    watched.now_ns += BUSY_NS
    assert watched.detector.check(watched.used_ns, watched.now_ns) == []
    assert watched.pass_ns(SILENT_NS - LOOK_NS) == []
    assert watched.pass_ns(LOOK_NS) == [A, B]
