"""The instance that changes its role: R1, R2 and R3, for loads drawn at random."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis.core.clock import NS_PER_MS, NS_PER_S
from aegis.core.ids import InstanceId
from aegis.core.role import Role
from aegis.core.views import PPM
from proxy.routing.roles import (
    HELD_NS,
    SETTLED_NS,
    SHORT_PPM,
    SPARE_PPM,
    LoadsSampled,
    RoleChange,
    RoleChanged,
    RoleLoad,
    RolePolicy,
)

P, D = Role.PREFILL, Role.DECODE
LOOK_NS = NS_PER_S


class Pool:
    """Instances among which the work of each role is dealt out alike; what is to change, changes at once. `worked` is
    how many prefill instances the work would keep busy."""

    def __init__(self, prefills: int, decodes: int, *, loads: tuple[float, float], worked: float = 0.0) -> None:
        self.roles = {InstanceId(f"i-{n}"): P if n < prefills else D for n in range(prefills + decodes)}
        self.loads = {P: loads[0], D: loads[1]}
        self.worked = worked
        self.worked_ns = dict.fromkeys(self.roles, 0)
        self.policy = RolePolicy()
        self.now_ns = 7 * NS_PER_S
        self.changes: list[tuple[int, RoleChange]] = []

    def of(self, role: Role) -> list[InstanceId]:
        return [name for name, its in self.roles.items() if its is role]

    def look(self) -> list[RoleChange]:
        dealt = {role: round(self.loads[role] * PPM / len(self.of(role))) for role in (P, D)}
        loads = [RoleLoad(name, role, dealt[role], self.worked_ns[name]) for name, role in self.roles.items()]
        return self.policy.on(LoadsSampled(tuple(loads)), self.now_ns)

    def run(self, for_ns: int) -> None:
        until_ns = self.now_ns + for_ns
        while self.now_ns < until_ns:
            for change in self.look():
                assert self.roles[change.instance] is not change.role
                self.roles[change.instance] = change.role
                assert self.of(P) and self.of(D), "R1"
                self.changes.append((self.now_ns, change))
                self.policy.on(RoleChanged(), self.now_ns)
            self.now_ns += LOOK_NS
            for name in self.of(P):
                self.worked_ns[name] += round(LOOK_NS * min(1.0, self.worked / len(self.of(P))))


def _names(changes: Sequence[tuple[int, RoleChange]]) -> list[tuple[str, Role]]:
    return [(change.instance, change.role) for _, change in changes]


def test_a_decode_instance_goes_to_prefill_where_that_is_short_for_long_enough() -> None:
    pool = Pool(1, 2, loads=(1.5, 0.4))
    began_ns = pool.now_ns
    pool.run(HELD_NS)
    assert pool.changes == []
    pool.run(LOOK_NS)
    assert _names(pool.changes) == [("i-1", P)]
    assert pool.changes[0][0] == began_ns + HELD_NS
    assert pool.changes[0][1].why == "prefill is loaded 150 %, decode 20 %"


def test_a_prefill_instance_goes_to_decode_unless_it_works() -> None:
    pool = Pool(2, 1, loads=(0.1, 1.2), worked=0.5)
    pool.run(HELD_NS + 2 * LOOK_NS)
    assert _names(pool.changes) == [("i-0", D)]
    busy = Pool(2, 1, loads=(0.1, 1.2), worked=0.7)
    busy.run(20 * HELD_NS)
    assert busy.changes == []


def test_a_break_begins_it_anew() -> None:
    pool = Pool(1, 2, loads=(1.5, 0.4))
    pool.run(HELD_NS - LOOK_NS)
    pool.loads[P] = 0.5
    pool.run(LOOK_NS)
    pool.loads[P] = 1.5
    pool.run(HELD_NS)
    assert pool.changes == []
    pool.policy.on(LoadsSampled(()), pool.now_ns)
    pool.run(HELD_NS)
    assert pool.changes == []
    pool.run(LOOK_NS)
    assert len(pool.changes) == 1


@pytest.mark.parametrize(("prefills", "decodes"), [(1, 1), (3, 1)])
def test_the_last_one_stays_however_much_waits(prefills: int, decodes: int) -> None:
    pool = Pool(prefills, decodes, loads=(100.0, 0.0))
    pool.run(20 * HELD_NS)
    assert pool.changes == []


def test_nothing_changes_while_something_does_and_for_a_while_after() -> None:
    pool = Pool(1, 5, loads=(50.0, 0.0))
    pool.now_ns += HELD_NS
    assert pool.look() == []
    pool.now_ns += HELD_NS
    assert [change.instance for change in pool.look()] == ["i-1"]
    pool.now_ns += 10 * HELD_NS
    assert pool.look() == [], "it is under way"
    pool.policy.on(RoleChanged(), pool.now_ns)
    changed_ns = pool.now_ns
    pool.run(SETTLED_NS + HELD_NS + 2 * LOOK_NS)
    ((again_ns, _),) = pool.changes
    assert again_ns >= changed_ns + SETTLED_NS + HELD_NS


_LOADS = st.floats(0, 8, allow_nan=False)


@given(st.integers(1, 6), st.integers(1, 6), _LOADS, _LOADS, st.floats(0, 6, allow_nan=False))
def test_under_loads_that_stay_nothing_is_given_back(
    prefills: int, decodes: int, prefill: float, decode: float, worked: float
) -> None:
    pool = Pool(prefills, decodes, loads=(prefill, decode), worked=worked)
    pool.run((prefills + decodes + 2) * (HELD_NS + SETTLED_NS))
    assert len({change.role for _, change in pool.changes}) <= 1, "R2"
    assert len(pool.changes) < max(prefills, decodes)
    at_ns = [at_ns for at_ns, _ in pool.changes]
    assert all(later - earlier >= SETTLED_NS + HELD_NS for earlier, later in pairwise(at_ns))


@given(st.integers(1, 6), st.integers(2, 6), st.floats(0, 4), st.floats(0, 4), st.integers(1, 3000))
def test_it_reacts_at_the_first_look_after_the_time_it_has_to_hold(
    prefills: int, decodes: int, above: float, below: float, late_ms: int
) -> None:
    """R3, wherever the looks fall."""
    spare = SPARE_PPM / PPM * (decodes - 1)
    pool = Pool(prefills, decodes, loads=((SHORT_PPM / PPM + 0.01 + above) * prefills, max(0.0, spare - 0.01 - below)))
    assert pool.look() == []
    pool.now_ns += HELD_NS - NS_PER_MS
    assert pool.look() == []
    pool.now_ns += late_ms * NS_PER_MS
    assert [change.role for change in pool.look()] == [P]


@given(st.lists(st.tuples(_LOADS, _LOADS, st.integers(1, 40)), max_size=30), st.integers(1, 5), st.integers(1, 5))
def test_whatever_loads_do_no_role_is_left_empty(
    phases: list[tuple[float, float, int]], prefills: int, decodes: int
) -> None:
    pool = Pool(prefills, decodes, loads=(0, 0))
    for prefill, decode, looks in phases:
        pool.loads = {P: prefill, D: decode}
        pool.run(looks * LOOK_NS)  # which asserts R1
    assert len(pool.roles) == prefills + decodes
