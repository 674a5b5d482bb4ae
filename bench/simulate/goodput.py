"""MuxWise's evaluation (§4.2.3, §4.3): the highest rate of requests at which a policy keeps the time between tokens.

A rate is kept if 99 % of all gaps between two tokens are within the target and the system is stable: 99 % of first
tokens come within a time that leaves room for the task's longest prompts. The paper stops where "the serving system
becomes unstable or fails to meet the TBT SLO target"; it does not say from when on it calls a system unstable. Arrivals
are Poisson, as in those sections.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace as replace_fields

from aegis.core.errors import UserError
from aegis.core.model import Slo
from aegis.core.role import Roles
from aegis.sim.catalogue import models
from aegis.sim.gpu_costs import gpu
from aegis.sim.rival_engines import NANO_BATCHES, elastic, nvlink
from bench.simulate.cells.search import boundary
from bench.simulate.figures import Figures, figures
from bench.simulate.setting import Setting, run
from bench.workloads import prefix_traces, spec
from bench.workloads.arrival import model_name

_ELASTIC = "elastic"
_STEPS = 20  # of a panel's first rate: how fine the search is
_WIDE_BATCH = 512
"""Sequences in a batch, for all alike: more than a rate that is kept ever needs. A core that has more of one model than
go in a batch decodes two batches in turns, where a server of the paper would let prompts wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """`budgets` of tokens in a step, of which the best one counts, as it is tuned offline for each workload (§4.1)."""

    name: str
    policy: str
    lanes: bool = False
    budgets: tuple[int, ...] = ()
    budget_of: str | None = None  # the contender that it has the budget of
    apart: bool = False  # prefill and decode instances, each with half of the GPUs
    options: tuple[tuple[str, Any], ...] = ()  # fields of the policy
    engine: str | None = None  # of `aegis.sim.rival_engines`; `elastic` has as many groups as the panel says
    reuses: bool = True  # prefixes of other requests
    publishable: bool = False  # `--as-published` changes it


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A task on a model; a search begins at `rps`. `published`: MuxWise's goodput over that of each contender."""

    task: str
    model: str
    gpu: str
    ways: int = 8
    tbt_ms: int
    rps: float
    seconds: int = 60
    ttft_s: int = 10  # within which 99 % of first tokens come while the system is stable
    published: Mapping[str, float]
    prompts: str | None = None  # a trace of them, in place of those that are drawn

    @property
    def name(self) -> str:
        return f"{self.task}/{self.model}/{self.gpu}x{self.ways}"

    @property
    def groups(self) -> int:
        """The groups of GPUs that LoongServe has: TP 4 for a 70B model and TP 2 for an 8B one (MuxWise §4.1)."""
        return self.ways // (2 if self.model == "llama-3-8b" else 4)

    def cache_tokens(self, contender: Contender) -> int | None:
        """The prefixes of a trace that its GPUs can keep: all the memory that weights leave, as SGLang uses it. With
        prefill and decode apart, those of the prefill instance. None: what a drawn prompt says is reused, is."""
        if not contender.reuses:
            return 0
        if self.prompts is None:
            return None
        device = gpu(f"{self.gpu}x{self.ways // 2 if contender.apart else self.ways}")
        [spec] = models(self.model, asked=(model_name(0),))
        return (device.memory_bytes - spec.manifest.image_bytes) // spec.manifest.kv.token_bytes

    def _engine(self, contender: Contender) -> str | None:
        if contender.apart:
            return nvlink(self.ways // 2)
        return elastic(self.groups) if contender.engine == _ELASTIC else contender.engine

    def setting(
        self,
        contender: Contender,
        rps: float,
        *,
        budget: int | None = None,
        seed: int = 0,
        as_published: bool = False,
    ) -> Setting:
        tbt_ns = self.tbt_ms * 1_000_000
        return Setting(
            policy=contender.policy,
            workload=f"poisson:models=1,rps={rps:g},duration={self.seconds},lengths={self.task}",
            gpu=f"{self.gpu}x{self.ways // 2 if contender.apart else self.ways}",
            models=self.model,
            slo=Slo(tbt_ns=tbt_ns, gap_ns=tbt_ns),
            mixed=1,
            prefill=1,
            decode=1,
            roles=Roles.FIXED if contender.apart else Roles.AUTO,
            lanes=contender.lanes,
            max_batch=_WIDE_BATCH,
            budget_tokens=budget,
            seed=seed,
            as_published=as_published and contender.publishable,
            options=contender.options,
            engine=self._engine(contender),
            prompts=self.prompts,
            cache_tokens=self.cache_tokens(contender),
        )


class GoodputResult(Struct, frozen=True):
    """The highest rate that is kept, and the figures there; 0 and none where not even the lowest is.
    `ours_ttft_p99_ms` is of our policy at the same rate."""

    contender: str
    rps: float
    budget: int | None
    at: Figures | None
    ours_ttft_p99_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """For the highest rate that a contender keeps: in steps that grow, then by bisection. `tiny`: over 10 s only."""

    panel: Panel
    contender: Contender
    tiny: bool = False
    seed: int = 0
    as_published: bool = False
    budget: int | None = None  # of another contender, which has it tuned

    def ours_at(self, rps: float) -> float | None:
        """99 % of our policy's first tokens come within so many milliseconds. Raises UserError."""
        return figures(run(self._setting(OURS, rps, None))).ttft_p99_ms

    def found(self) -> GoodputResult:
        """Raises UserError."""
        of = [self._at(budget) for budget in self.contender.budgets or (self.budget,)]
        return max(of, key=lambda result: result.rps)

    def _at(self, budget: int | None) -> GoodputResult:
        step, kept = self.panel.rps / _STEPS, dict[int, Figures]()

        def keeps(at: int) -> bool:
            found = figures(run(self._setting(self.contender, at * step, budget), keep_times=True))
            if keeps_target(found, self.panel):
                kept[at] = found
            return at in kept

        start, limit = (2, 4) if self.tiny else (_STEPS, 100 * _STEPS)
        low, _ = boundary(keeps, start=start, width=max(start // 4, 1), step=1, limit=limit)
        return GoodputResult(self.contender.name, round(low * step, 4), budget, kept.get(low))

    def _setting(self, contender: Contender, rps: float, budget: int | None) -> Setting:
        setting = self.panel.setting(contender, rps, budget=budget, seed=self.seed, as_published=self.as_published)
        if not self.tiny:
            return setting
        assert setting.workload
        return replace(setting, workload=spec.override(setting.workload, "duration", "10"))


def keeps_target(found: Figures, panel: Panel) -> bool:
    gap_ms, ttft_ms = found.tbt_p99_ms, found.ttft_p99_ms
    in_time = gap_ms is None or gap_ms <= panel.tbt_ms
    return in_time and not found.failed and (ttft_ms is None or ttft_ms <= panel.ttft_s * 1e3)


MUXWISE = Contender(name="muxwise", policy="muxwise", lanes=True, publishable=True)
MUXWISE_LIVE = Contender(name="muxwise, live", policy="muxwise", lanes=True)
"""As it runs on an instance of aegis, whatever the other one does."""
OURS = Contender(name="least-slack", policy="least-slack", lanes=True)
CHUNKED = Contender(name="chunked-prefill", policy="chunked-prefill", budgets=(256, 384, 512, 768, 1024, 2048))
SGLANG_PD = Contender(name="sglang-pd", policy="aegaeon", apart=True)
"""Static disaggregation 1:1, as MuxWise runs SGLang."""
NANOFLOW = Contender(name="nanoflow", policy="chunked-prefill", budget_of=CHUNKED.name, engine=NANO_BATCHES)
"""With "the same token budget as chunked-prefill" (§4.1)."""
LOONGSERVE = Contender(
    name="loongserve",
    policy="muxwise",
    lanes=True,
    options=(("layer_wise", False),),
    engine=_ELASTIC,
    reuses=False,
)
"""Decodes have the fewest groups of GPUs that keep the target, prompts the others, and run whole."""


def _ablation(name: str, **options: Any) -> Contender:
    return Contender(name=f"muxwise, {name}", policy="muxwise", lanes=True, options=tuple(options.items()))


ABLATIONS = (
    _ablation("no guard", guarded=False),
    _ablation("whole prompts", layer_wise=False),
    *(_ablation(f"share {share // 10} %", fixed=share) for share in (300, 600)),
)
"""Of MuxWise: a step beside a prefill is taken for one alone on the whole device; prompts are not run in layers, which
are pieces here; the decode always has the same share."""

_ALL = (MUXWISE, MUXWISE_LIVE, OURS, CHUNKED, NANOFLOW, LOONGSERVE, SGLANG_PD, *ABLATIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputSuite:
    name: str
    title: str
    panels: tuple[Panel, ...]
    contenders: tuple[Contender, ...]


def _suite(name: str, title: str, *panels: Panel) -> GoodputSuite:
    return GoodputSuite(name=name, title=title, panels=panels, contenders=_ALL)


def of_traces(suite: GoodputSuite, directory: Path) -> GoodputSuite:
    """The suite with the prompts of recorded traces. Raises UserError."""
    if not all(panel.task in prefix_traces.NAMES for panel in suite.panels):
        raise UserError(f"--trace-dir is not of --suite {suite.name}: its prompts are drawn")
    panels = [replace(each, prompts=str(prefix_traces.found(directory, each.task))) for each in suite.panels]
    for panel in panels:
        assert panel.prompts
        prefix_traces.read(Path(panel.prompts))  # what is wrong in it is said before anything runs
    return replace(suite, panels=tuple(panels))


def _panel(task: str, model: str, rps: float, gpu: str = "a100", *, seconds: int = 60, **published: float) -> Panel:
    """The targets are those of §4.1; so many seconds that there are some hundred requests."""
    tbt_ms = 50 if model == "llama-3-8b" else 100
    named = {name.replace("_", "-"): ratio for name, ratio in published.items()}
    long = task == "loogle" or (task == "conversation" and model == "llama-3-70b")
    ttft_s = 60 if long else 10  # prompts of 81 K tokens take 15 s alone, and some of Conversation are as long
    return Panel(
        task=task, model=model, gpu=gpu, tbt_ms=tbt_ms, rps=rps, seconds=seconds, ttft_s=ttft_s, published=named
    )


SUITES = {
    suite.name: suite
    for suite in (
        _suite(
            "mux-tool-agent",
            "MuxWise Figure 15: Tool&Agent",
            _panel("tool-agent", "llama-3-8b", 8.0, chunked_prefill=2.6, nanoflow=5.2, loongserve=2.0, sglang_pd=1.3),
            _panel(
                "tool-agent",
                "llama-3-70b",
                1.0,
                seconds=300,
                chunked_prefill=3.06,
                loongserve=2.62,
                sglang_pd=1.62,
            ),
            _panel("tool-agent", "llama-3-8b", 12.0, "h100"),
        ),
        _suite(
            "mux-conversation",
            "MuxWise Figure 14: Conversation, at Poisson arrivals",
            _panel("conversation", "llama-3-8b", 8.0),
            _panel("conversation", "llama-3-70b", 1.0, seconds=300),
        ),
        _suite(
            "mux-sharegpt",
            "MuxWise Figure 17: ShareGPT",
            _panel(
                "mux-sharegpt", "llama-3-70b", 10.0, chunked_prefill=1.9, nanoflow=1.73, loongserve=9.5, sglang_pd=1.46
            ),
        ),
        _suite(
            "mux-loogle",
            "MuxWise Figure 17: LooGLE",
            _panel(
                "loogle",
                "llama-3-70b",
                0.1,
                seconds=2000,
                chunked_prefill=1.71,
                nanoflow=2.0,
                loongserve=1.33,
                sglang_pd=2.0,
            ),
        ),
        _suite(
            "mux-openthoughts",
            "MuxWise Figure 17: OpenThoughts",
            _panel("openthoughts", "llama-3-70b", 1.0, chunked_prefill=2.0, nanoflow=2.0, sglang_pd=2.0),
        ),
    )
}
"""Ratios are those of Figure 15 for Tool&Agent and of §4.3 for the others."""


def found(search: Search) -> GoodputResult:
    """Does the search: a function for processes that are given searches."""
    result = search.found()
    return replace_fields(result, ours_ttft_p99_ms=search.ours_at(result.rps)) if result.rps else result
