"""The largest holder gives up first, and only as many holders as necessary give up."""

from __future__ import annotations

from proxy.http.security.open_connections import OpenConnections
from proxy.http.security.shared_bound import SharedBound


def test_those_that_hold_most_give_up() -> None:
    gave_up: list[str] = []
    bound = SharedBound[str](100, gave_up.append)
    for holder, nbytes in (("small", 5), ("large", 50), ("larger", 40), ("large", 20), ("middle", 30)):
        bound.hold(holder, nbytes)
    assert (gave_up, bound.nbytes) == ([], 95)
    bound.hold("middle", 36)
    assert (gave_up, bound.nbytes) == (["larger"], 61), "that is three quarters"
    bound.hold("larger", 0)
    bound.hold("small", 0)
    assert bound.nbytes == 56
    bound.hold("huge", 1000)
    assert (gave_up, bound.nbytes) == (["larger", "huge"], 56)


def test_the_first_of_those_that_hold_as_much_gives_up_first() -> None:
    gave_up: list[int] = []
    bound = SharedBound[int](100, gave_up.append)
    for holder in range(11):
        bound.hold(holder, 10)
    assert gave_up == [0, 1, 2, 3]


def test_the_connection_that_waits_longest_ends() -> None:
    ended: list[str] = []
    connections = OpenConnections[str](3, ended.append)
    for name in "abc":
        connections.opened(name)
    connections.request_complete("a")
    connections.request_complete("b")
    connections.answered("b")
    connections.opened("d")
    connections.closed("c")
    connections.opened("e")
    connections.request_complete("d")
    connections.request_complete("e")
    connections.opened("f")
    assert ended == ["c", "b", "f"], "none that is being answered"
    assert len(connections) == 3
