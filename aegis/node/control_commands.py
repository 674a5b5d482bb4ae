"""The commands of the bus to a node, and their execution."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aegis.config.sizes import format_size
from aegis.control.messages import (
    Add,
    Command,
    Drain,
    LoadModel,
    MoveModel,
    Pin,
    Remove,
    Resume,
    SetLimit,
    SetRole,
    Unpin,
)
from aegis.core.clock import Clock
from aegis.core.errors import UserError
from aegis.core.ids import InstanceId, ModelId
from aegis.core.messages import Ping
from aegis.core.model import ModelChange
from aegis.core.role import Role
from aegis.node.node import Node
from aegis.node.queries import NodeQueries
from aegis.policies import recipe
from aegis.telemetry.logs import log
from aegis.telemetry.memory_report import limit_told
from aegis.transport.node_messages import InstanceGivenUp
from memory.image_cache import State
from proxy.routing import events as routing

_DRAIN_S = 60.0
_POLL_S = 0.02
_logger = logging.getLogger(__name__)


class NodeControl:
    """Implements `aegis.control.bus.Node`."""

    def __init__(self, node: Node, queries: NodeQueries, clock: Clock) -> None:
        self._node = node
        self._queries = queries
        self._pool = node.pool
        self._images = node.images
        self._clock = clock
        self._changing = asyncio.Lock()  # one command at a time examines and changes the set of serving instances
        self._admitting = asyncio.Lock()
        self._expected = 0  # instances that are being admitted

    def probe(self, instance: InstanceId) -> None:
        if instance in self._node.up:
            self._node.post(instance, Ping())

    def fence(self, instance: InstanceId, incarnation: int, why: str) -> None:
        if instance in self._pool.roles() and self._pool.fence(instance, incarnation):
            log(_logger, logging.ERROR, "instance ended by force", {"instance": instance, "why": why})

    def has(self, instance: InstanceId) -> bool:
        return instance in self._pool.roles()

    async def do(self, instance: str, command: Command | Add) -> str:
        if isinstance(command, Add):
            return await self._add(command)
        name = InstanceId(instance)
        self._find(name)
        match command:
            case Drain():
                async with self._alone(name):
                    return await self._drain(name)
            case Resume():
                async with self._alone(name):
                    return self._resume(name)
            case SetRole(role, timeout_s):
                return await self._set_role(name, role, timeout_s)
            case Remove():
                async with self._alone(name):
                    return await self._remove(name)
            case SetLimit(nbytes, timeout_s):
                given_bytes = await self._queries.limit_memory(instance, nbytes, timeout_s=timeout_s)
                told = limit_told(self._queries.memory(), instance, nbytes)
                return f"{told}; it gave back {format_size(given_bytes)}"
            case Pin(model):
                return await self._pin(self._model(model))
            case Unpin(model):
                await self._node.catalogue.change(self._model(model), ModelChange(pinned=False))
                return f"{model} may leave the model cache"
            case LoadModel(model, timeout_s):
                return await self._load(self._model(model), timeout_s)
            case MoveModel(model, timeout_s):
                return await self._move(self._model(model), name, timeout_s)

    # --- instances ----------------------------------------------------------------------------------------------------

    def _find(self, instance: InstanceId) -> None:
        """Raises UserError if there is none of that name."""
        if not self.has(instance):
            raise UserError(f"there is no instance named '{instance}', only {', '.join(sorted(self._pool.roles()))}")

    @asynccontextmanager
    async def _alone(self, instance: InstanceId) -> AsyncIterator[None]:
        """Only one command at a time examines and changes the set of instances that go on serving. Raises UserError if
        the command before has removed the instance."""
        async with self._changing:
            self._find(instance)
            yield

    async def _drain(self, instance: InstanceId) -> str:
        if self._pool.drained(instance):
            return f"{instance} is drained already"
        self._check_roles(instance, None)
        await self._end(instance)
        self._node.proxies.broadcast(InstanceGivenUp(instance))
        return f"{instance} is drained"

    def _resume(self, instance: InstanceId) -> str:
        if not self._pool.drained(instance):
            raise UserError(f"{instance} is not drained")
        self._pool.resume(instance, self._pool.role(instance))
        return f"{instance} is being started"

    async def _set_role(self, instance: InstanceId, role: Role, timeout_s: float) -> str:
        async with self._alone(instance):
            if self._pool.role(instance) is role:
                return f"{instance} is {role} already"
            if self._pool.drained(instance):
                raise UserError(f"{instance} is drained; resume it first")
            self._check_roles(instance, role)
            await self._end(instance, returns=True)
            self._pool.resume(instance, role)
        try:
            async with asyncio.timeout(timeout_s):
                while instance in self._pool.coming():
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise UserError(f"{instance} is {role} now and has not come up within {timeout_s:g} s") from None
        if not self.has(instance) or instance in self._pool.dead():
            raise UserError(f"{instance} is {role} now and does not come up; see the log")
        return f"{instance} is {role}"

    async def _add(self, wanted: Add) -> str:
        async with self._admitting:
            names = await self._admit(wanted)
        refusals = await asyncio.gather(*(self._joined(name, wanted.timeout_s) for name in names))
        joined = [name for name, refusal in zip(names, refusals, strict=True) if not refusal]
        serves = f"{', '.join(joined)} {'serves' if len(joined) == 1 else 'serve'}" if joined else ""
        refused = "; ".join(filter(None, refusals))
        if refused:
            raise UserError(f"{refused}; {serves}" if serves else refused)
        return serves

    async def _admit(self, wanted: Add) -> list[InstanceId]:
        """All of them, or none. Raises UserError."""
        if self._node.draining:
            raise UserError("the server is shutting down")
        if recipe(self._node.policy).divides_memory:
            raise UserError(f"{self._node.policy} divides the memory among the instances at the start: none can join")
        roles = {*self._pool.roles().values()}
        role = wanted.role or (Role.MIXED if Role.MIXED in roles else None)
        if role is None:
            raise UserError("say in which role: the pool has prefill and decode instances")
        if (role is Role.MIXED) is not (Role.MIXED in roles):
            raise _unfit({*roles, role})
        self._expected = wanted.count
        try:
            self._share()
            return await self._pool.admit(role, wanted.count)
        finally:
            self._expected = 0
            self._share()

    def _share(self) -> None:
        """Shares memory out among all instances. Raises UserError, with nothing changed, if promises to clients forbid
        more instances."""
        self._node.catalogue.share_among(len(self._pool.roles()) + self._expected)

    async def _joined(self, instance: InstanceId, timeout_s: float) -> str:
        """Empty when it serves, else why it does not; then it is no more."""
        refusal = ""
        try:
            async with asyncio.timeout(timeout_s):
                while instance in self._pool.coming() and not self._pool.failure(instance):
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            refusal = f"{instance} has not come up within {timeout_s:g} s"
        async with self._changing:
            if instance not in self._pool.coming():
                return ""
            if failure := self._pool.failure(instance):
                refusal = f"{instance} did not come up: {failure}"
            await self._forget(instance)
        return refusal

    async def _remove(self, instance: InstanceId) -> str:
        if instance in self._serving():
            self._check_roles(instance, None)
            await self._end(instance)
        elif not self._pool.drained(instance) and instance not in self._pool.dead():
            raise UserError(f"{instance} is being started; try again when it is up")
        await self._forget(instance)
        return f"{instance} is removed"

    async def _forget(self, instance: InstanceId) -> None:
        await self._pool.remove(instance)
        self._node.removed(instance)
        self._share()

    async def _end(self, instance: InstanceId, *, returns: bool = False) -> None:
        """Drains the instance: its requests go on elsewhere. Whether it `returns` soon."""
        if instance not in self._node.up or instance in self._pool.coming():
            raise UserError(f"{instance} is not up; try again when it is")
        self._pool.drain(instance, returns=returns)
        try:
            async with asyncio.timeout(_DRAIN_S):
                while not self._pool.drained(instance):
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            self._pool.resume(instance, self._pool.role(instance))
            raise UserError(f"{instance} has not ended within {_DRAIN_S:g} s; it goes on") from None

    def _serving(self) -> dict[InstanceId, Role]:
        """The staying instances without those that are still to come."""
        coming = self._pool.coming()
        return {name: role for name, role in self._pool.staying().items() if name not in coming}

    def _check_roles(self, instance: InstanceId, role: Role | None) -> None:
        """Raises UserError where, with this instance in this role or in none, those that stay could not serve together,
        or those that serve could not until the others have come."""
        for others in (self._pool.staying(), self._serving()):
            others.pop(instance, None)
            roles = {*others.values(), *([role] if role else [])}
            if not roles:
                raise UserError(f"{instance} is the last one; nobody would serve any more")
            if roles != {Role.MIXED} and roles != {Role.PREFILL, Role.DECODE}:
                raise _unfit(roles)

    # --- models -------------------------------------------------------------------------------------------------------

    def _model(self, name: str) -> ModelId:
        if name not in self._queries.models():
            raise UserError(f"there is no model named '{name}'")
        return ModelId(name)

    async def _pin(self, model: ModelId) -> str:
        await self._node.catalogue.change(model, ModelChange(pinned=True))
        return f"{model} is pinned in the model cache"

    async def _move(self, model: ModelId, target: InstanceId, timeout_s: float) -> str:
        if self._pool.role(target) is Role.PREFILL:
            raise UserError(f"{target} only prefills: name a decode or mixed instance")
        if not self._node.serves(target):
            raise UserError(f"{target} is not up; try again when it is")
        try:
            async with asyncio.timeout(timeout_s):
                done = await self._node.moves.move(routing.MoveModel(model, target), "operator")
        except TimeoutError:
            raise UserError(
                f"not all requests of {model} are at {target} after {timeout_s:g} s; they still go"
            ) from None
        if done.why:
            raise UserError(f"{model} was not moved to {target}: {done.why}")
        return (
            f"{model} goes on at {target}: {done.moved} requests moved with their KV, {done.replayed} prefilled again"
        )

    async def _load(self, model: ModelId, timeout_s: float) -> str:
        self._node.catalogue.used(model, self._clock.now_ns())
        try:
            async with asyncio.timeout(timeout_s):
                while self._images.state(model) is not State.CACHED:
                    await asyncio.sleep(_POLL_S)
                    self._model(model)
        except TimeoutError:
            raise UserError(
                f"{model} is not in the model cache after {timeout_s:g} s: others are used more; pin it, or raise "
                "--model-cache"
            ) from None
        return f"{model} is in the model cache"


def _unfit(roles: set[Role]) -> UserError:
    has = ", ".join(sorted(roles))
    return UserError(f"the pool would have {has} instances alone; it needs prefill and decode, or mixed only")
