"""The suites that compare policies cell by cell: at which rates, deadlines, lengths and links, on what trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from aegis.core.model import Slo
from aegis.core.role import Roles
from aegis.policies import RECIPES
from bench.simulate.cells.search import Aim, Search
from bench.simulate.setting import Setting, models_of
from bench.workloads import spec

OURS = "least-slack"
OURS_SPLIT = f"{OURS} 6+10"
OURS_LANES = f"{OURS} lanes"
_MARKETS = [name for name, known in RECIPES.items() if name != OURS and not known.one_model]
"""The policies that are made for several models."""
_PREFILL_SHARES = {"1/8": 0.125, "1/4": 0.25, "3/8": 0.375}
_RATES = {"0.1rps": ("rps=0.1", 32), "0.5rps": ("rps=0.5", 16)}  # and where to begin
_SCALES = {"slo1": 1.0, "slo0.5": 0.5, "slo0.3": 0.3}  # of both deadlines
_LENGTHS = {"sharegpt": "", "ix2": ",ix=2", "ox2": ",ox=2"}
_LINKS: dict[str, dict[str, Any]] = {
    **{f"link{gb}": {"link_bytes_per_s": gb * 10**9} for gb in (16, 25, 55)},
    "switch0.1": {"switch_ns": 100_000_000},
}
_SECONDS, _TINY_SECONDS = 600, 2
_STEP, _LIMIT = 2, 1024
_TINY = 4  # models or GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A policy and how it is used. `rival`: ours has to be ahead of it; oracles are shown, but are none."""

    name: str
    policy: str
    rival: bool
    roles: Roles | None = None
    prefill_share: float = 0.375
    lanes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """`name` is parts joined by `/`, which `--only` looks into. A search starts at `start`."""

    name: str
    setting: Setting
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSuite:
    """In every cell each contender's best is searched for, `aim` says of what."""

    name: str
    title: str
    aim: Aim
    contenders: tuple[Contender, ...]
    cells: tuple[Cell, ...]
    tiny: bool = False

    def rivals_of(self, policy: str) -> list[Contender]:
        """All that know no more than it does."""
        return [each for each in self.contenders if each.policy != policy and (each.rival or each.policy == OURS)]

    def search(self, cell: Cell, contender: Contender, seed: int, hint: float | None) -> Search:
        """`hint`: where another seed ended."""
        setting = replace(cell.setting, policy=contender.policy, roles=contender.roles, seed=seed)
        setting = replace(setting, lanes=contender.lanes or None)
        if self.aim is Aim.GPUS:
            most = max(2 * models_of(setting), _TINY)
            start, step, limit = cell.start, 1, _TINY if self.tiny else most
        else:
            start, step, limit = cell.start, _STEP, _TINY if self.tiny else _LIMIT
        width = max(start // 2 // step * step, step)
        if hint is not None:
            start, width = max(round(hint / step) * step, step), 2 * step
        return Search(
            aim=self.aim,
            setting=setting,
            start=min(start, limit),
            width=width,
            step=step,
            limit=limit,
            prefill_share=contender.prefill_share,
        )


def _contender(policy: str, name: str = "", *, roles: Roles | None = None, prefill_share: float = 0.375) -> Contender:
    rival = policy != OURS and "oracle" not in policy
    return Contender(name=name or policy, policy=policy, rival=rival, roles=roles, prefill_share=prefill_share)


def _cell(rate: str, scale: str, length: str, link: str = "") -> Cell:
    keys, start = _RATES[rate]
    slo = Slo(ttft_ns=round(10e9 * _SCALES[scale]), tbt_ns=round(100e6 * _SCALES[scale]))
    workload = f"poisson:{keys}{_LENGTHS[length]},duration={_SECONDS}"
    setting = Setting(policy="", workload=workload, slo=slo, **_LINKS.get(link, {}))
    return Cell(name="/".join(filter(None, (rate, scale, length, link))), setting=setting, start=start)


def _tiny(suite: CellSuite) -> CellSuite:
    cells = []
    for cell in suite.cells:
        assert cell.setting.workload
        workload = spec.override(cell.setting.workload, "duration", str(_TINY_SECONDS))
        cells.append(replace(cell, setting=replace(cell.setting, workload=workload), start=_STEP))
    return replace(suite, cells=tuple(cells), tiny=True)


def cells(*, tiny: bool = False) -> CellSuite:
    """Rates, deadlines and lengths of requests, on 16 GPUs."""
    suite = CellSuite(
        name="cells",
        title="Models on 16 H800 with 90 % of tokens on time",
        aim=Aim.MODELS,
        contenders=(
            _contender(OURS),
            _contender(OURS, OURS_SPLIT, roles=Roles.FIXED),
            replace(_contender(OURS, OURS_LANES), lanes=True),
            *(_contender(name) for name in _MARKETS),
        ),
        cells=tuple(_cell(rate, scale, length) for rate in _RATES for scale in _SCALES for length in _LENGTHS),
    )
    return _tiny(suite) if tiny else suite


def cells_links(*, tiny: bool = False) -> CellSuite:
    """The same at the deadlines as they are, with other links and with 0.1 s that each switch takes."""
    suite = replace(
        cells(),
        name="cells-links",
        title="The same with links of 16, 25 and 55 GB/s, and with switches of 0.1 s",
        cells=tuple(_cell(rate, "slo1", length, link) for rate in _RATES for length in _LENGTHS for link in _LINKS),
    )
    return _tiny(suite) if tiny else suite


def gpus(setting: Setting, name: str, *, tiny: bool = False) -> CellSuite:
    """One cell: what `setting` asks for. Where prefill is apart, several shares of it are tried.

    Raises UserError if its workload or trace cannot be read."""
    apart = [name for name, known in RECIPES.items() if known.roles is Roles.FIXED]
    return CellSuite(
        name="gpus",
        title="GPUs for 99 % of first tokens and 90 % of tokens on time",
        aim=Aim.GPUS,
        contenders=(
            _contender(OURS),
            *(
                _contender(policy, f"{policy} {text}", prefill_share=share)
                for policy in apart
                for text, share in _PREFILL_SHARES.items()
            ),
            *(_contender(name) for name in _MARKETS if name not in apart),
        ),
        cells=(Cell(name=name, setting=setting, start=max(models_of(setting) // 4, 1)),),
        tiny=tiny,
    )


CELL_SUITES: dict[str, Callable[..., CellSuite]] = {"cells": cells, "cells-links": cells_links}
SEARCHES = (*CELL_SUITES, "gpus")
