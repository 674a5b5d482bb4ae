"""The laws at the end of a run: every request was answered, undisturbed, and everything is free again."""

from __future__ import annotations

from aegis.core.lifecycle import State
from aegis.sim.faults.fake_models import reference
from aegis.sim.faults.instance import FaultyInstance
from aegis.sim.faults.world import World
from prefill.core import PrefillCore


def check_end(world: World) -> None:
    """Raises AssertionError or LawBroken where a law does not hold."""
    _check_answers(world)
    for instance in world.instances.values():
        _check_free(instance, world)
    world.memory.check()
    world.models.check_end()
    host = world.memory.host
    assert host.kept.idle == host.kept.slabs, "something is written for ever"
    assert host.leases.free + host.leases.kept >= world.scenario.host_slabs - len(world.instances), (
        "host slabs are held by nobody"
    )
    assert world.arbiter.free == world.scenario.pages, f"{world.arbiter.use()}"
    assert not world.state.pages and not world.state.dirty
    assert len(world.settled) == world.scenario.moves * (1 + world.scenario.plan.commands_twice)


def _check_answers(world: World) -> None:
    assert not world.moves, f"{world.moves} moves never ended"
    assert not world.router.states(), f"{world.router.states()} never ended"
    assert world.ended.keys() == world.jobs.keys()
    for request, job in world.jobs.items():
        expected, got = reference(job.prompt, job.sampling, job.adapter), world.delivered[request]
        assert got == expected[: len(got)], f"{request}: {got} is not {expected}"
        finished = world.ended[request].state is State.FINISHED
        assert got == expected or not finished or request in world.satisfied
        assert finished or request not in world.satisfied


def _check_free(instance: FaultyInstance, world: World) -> None:
    ledger, accounts = instance.core.ledger, instance.core.ledger.accounts()
    ledger.check()
    assert not instance.tracked, f"{instance.instance} still tracks {instance.tracked}"
    assert instance.bound == set(world.models.specs) == set(ledger.specs)
    assert not ledger.device.use() and not ledger.host.use(), accounts
    assert accounts["transfers_in_flight"] == 0
    assert accounts["device_pages"] == 0
    assert accounts["host_slabs_leased"] <= 1
    assert instance.core.queued == instance.core.running == 0
    core = instance.core
    assert (core.handed if isinstance(core, PrefillCore) else core.hand_overs.handed) == 0, "KV is handed over for ever"
