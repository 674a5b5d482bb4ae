"""Who is compared in a suite: ours and its rivals, each with how it is used."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from aegis.core.role import Roles
from aegis.policies import RECIPES
from bench.simulate.setting import Setting
from bench.simulate.tuning import GRIDS, Knob, Value

OURS = "least-slack"
UNDIVIDED = f"{OURS}, undivided"
"""On GPUs without lanes."""
MARKETS = tuple(name for name in RECIPES if name != OURS)
"""All serve several models. Those whose papers serve one take Aegaeon's turns."""

APART = tuple(name for name in MARKETS if RECIPES[name].roles is Roles.FIXED)
"""Those of them that need prefill and decode instances."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A policy with `changes`, fields of a setting. `rival`: ours has to be ahead of it; oracles are shown, but are
    none. It is tuned in its `knobs`."""

    name: str
    policy: str
    rival: bool
    changes: tuple[tuple[str, Any], ...] = ()
    knobs: tuple[Knob, ...] = ()

    def of(self, setting: Setting) -> Setting:
        return replace(setting, policy=self.policy, **dict(self.changes))

    @property
    def defaults(self) -> dict[str, Value]:
        return {knob.name: knob.default for knob in self.knobs}

    @property
    def apart(self) -> bool:
        return self.policy in APART or dict(self.changes).get("roles") is Roles.FIXED


def ours(name: str = OURS, **changes: Any) -> Contender:
    return Contender(name=name, policy=OURS, rival=False, changes=tuple(changes.items()))


def rivals() -> tuple[Contender, ...]:
    """All of the others, each tuned where it has parameters."""
    return tuple(
        Contender(name=name, policy=name, rival="oracle" not in name, knobs=GRIDS.get(name, ())) for name in MARKETS
    )
