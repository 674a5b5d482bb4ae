"""Leases of host slabs: whole requests in order of asking, and slabs of lost instances that others may still read."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aegis.core.errors import LawBroken
from aegis.core.ids import InstanceId, SlabId
from aegis.core.messages import ForgetPeer, GrantSlabs
from memory.slab_leases import Grants, SlabLeases

A, B, C = (InstanceId(name) for name in "abc")
WORDS = (5, 6)
instances = st.sampled_from([A, B, C])


class Leases(RuleBasedStateMachine):
    """The instances' side of it: what each holds, requests for, and has not answered yet."""

    def __init__(self) -> None:
        super().__init__()
        self.leases = SlabLeases(8)
        self.held: dict[InstanceId, set[SlabId]] = {}
        self.line: list[tuple[InstanceId, int]] = []
        self.questions: list[tuple[InstanceId, InstanceId]] = []  # (who is asked, which peer to forget)
        self.unread: dict[InstanceId, set[SlabId]] = {}  # slabs of lost ones that somebody may still read

    def take(self, grants: Grants) -> list[InstanceId]:
        """Returns who was refused."""
        refused = []
        for instance, message in grants:
            if isinstance(message, ForgetPeer):
                self.questions.append((instance, message.peer))
                continue
            if message.refused:
                assert not message.slabs, "part of a request was granted"
                refused.append(instance)
                continue
            assert (instance, len(message.slabs)) == self.line.pop(0), "not in order of asking"
            taken = {slab for held in (*self.held.values(), *self.unread.values()) for slab in held}
            assert not taken & set(message.slabs), "a slab was granted that somebody holds or reads"
            self.held[instance] |= set(message.slabs)
        return refused

    @rule(instance=instances)
    def join(self, instance: InstanceId) -> None:
        if instance not in self.held:
            self.leases.join(instance)
            self.held[instance] = set()

    @rule(instance=instances, count=st.integers(1, 6))
    def ask(self, instance: InstanceId, count: int) -> None:
        if instance not in self.held:
            return
        place = next((i for i, (name, _) in enumerate(self.line) if name == instance), len(self.line))
        self.line[place : place + 1] = [(instance, count)]
        refused = self.take(self.leases.ask(instance, count))
        assert refused == [instance] * any(name == instance for name, _ in self.line)

    @rule(data=st.data(), instance=instances)
    def give_back(self, data: st.DataObject, instance: InstanceId) -> None:
        held = sorted(self.held.get(instance, ()))
        if held:
            slabs = data.draw(st.lists(st.sampled_from(held), unique=True))
            self.held[instance] -= set(slabs)
            assert self.take(self.leases.give_back(instance, slabs)) == []

    @rule(instance=instances)
    def lost(self, instance: InstanceId) -> None:
        if instance not in self.held:
            return
        slabs = self.held.pop(instance)
        self.line = [request for request in self.line if request[0] != instance]
        self.questions = [q for q in self.questions if q[0] != instance]
        if self.held:
            self.unread[instance] = self.unread.get(instance, set()) | slabs
        self.unread = {peer: s for peer, s in self.unread.items() if peer == instance or self.asked(peer)}
        self.take(self.leases.lost(instance, WORDS))
        assert {other for other, peer in self.questions if peer == instance} >= set(self.held)

    @rule(data=st.data())
    def forgotten(self, data: st.DataObject) -> None:
        if self.questions:
            instance, peer = self.questions.pop(data.draw(st.integers(0, len(self.questions) - 1)))
            if not self.asked(peer):
                del self.unread[peer]
            self.take(self.leases.forgotten(instance, peer))

    def asked(self, peer: InstanceId) -> bool:
        return any(about == peer for _, about in self.questions)

    @invariant()
    def law_l1_every_slab_is_somewhere(self) -> None:
        self.leases.check()
        assert self.leases.leased == sum(map(len, self.held.values()))
        held = self.leases.leased + sum(map(len, self.unread.values()))
        assert self.leases.free + held == self.leases.capacity

    @invariant()
    def law_l2_a_slab_is_in_one_place(self) -> None:
        places = [slab for held in (*self.held.values(), *self.unread.values()) for slab in held]
        assert len(set(places)) == len(places)

    @invariant()
    def law_l3_the_first_in_line_wants_more_than_is_free(self) -> None:
        assert not self.line or self.line[0][1] > self.leases.free


Leases.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
TestLeases = Leases.TestCase


def started(capacity: int, *names: InstanceId) -> SlabLeases:
    leases = SlabLeases(capacity)
    for name in names:
        leases.join(name)
    return leases


def test_a_request_is_granted_whole_or_not_at_all() -> None:
    leases = started(4, A, B)
    assert leases.ask(A, 3) == [(A, GrantSlabs((SlabId(0), SlabId(1), SlabId(2))))]
    assert leases.ask(B, 2) == [(B, GrantSlabs((), refused=True))]
    assert leases.free == 1
    assert leases.give_back(A, [SlabId(1)]) == [(B, GrantSlabs((SlabId(1), SlabId(3))))]


def test_small_requestes_do_not_overtake_a_large_one() -> None:
    leases = started(4, A, B, C)
    leases.ask(A, 3)
    leases.ask(B, 4)
    assert leases.ask(C, 1) == [(C, GrantSlabs((), refused=True))]
    assert [name for name, _ in leases.give_back(A, [SlabId(i) for i in range(3)])] == [B]


def test_asking_again_replaces_the_request_and_keeps_its_place() -> None:
    leases = started(4, A, B, C)
    leases.ask(A, 4)
    leases.ask(B, 4)
    leases.ask(C, 1)
    leases.ask(B, 2)
    assert [(name, len(m.slabs)) for name, m in leases.give_back(A, map(SlabId, range(4)))] == [(B, 2), (C, 1)]  # type: ignore[union-attr]


def test_slabs_of_a_lost_instance_wait_until_everyone_has_forgotten_it() -> None:
    leases = started(2, A, B, C)
    leases.ask(A, 2)
    assert leases.lost(A, WORDS) == [(B, ForgetPeer(A, WORDS)), (C, ForgetPeer(A, WORDS))]
    leases.forgotten(B, A)
    assert leases.free == 0
    leases.lost(C, WORDS)
    assert leases.free == 2


def test_an_answer_about_the_first_loss_does_not_stand_for_the_second() -> None:
    """The instance came back, was granted slabs and was lost again before the others had answered."""
    leases = started(4, A, B)
    leases.ask(A, 2)
    leases.lost(A, WORDS)
    leases.join(A)
    leases.ask(A, 2)
    leases.lost(A, WORDS)
    leases.forgotten(B, A)
    assert leases.free == 0
    leases.forgotten(B, A)
    assert leases.free == 4


@pytest.mark.parametrize(("law", "slab"), [("L1", None), ("L2", 2)])
def test_check_finds_what_is_broken(law: str, slab: int | None) -> None:
    leases = started(3, A)
    leases.ask(A, 1)
    leases._free.pop()
    if slab is not None:
        leases._free.append(SlabId(slab))
    with pytest.raises(LawBroken, match=law):
        leases.check()


def test_check_finds_somebody_forgotten_in_line() -> None:
    leases = started(3, A)
    leases._wanted[A] = 2
    with pytest.raises(LawBroken, match="L3"):
        leases.check()
