"""The suites that compare policies cell by cell: at which rates, deadlines, lengths and links, on what trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from aegis.core.model import Slo
from aegis.core.role import Roles
from bench.simulate.cells.search import Aim, Search
from bench.simulate.contenders import APART, OURS, UNDIVIDED, Contender, ours, rivals
from bench.simulate.setting import Setting, models_of
from bench.simulate.tuning import ON_A_SPLIT, Knob, Parameters
from bench.workloads import spec

SPLITS = {"6+10": 6, "4+12": 4, "3+13": 3}
"""Of 16 GPUs, how many prefill: on each, ours and `aegaeon` are compared."""
SPLIT_RIVAL = "aegaeon"
_PREFILL_SHARES = {"1/8": 0.125, "1/4": 0.25, "3/8": 0.375}
_RATES = {"0.1rps": ("rps=0.1", 32), "0.5rps": ("rps=0.5", 16)}  # and where to begin
_SCALES = {"slo1": 1.0, "slo0.5": 0.5, "slo0.3": 0.3}  # of both deadlines
_LENGTHS = {"sharegpt": "", "ix2": ",ix=2", "ox2": ",ox=2"}
_LINKS: dict[str, dict[str, Any]] = {
    **{f"link{gb}": {"link_bytes_per_s": gb * 10**9} for gb in (16, 25, 55)},
    "switch0.1": {"switch_ns": 100_000_000},
}
_SECONDS, _TINY_SECONDS = 600, 2
_GPUS = 16
_STEP, _LIMIT = 2, 1024
_TINY = 4  # models or GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """`name` is parts joined by `/`, which `--only` looks into. A search starts at `start`."""

    name: str
    setting: Setting
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSuite:
    """A suite in which the best of each contender is searched for in every cell; `aim` says of what."""

    name: str
    title: str
    aim: Aim
    contenders: tuple[Contender, ...]
    cells: tuple[Cell, ...]
    tiny: bool = False

    @property
    def gpus(self) -> int | None:
        """The number of GPUs that all cells have, where models are counted."""
        return _GPUS if self.aim is Aim.MODELS else None

    def rivals_of(self, policy: str) -> list[Contender]:
        """All that know no more than it does."""
        return [each for each in self.contenders if each.policy != policy and (each.rival or each.policy == OURS)]

    def search(
        self,
        cell: Cell,
        contender: Contender,
        seed: int,
        hint: float | None,
        parameters: Parameters | None = None,
        screen_at: float | None = None,
    ) -> Search:
        """`hint`: where another seed ended, and `parameters` what it was tuned to. `screen_at`: where the best rival
        ended; what misses the goal there is searched no further."""
        setting = contender.of(replace(cell.setting, seed=seed))
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
            knobs=contender.knobs,
            parameters=parameters,
            screen_at=None if screen_at is None else max(int(screen_at) // step * step, step),
        )


def on_split(policy: str, split: str) -> str:
    return f"{policy} {split}"


def _on_splits() -> Iterator[Contender]:
    """Ours and `aegaeon`, tuned in all but the split. They are no rivals: the tuned one has its best split."""
    for text, prefill in SPLITS.items():
        changes = {"roles": Roles.FIXED, "prefill": prefill, "decode": _GPUS - prefill}
        yield ours(on_split(OURS, text), **changes)
        yield Contender(
            name=on_split(SPLIT_RIVAL, text),
            policy=SPLIT_RIVAL,
            rival=False,
            changes=tuple(changes.items()),
            knobs=ON_A_SPLIT,
        )


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
            ours(),
            ours(UNDIVIDED, lanes=False),
            *_on_splits(),
            *rivals(),
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
    """One cell: what `setting` asks for. Raises UserError if its workload or trace cannot be read."""
    return CellSuite(
        name="gpus",
        title="GPUs for 99 % of first tokens and 90 % of tokens on time",
        aim=Aim.GPUS,
        contenders=(ours(), *rivals()),
        cells=(Cell(name=name, setting=setting, start=max(models_of(setting) // 4, 1)),),
        tiny=tiny,
    )


def untuned(suite: CellSuite) -> CellSuite:
    """The suite with every contender as it is; where prefill is apart, with several shares of it."""
    contenders = []
    for each in suite.contenders:
        if each.policy in APART:
            shares = {text: Knob("prefill_share", (share,), share) for text, share in _PREFILL_SHARES.items()}
            contenders += [replace(each, name=f"{each.name} {text}", knobs=(knob,)) for text, knob in shares.items()]
        else:
            contenders.append(replace(each, knobs=()))
    return replace(suite, contenders=tuple(contenders))


CELL_SUITES: dict[str, Callable[..., CellSuite]] = {"cells": cells, "cells-links": cells_links}
SEARCHES = (*CELL_SUITES, "gpus")
