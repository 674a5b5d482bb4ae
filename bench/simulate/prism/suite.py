"""The figures of Prism's evaluation (§7.2 to §7.5, and A.4) as suites: what each of them varies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from aegis.core.clock import NS_PER_S
from aegis.core.errors import UserError
from bench.simulate.prism.slos import scaled
from bench.simulate.setting import Setting
from bench.workloads import spec

TRACE = "arena27.csv.gz"
_TINY_SECONDS, _TINY_POINTS, _TINY_SHARE = 6, 2, 0.01
_TTFT_SCALE, _TPOT_SCALE = 5.0, 10.0
"""Of what a model reaches on a device of its own. The paper finds its 16 GPUs at 5 and 2 (§7.4); here models that share
a device take turns, so that none of several keeps twice its pace."""

_RESTARTING, _RESTART_NS = ("qlm", "serverlessllm"), 4 * NS_PER_S
""""Its inefficient swapping, which requires engine restart" (§7.4), and "the full cold-start process still dominates
request latency" (§7.2): how long that takes the paper does not say. Waking a 30B model takes vLLM 2.9 s, and starting
an engine far more."""


class Form(Enum):
    """The kind of measurement of each cell."""

    SHARES = "first tokens in time, and answers that keep the pace"
    TIMELINE = "traffic, tokens and KV over time"
    ACTIVATION = "how long a model takes to be there"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A policy with `changes`, fields of a setting."""

    name: str
    policy: str
    changes: tuple[tuple[str, Any], ...] = ()

    def of(self, setting: Setting) -> Setting:
        return replace(setting, policy=self.policy, **dict(self.changes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """`setting` without a policy, over the `values` of `key`: the load, the GPUs, or a scale of the deadlines."""

    name: str
    title: str
    setting: Setting
    key: str
    values: tuple[float, ...]
    ttft_scale: float = _TTFT_SCALE
    tpot_scale: float = _TPOT_SCALE


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One measurement."""

    panel: Panel
    at: float
    contender: Contender

    def setting(self, *, seed: int, tiny: bool = False, as_published: bool = False) -> Setting:
        """The simulation of the cell. As published, who swaps models starts an engine each time. Raises UserError."""
        setting, panel, at = replace(self.panel.setting, seed=seed), self.panel, self.at
        ttft_scale, tpot_scale = panel.ttft_scale, panel.tpot_scale
        match panel.key:
            case "load":
                setting = replace(setting, load=at)
            case "gpus":
                setting = replace(setting, mixed=int(at), prefill=1, decode=max(int(at) - 1, 1))
            case "ttft scale":
                ttft_scale = at
            case "both scales":
                ttft_scale, tpot_scale = ttft_scale * at, tpot_scale * at
            case _:
                raise AssertionError(panel.key)
        made = self.contender.of(scaled(_tiny(setting) if tiny else setting, ttft_scale, tpot_scale))
        return replace(made, switch_ns=_RESTART_NS) if as_published and made.policy in _RESTARTING else made


@dataclass(frozen=True, slots=True, kw_only=True)
class PrismSuite:
    """A figure."""

    name: str
    title: str
    form: Form
    panels: tuple[Panel, ...]
    contenders: tuple[Contender, ...]

    def cells(self, *, tiny: bool) -> Iterator[Cell]:
        """The cells of the suite, in order."""
        for panel in self.panels:
            for at in panel.values[:_TINY_POINTS] if tiny else panel.values:
                for contender in self.contenders:
                    yield Cell(panel=panel, at=at, contender=contender)


def _tiny(setting: Setting) -> Setting:
    if setting.workload:
        return replace(setting, workload=spec.override(setting.workload, "duration", str(_TINY_SECONDS)))
    return replace(setting, load=(setting.load or 1.0) * _TINY_SHARE)


_SMALL, _MEDIUM, _LARGE, _HUGE = "llama-3.2-1b", "llama-3.2-3b", "llama-3-8b", "qwen2.5-14b"
_EIGHT = (_SMALL, _LARGE, _MEDIUM, _LARGE, _SMALL, _MEDIUM, _LARGE, _MEDIUM)
_EIGHTEEN = (_LARGE, _SMALL, _MEDIUM) * 6
_ALL = (*((_MEDIUM, _SMALL, _LARGE, _SMALL, _HUGE, _MEDIUM, _SMALL, _MEDIUM) * 7), _MEDIUM, _SMALL)
"""58 models: of Table 3 the small ones, and 14B ones in place of those of 31B to 70B, which have several GPUs there."""


def _shapes(models: tuple[str, ...]) -> str:
    return ",".join(f"{name}:1" for name in models)


def _market(models: tuple[str, ...], rps: float, *, seconds: int = 180, **fields: Any) -> Setting:
    """Bursts of a few popular models and many others, in place of Hyperbolic's trace, which is not public."""
    workload = f"market:models={len(models)},rps={rps:g},duration={seconds}"
    return _setting(workload=workload, models=_shapes(models), **fields)


def _arena(file: Path, models: tuple[str, ...], **fields: Any) -> Setting:
    return _setting(trace=str(file), trace_models=len(models), models=_shapes(models), **fields)


def _setting(**fields: Any) -> Setting:
    return Setting(policy="", gpu="h100", **({"mixed": 2, "prefill": 1, "decode": 1} | fields))


OURS, PRISM, STATIC, MUX = "least-slack", "prism", "s-partition", "muxserve++"
ON_DEMAND = "prism, on demand"
"""Weights of idle models leave for others, and never by the clock: "if it remains idle and GPU resources become
constrained for other models" (§6.1)."""
_CONTENDERS = (
    Contender(name=OURS, policy=OURS),
    Contender(name=PRISM, policy=PRISM),
    Contender(name=ON_DEMAND, policy=PRISM, changes=(("placement_rules", (("idle_ns", None),)),)),
    *(Contender(name=name, policy=name) for name in (STATIC, MUX, "qlm", "serverlessllm")),
)
_PLACEMENT = (
    Contender(name=PRISM, policy=PRISM),
    Contender(name="prism, models stay", policy=PRISM, changes=(("placement", "none"),)),
)


def _ablated(name: str, **changes: Any) -> Contender:
    return Contender(name=f"prism, {name}", policy=PRISM, changes=tuple(changes.items()))


def _rules(**fields: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(fields.items())


_ABLATION = (
    *_PLACEMENT,
    _ablated("first come first served", options=(("arbitrates", False),)),
    *(_ablated(f"idle for {s} s", placement_rules=_rules(idle_ns=s * NS_PER_S)) for s in (5, 15, 180)),
    _ablated("none leaves", placement_rules=_rules(idle_ns=None)),
    *(_ablated(f"window of {s} s", placement_rules=_rules(window_ns=s * NS_PER_S)) for s in (10, 180)),
)
_LOADS, _ARENA_LOADS = (1, 2, 4), (2, 4, 8)
_SCALES = (5, 20)
_GPUS, _MANY_GPUS = (2, 3, 4), (8, 16, 24)


def suites(trace_dir: Path | None) -> dict[str, PrismSuite]:
    """By name. Panels of the trace are there if the directory is given. Raises UserError if it has no such file."""
    file = trace_dir / TRACE if trace_dir else None
    if file and not file.is_file():
        raise UserError(f"--trace-dir {trace_dir}: has no {TRACE}")
    made = (
        _suite("5", "attainment over load, deadlines and GPUs", _fig5(file)),
        PrismSuite(
            name="prism-fig6",
            title="Prism Figure 6: two models on one GPU, memory in fixed parts and shared",
            form=Form.TIMELINE,
            panels=(_two_models(),),
            contenders=tuple(Contender(name=name, policy=name) for name in (PRISM, STATIC)),
        ),
        replace(_suite("7", "with placement and without", _few(file, (2, 4), (8, 16))), contenders=_PLACEMENT),
        _suite("9", "58 models: attainment over GPUs", _fig9(file)),
        PrismSuite(
            name="prism-fig10",
            title="Prism Figure 10: activation of a model from host memory",
            form=Form.ACTIVATION,
            panels=(
                Panel(
                    name="h100",
                    title="one H100",
                    setting=_setting(workload="poisson:models=1,rps=1,duration=5", mixed=1),
                    key="load",
                    values=(1,),
                ),
            ),
            contenders=tuple(
                Contender(name=shape, policy=PRISM, changes=(("models", shape),))
                for shape in (_SMALL, _MEDIUM, _LARGE, _HUGE, "qwen2.5-32b")
            ),
        ),
        replace(
            _suite("ablation", "", _few(file, (4,), (8,), seconds=120)), name="prism-ablation", contenders=_ABLATION
        ),
    )
    return {suite.name: suite for suite in made}


def _suite(number: str, title: str, panels: tuple[Panel, ...]) -> PrismSuite:
    figure = f"Prism Figure {number}: {title}" if title else "Prism without its parts, and with other constants"
    return PrismSuite(name=f"prism-fig{number}", title=figure, form=Form.SHARES, panels=panels, contenders=_CONTENDERS)


def _few(
    file: Path | None, loads: tuple[float, ...], arena_loads: tuple[float, ...], **fields: int
) -> tuple[Panel, ...]:
    """Eight models on two GPUs, over load."""
    panels = [_panel("market/load", "bursts, 8 models on 2 GPUs", _market(_EIGHT, 0.5, **fields), "load", loads)]
    if file:
        panels.append(_panel("arena/load", "Arena, 8 models on 2 GPUs", _arena(file, _EIGHT), "load", arena_loads))
    return tuple(panels)


def _fig5(file: Path | None) -> tuple[Panel, ...]:
    panels = [
        *_few(file, _LOADS, _ARENA_LOADS),
        _panel("market/slo", "bursts, 8 models on 2 GPUs", _market(_EIGHT, 0.5, load=2.0), "both scales", (1, 4)),
        _panel("market/gpus", "bursts, 18 models", _market(_EIGHTEEN, 0.25, load=2.0), "gpus", _GPUS),
    ]
    if file:
        panels += [
            _panel("arena/slo", "Arena, 8 models on 2 GPUs", _arena(file, _EIGHT, load=4.0), "both scales", (1, 4)),
            _panel("arena/gpus", "Arena, 18 models", _arena(file, _EIGHTEEN, load=2.0), "gpus", _GPUS),
        ]
    return tuple(panels)


def _fig9(file: Path | None) -> tuple[Panel, ...]:
    """(a), and (b) as more curves over GPUs: at other deadlines of first tokens."""
    panels = []
    for scale in _SCALES:
        named = f"first token within {scale:g} x"
        market = _market(_ALL, 0.25)
        panels.append(_panel(f"market/x{scale:g}", f"bursts, {named}", market, "gpus", _MANY_GPUS, ttft_scale=scale))
    if file:
        models = tuple(_ALL[:27])
        setting = _arena(file, models)
        panels.append(_panel("arena/x5", "Arena, 27 models", setting, "gpus", (2, 4, 6, 8)))
    return tuple(panels)


def _panel(name: str, title: str, setting: Setting, key: str, values: tuple[float, ...], **fields: Any) -> Panel:
    return Panel(name=name, title=title, setting=setting, key=key, values=values, **fields)


def _two_models() -> Panel:
    """One model's traffic falls where the other's rises; neither part is large enough for both."""
    setting = _setting(
        workload="market:models=2,rps=1,duration=60,alpha=0,group=60,gap=0.1",
        models="llama-2-13b:2",
        mixed=1,
    )
    return _panel("market", "bursts of two 13B models on 1 GPU", setting, "load", (1,))
