"""The laws at the end of a run: every request was answered, undisturbed, and everything is free again."""

from __future__ import annotations

from aegis.core.lifecycle import State
from aegis.sim.faults.node import Node
from aegis.sim.faults.pretended import reference
from aegis.sim.faults.world import World
from prefill.core import PrefillCore


def check_end(world: World) -> None:
    """Raises AssertionError or LawBroken where a law does not hold."""
    _check_answers(world)
    for node in world.nodes.values():
        _check_free(node, world)
    world.host.check()
    world.arbiter.check()
    world.models.check_end()
    assert world.host.kept.idle == world.host.kept.slabs, "something is written for ever"
    assert world.leases.free + world.leases.kept >= world.scenario.host_slabs - len(world.nodes), (
        "host slabs are held by nobody"
    )
    assert world.arbiter.free == world.scenario.pages, f"{world.arbiter.use()}"
    assert not world.ground.pages and not world.ground.dirty
    assert len(world.settled) == world.scenario.moves * (1 + world.scenario.plan.commands_twice)


def _check_answers(world: World) -> None:
    assert not world.session.states(), f"{world.session.states()} never ended"
    assert world.ended.keys() == world.jobs.keys()
    for request, job in world.jobs.items():
        expected, got = reference(job.prompt, job.sampling), world.delivered[request]
        assert got == expected[: len(got)], f"{request}: {got} is not {expected}"
        finished = world.ended[request].state is State.FINISHED
        assert got == expected or not finished or request in world.satisfied
        assert finished or request not in world.satisfied


def _check_free(node: Node, world: World) -> None:
    ledger, accounts = node.core.ledger, node.core.ledger.accounts()
    ledger.check()
    assert not node.tracked, f"{node.instance} still tracks {node.tracked}"
    assert node.bound == set(world.models.specs) == set(ledger.specs)
    assert not ledger.device.use() and not ledger.host.use(), accounts
    assert accounts["transfers_in_flight"] == 0
    assert accounts["device_pages"] == 0
    assert accounts["host_slabs_leased"] <= 1
    assert node.core.queued == node.core.running == 0
    assert not isinstance(node.core, PrefillCore) or node.core.handed == 0
