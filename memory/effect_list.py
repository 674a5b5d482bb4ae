"""The effects of an instance's core on one event: effects on memory go before those that rely on them."""

from __future__ import annotations

from aegis.core.effects import Effect, Send
from aegis.core.messages import FromInstance
from memory.ledger import Ledger


class EffectList:
    """The effects so far, in the order in which the shell is to perform them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._effects: list[Effect] = []

    def append(self, effect: Effect) -> None:
        """One that does not rely on what the ledger has noted down so far."""
        self._effects.append(effect)

    def send(self, message: FromInstance) -> None:
        """The receiver finds the earlier memory effects performed."""
        self.flush()
        self._effects.append(Send(message))

    def flush(self) -> None:
        """Puts the memory effects so far next."""
        if self._ledger.effects:
            self._effects += self._ledger.drain()

    def take(self) -> list[Effect]:
        """All of them; the list is empty then."""
        effects, self._effects = self._effects, []
        return effects
