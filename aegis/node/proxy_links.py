"""The proxies of a node as it speaks with them: all are told the same."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from aegis.core.ids import InstanceId, ModelId, ProxyId
from aegis.telemetry import model_counts
from aegis.telemetry.metrics.scrape import Family, lasting, total
from aegis.telemetry.model_counts import Tally
from aegis.transport.node_messages import InstanceLost, Noted, ProxyEnd, ToProxy
from proxy.routing.events import ForeignLoad, ModelLoad

NOTED_WITHIN_S = 2.0
"""A proxy that takes longer to note that an instance is lost is taken for lost itself."""

SCRAPED_WITHIN_S = 2.0


class ProxyLinks:
    """`on_silent` is to end a proxy that does not answer, whose `leave` follows; `missing` are the names of those that
    do not serve at the moment, `dead` of those that do not come up any more."""

    def __init__(self) -> None:
        self.on_silent: Callable[[ProxyId], None] = lambda proxy: None
        self.missing: Callable[[], list[str]] = list
        self.dead: Callable[[], list[str]] = list
        self._ends: dict[ProxyId, ProxyEnd] = {}
        self._unnoted: dict[tuple[InstanceId, int], set[ProxyId]] = {}
        self._noted = asyncio.Event()  # something was
        self._scraped: dict[ProxyId, tuple[Family, ...]] = {}
        self._lasting: tuple[Family, ...] = ()  # of those that are lost
        self._past: dict[ModelId, Tally] = {}  # the counts of lost proxies
        self._loads: dict[ProxyId, dict[InstanceId, ForeignLoad]] = {}
        self._sent_loads: dict[ProxyId, dict[InstanceId, ForeignLoad]] = {}  # of the others' loads, last

    def join(self, proxy: ProxyId, end: ProxyEnd) -> None:
        self._ends[proxy] = end
        self._loads[proxy], self._sent_loads[proxy] = {}, {}

    def leave(self, proxy: ProxyId) -> None:
        left = self._ends.pop(proxy)
        self._past = model_counts.total([*self._past.values(), *model_counts.lasting(left.tallies())])
        del self._loads[proxy], self._sent_loads[proxy]
        self._lasting = total([self._lasting, lasting(self._scraped.pop(proxy, ()))])
        for waiting in self._unnoted.values():
            waiting.discard(proxy)
        self._noted.set()
        self.share()

    def addresses(self) -> dict[ProxyId, str]:
        """The addresses at which they listen for instances."""
        return {proxy: end.address for proxy, end in self._ends.items()}

    def broadcast(self, message: ToProxy) -> None:
        for end in list(self._ends.values()):
            end.deliver(message)

    def answer(self, proxy: ProxyId, message: ToProxy) -> None:
        """One of them alone, if it is still there."""
        if proxy in self._ends:
            self._ends[proxy].deliver(message)

    async def lost(self, message: InstanceLost) -> None:
        """Returns when none of them will hear any more of what that process said; at once where all are here."""
        key = (message.instance, message.incarnation)
        waiting = self._unnoted[key] = set(self._ends)
        self.broadcast(message)
        try:
            async with asyncio.timeout(NOTED_WITHIN_S):
                await self._until_noted(waiting)
        except TimeoutError:
            for proxy in sorted(waiting):
                self.on_silent(proxy)
            await self._until_noted(waiting)
        del self._unnoted[key]

    def noted(self, proxy: ProxyId, message: Noted) -> None:
        self._unnoted.get((message.instance, message.incarnation), set()).discard(proxy)
        self._noted.set()

    async def scrapes(self) -> list[tuple[Family, ...]]:
        """The metrics of each, and what lasts of those that are lost. Of one that does not answer in time they are what
        it answered last."""
        scraping = {proxy: asyncio.create_task(end.scrape()) for proxy, end in self._ends.items()}
        await asyncio.wait(scraping.values(), timeout=SCRAPED_WITHIN_S)
        for proxy, task in scraping.items():
            if task.done() and proxy in self._ends:
                self._scraped[proxy] = task.result()
            task.cancel()
        return [self._lasting, *self._scraped.values()]

    async def cancel_response(self, key: str) -> bytes | None:
        """Ends the response of that key at the proxy that is generating it: how it ended, in JSON. None where none of
        them is."""
        asking = [asyncio.create_task(end.cancel_response(key)) for end in self._ends.values()]
        try:
            for answered in asyncio.as_completed(asking):
                if (response := await answered) is not None:
                    return response
            return None
        finally:
            for task in asking:
                task.cancel()

    def tallies(self) -> dict[ModelId, Tally]:
        """The counts of all proxies together, and of lost ones."""
        return model_counts.total(
            [*self._past.values(), *(each for end in self._ends.values() for each in end.tallies())]
        )

    def loads(self, proxy: ProxyId, loads: Iterable[ForeignLoad]) -> None:
        """Takes the load of the proxy's requests, of which `share` tells the others."""
        self._loads[proxy] = {load.instance: load for load in loads}

    def share(self) -> None:
        """Tells each proxy what all others have, where that has changed."""
        totals = defaultdict[InstanceId, _Total](_Total)
        for loads in self._loads.values():
            for load in loads.values():
                totals[load.instance].add(load)
        for proxy, end in self._ends.items():
            own, sent = self._loads[proxy], self._sent_loads[proxy]
            now = {instance: total.besides(instance, own.get(instance)) for instance, total in totals.items()}
            for instance in dict.fromkeys([*sent, *now]):
                load = now.get(instance, ForeignLoad(instance, 0, ()))
                if load != sent.get(instance, ForeignLoad(instance, 0, ())):
                    end.deliver(load)
            self._sent_loads[proxy] = now

    async def _until_noted(self, waiting: set[ProxyId]) -> None:
        while waiting:
            self._noted.clear()
            await self._noted.wait()


class _Total:
    """The load of all proxies at one instance. What priorities are worth are sums of powers of two, and so exact."""

    def __init__(self) -> None:
        self._prefill_ns = 0
        self._proxies = Counter[ModelId]()
        self._models: dict[ModelId, ModelLoad] = {}

    def add(self, load: ForeignLoad) -> None:
        self._prefill_ns += load.prefill_ns
        for each in load.models:
            before = self._models.get(each.model)
            self._models[each.model] = _together(before, each, 1) if before else each
            self._proxies[each.model] += 1

    def besides(self, instance: InstanceId, own: ForeignLoad | None) -> ForeignLoad:
        """Without one of them."""
        if own is None:
            return ForeignLoad(instance, self._prefill_ns, tuple([self._models[m] for m in sorted(self._models)]))
        mine, others = {each.model: each for each in own.models}, list[ModelLoad]()
        for model in sorted(self._models):
            if model not in mine:
                others.append(self._models[model])
            elif self._proxies[model] > 1:
                others.append(_together(self._models[model], mine[model], -1))
        return ForeignLoad(instance, self._prefill_ns - own.prefill_ns, tuple(others))


def _together(one: ModelLoad, other: ModelLoad, times: int) -> ModelLoad:
    """The load of several proxies' requests to one model, with so many times the `other`."""
    return ModelLoad(
        one.model,
        one.requests + times * other.requests,
        one.tokens + times * other.tokens,
        prefill_ns=one.prefill_ns + times * other.prefill_ns,
        more_worth=one.more_worth + times * other.more_worth,
    )
