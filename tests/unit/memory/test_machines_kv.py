"""Host memory of two machines: slabs are leased at home and read from anywhere, what is kept is found at home only."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aegis.core.ids import InstanceId, MachineId, RequestId
from aegis.core.messages import (
    CheckPrefix,
    ForgetPeer,
    GrantSlabs,
    KeepKv,
    KvKept,
    NeedSlabs,
    OfferKv,
    PeerForgotten,
    PrefixChecked,
    ReturnSlabs,
)
from aegis.core.request import Job, KeptPrefix, Sampling
from aegis.sim.faults.fake_models import BLOCK_TOKENS, PAGE, make_spec
from memory.host_kv import Answers
from memory.kept_prefixes import token_bytes
from memory.machines_kv import MachinesKv

HERE, THERE = MachineId("here"), MachineId("there")
A, B, C = (InstanceId(name) for name in "abc")
WORDS = (5, 6)
SPEC = make_spec(0, image_pages=1, block_bytes=PAGE // 2)
PROMPT = tuple(range(2 * BLOCK_TOKENS))


def opened(*homes: tuple[InstanceId, MachineId], slabs: int = 4) -> MachinesKv:
    hosts = MachinesKv(PAGE)
    hosts.spec_of = {SPEC.model: SPEC}.get
    for machine in (HERE, THERE):
        hosts.open(machine, slabs)
    for instance, machine in homes:
        hosts.join(instance, machine)
    return hosts


def keep(hosts: MachinesKv, writer: InstanceId) -> None:
    """The prompt's KV, on the writer's machine."""
    ((_, answer),) = hosts.on_message(writer, OfferKv(1, SPEC.model, token_bytes(PROMPT)))
    assert isinstance(answer, KeepKv) and answer.blocks
    hosts.on_message(writer, KvKept(1, done=True))


def found(hosts: MachinesKv, instance: InstanceId) -> KeptPrefix | None:
    return hosts.prefix_of(instance, Job(RequestId(1), 1, SPEC.model, (*PROMPT, 9), Sampling(max_tokens=1), 0))


def test_an_instance_leases_slabs_of_its_own_machine_only() -> None:
    hosts = opened((A, HERE), (B, THERE))
    ((_, granted),) = hosts.on_message(A, NeedSlabs(4))
    assert isinstance(granted, GrantSlabs) and len(granted.slabs) == 4
    assert hosts.on_message(A, NeedSlabs(1)) == [(A, GrantSlabs((), refused=True))]
    ((_, granted),) = hosts.on_message(B, NeedSlabs(4))
    assert isinstance(granted, GrantSlabs) and not granted.refused
    assert (hosts.capacity, hosts.leased, hosts.free) == (8, 8, 0)


def test_what_is_kept_on_a_machine_is_found_by_its_own_instances_only() -> None:
    hosts = opened((A, HERE), (B, HERE), (C, THERE))
    keep(hosts, A)
    prefix = found(hosts, B)
    assert prefix and prefix.tokens == len(PROMPT)
    assert found(hosts, C) is None
    check = CheckPrefix(RequestId(1), 1, prefix.entry)
    assert hosts.on_message(B, check) == [(B, PrefixChecked(RequestId(1), 1, intact=True))]


def test_what_is_kept_goes_with_its_machine_and_stays_counted() -> None:
    hosts = opened((A, HERE), (C, THERE))
    keep(hosts, A)
    assert (hosts.kept, hosts.kept_bytes, hosts.counters.kept_blocks) == (1, PAGE, 2)
    hosts.lost(A, WORDS)
    assert found(hosts, A) is None, "it has no machine"
    hosts.close(HERE)
    hosts.join(A, THERE)
    assert found(hosts, A) is None
    assert (hosts.kept, hosts.kept_bytes, hosts.counters.kept_blocks) == (0, 0, 2)


def test_slabs_of_a_lost_instance_are_free_when_nobody_on_any_machine_reads_them() -> None:
    hosts = opened((A, HERE), (B, HERE), (C, THERE))
    hosts.on_message(A, NeedSlabs(4))
    assert hosts.lost(A, WORDS) == [(B, ForgetPeer(A, WORDS)), (C, ForgetPeer(A, WORDS))]
    hosts.on_message(B, PeerForgotten(A))
    assert hosts.free == 4, "one on the other machine may still read"
    hosts.on_message(C, PeerForgotten(A))
    assert hosts.free == 8


def test_a_lost_reader_is_not_waited_for() -> None:
    hosts = opened((A, HERE), (C, THERE))
    hosts.on_message(A, NeedSlabs(2))
    hosts.lost(A, WORDS)
    hosts.lost(C, WORDS)
    assert hosts.free == 8


def test_an_answer_for_a_machine_that_is_gone_is_none() -> None:
    hosts = opened((A, HERE), (C, THERE))
    hosts.lost(A, WORDS)
    hosts.close(HERE)
    assert hosts.on_message(C, PeerForgotten(A)) == [] and hosts.capacity == 4


class TwoHosts(RuleBasedStateMachine):
    """Whatever comes and goes, the laws of each machine hold, and all slabs come back in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.hosts = opened()
        self.up: dict[InstanceId, list[Any]] = {}
        self.asked: list[tuple[InstanceId, InstanceId]] = []

    def heard(self, answers: Answers) -> None:
        for instance, message in answers:
            if isinstance(message, ForgetPeer):
                self.asked.append((instance, message.peer))
            elif instance in self.up and isinstance(message, GrantSlabs):
                self.up[instance] += message.slabs

    @rule(instance=st.sampled_from([A, B, C]), machine=st.sampled_from([HERE, THERE]))
    def join(self, instance: InstanceId, machine: MachineId) -> None:
        if instance not in self.up:
            self.up[instance] = []
            self.hosts.join(instance, machine)

    @precondition(lambda self: self.up)
    @rule(data=st.data(), count=st.integers(1, 5))
    def ask(self, data: st.DataObject, count: int) -> None:
        self.heard(self.hosts.on_message(data.draw(st.sampled_from(sorted(self.up))), NeedSlabs(count)))

    @precondition(lambda self: self.up)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        instance = data.draw(st.sampled_from(sorted(self.up)))
        slabs, self.up[instance] = self.up[instance], []
        self.heard(self.hosts.on_message(instance, ReturnSlabs(tuple(slabs))))

    @precondition(lambda self: self.up)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        instance = data.draw(st.sampled_from(sorted(self.up)))
        del self.up[instance]
        self.asked = [(asked, peer) for asked, peer in self.asked if asked != instance]
        self.heard(self.hosts.lost(instance, WORDS))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.asked) - 1))
        instance, peer = self.asked.pop(at)
        self.heard(self.hosts.on_message(instance, PeerForgotten(peer)))

    @invariant()
    def laws(self) -> None:
        self.hosts.check()

    def teardown(self) -> None:
        for instance in sorted(self.up):
            self.hosts.lost(instance, WORDS)
        assert self.hosts.free == self.hosts.capacity


TestTwoHosts = TwoHosts.TestCase
TestTwoHosts.settings = settings(max_examples=50, deadline=None)
