from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from aegis.control.failure_detector import (
    ECHO_NS,
    HEARTBEAT_NS,
    ConnectionLost,
    Effect,
    Ended,
    FailureDetector,
    Fence,
    HeartbeatReceived,
    OwnHeartbeatReceived,
    Probe,
    ProbeAnswered,
)
from aegis.core.clock import NS_PER_S
from aegis.core.ids import InstanceId

A, B = InstanceId("mixed-0"), InstanceId("mixed-1")
Alive = Callable[[InstanceId, int], bool]


class Run:
    """Time passes: the launcher beats, instances beat, questions are answered; what each does is said per instant."""

    def __init__(self, *instances: InstanceId) -> None:
        self.detector = FailureDetector()
        self.now_ns = 0
        self.asked: list[InstanceId] = []
        self.fenced: list[tuple[InstanceId, int, str, int]] = []
        self._progress = dict.fromkeys(instances, 0)
        self.incarnation = dict.fromkeys(instances, 1)

    def go(
        self,
        duration_ns: int,
        *,
        broker: bool = True,
        beats: Alive = lambda *_: True,
        moves: Alive = lambda *_: True,
        answers: Alive = lambda *_: True,
    ) -> None:
        for _ in range(duration_ns // ECHO_NS):
            self.now_ns += ECHO_NS
            for instance in self._progress if broker else ():
                if self.now_ns % HEARTBEAT_NS == 0 and beats(instance, self.now_ns):
                    self._progress[instance] += moves(instance, self.now_ns)
                    self.on(HeartbeatReceived(instance, self.incarnation[instance], self._progress[instance]))
            if broker:
                for effect in self.on(OwnHeartbeatReceived()):
                    if isinstance(effect, Probe) and answers(effect.instance, self.now_ns):
                        self.on(ProbeAnswered(effect.instance))

    def on(
        self, event: OwnHeartbeatReceived | HeartbeatReceived | ConnectionLost | ProbeAnswered | Ended
    ) -> list[Effect]:
        effects = self.detector.on(event, self.now_ns)
        self.asked += [effect.instance for effect in effects if isinstance(effect, Probe)]
        self.fenced += [
            (effect.instance, effect.incarnation, effect.why, self.now_ns)
            for effect in effects
            if isinstance(effect, Fence)
        ]
        return effects


def _not(instance: InstanceId) -> Alive:
    return lambda other, _: other != instance


def test_who_beats_is_not_even_asked() -> None:
    run = Run(A, B)
    run.go(60 * NS_PER_S, answers=lambda *_: False)
    assert run.asked == run.fenced == []


def test_a_stopped_process_is_fenced_within_three_seconds_and_nobody_else() -> None:
    run = Run(A, B)
    run.go(10 * NS_PER_S)
    stopped_ns = run.now_ns
    run.go(5 * NS_PER_S, beats=_not(A), answers=_not(A))
    ((instance, incarnation, why, at_ns),) = run.fenced
    assert (instance, incarnation, why) == (A, 1, "no sign of life")
    assert at_ns - stopped_ns <= 2.5 * NS_PER_S


def test_a_hung_main_loop_is_fenced_within_three_seconds() -> None:
    run = Run(A, B)
    run.go(10 * NS_PER_S)
    hung_ns = run.now_ns
    run.go(5 * NS_PER_S, moves=_not(A), answers=_not(A))
    ((instance, _, why, at_ns),) = run.fenced
    assert (instance, why) == (A, "its main loop, or one of its lanes, does not get on")
    assert at_ns - hung_ns <= 3 * NS_PER_S


def test_who_answers_over_its_own_link_lives_whatever_the_broker_says() -> None:
    run = Run(A, B)
    run.go(10 * NS_PER_S)
    run.go(60 * NS_PER_S, beats=_not(A))
    assert run.fenced == []
    assert set(run.asked) == {A}
    run.go(3 * NS_PER_S, beats=_not(A), answers=_not(A))
    assert [fence[0] for fence in run.fenced] == [A]


def test_a_broker_that_is_away_is_nobodys_death() -> None:
    run = Run(A, B)
    run.go(10 * NS_PER_S)
    run.go(600 * NS_PER_S, broker=False)
    run.go(NS_PER_S, beats=lambda *_: False, answers=lambda *_: False)  # they take a second to come back
    run.go(60 * NS_PER_S)
    assert run.fenced == []


def test_who_died_while_the_broker_was_away_is_found_when_it_is_back() -> None:
    run = Run(A, B)
    run.go(10 * NS_PER_S)
    run.go(60 * NS_PER_S, broker=False)
    back_ns = run.now_ns
    run.go(5 * NS_PER_S, beats=_not(A), answers=_not(A))
    assert [(fence[0], fence[3] - back_ns <= 3 * NS_PER_S) for fence in run.fenced] == [(A, True)]


def test_after_a_last_will_it_is_asked_at_once() -> None:
    run = Run(A)
    run.go(10 * NS_PER_S)
    run.on(ConnectionLost(A, 1))
    run.go(ECHO_NS, beats=_not(A))
    assert run.asked == [A]
    run.go(10 * NS_PER_S)
    assert run.fenced == []


def test_the_will_and_the_beats_of_an_earlier_incarnation_are_nothing() -> None:
    run = Run(A)
    run.incarnation[A] = 2
    run.go(10 * NS_PER_S)
    run.on(ConnectionLost(A, 1))
    run.on(HeartbeatReceived(A, 1, 99))
    run.go(10 * NS_PER_S, answers=lambda *_: False)
    assert run.asked == []


def test_who_has_ended_is_not_judged_until_its_successor_beats() -> None:
    run = Run(A)
    run.go(10 * NS_PER_S)
    run.on(Ended(A))
    run.go(60 * NS_PER_S, beats=_not(A), answers=_not(A))
    assert run.asked == []
    run.incarnation[A] = 2
    run.go(NS_PER_S)
    run.go(5 * NS_PER_S, beats=_not(A), answers=_not(A))
    assert [fence[:2] for fence in run.fenced] == [(A, 2)]


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans(), st.booleans()), max_size=20))
def test_whatever_the_broker_does_who_answers_is_never_fenced(phases: list[tuple[int, bool, bool]]) -> None:
    """Law: without silence of an instance on its own link there is no death."""
    run = Run(A, B)
    for echoes, broker, beats in phases:
        run.go(echoes * ECHO_NS, broker=broker, beats=lambda *_, beats=beats: beats)
    assert run.fenced == []
