"""Rivals used as well as they can be: each one's parameters, and the search for the best of them.

A lead counts against the best use of a rival. So each has a small grid of its own parameters, of which one after the
other is moved as long as more tokens are on time, until none improves any more. What was tried is kept with the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec import Struct

from aegis.core.clock import NS_PER_MS, NS_PER_S
from aegis.sim.gpu_costs import gpu
from bench.simulate.setting import Setting

Value = int | float
Parameters = Mapping[str, Value]
"""By the names of knobs."""

PROBES_MAX = 24
"""More than two rounds over the largest grid take where the defaults are good."""


@dataclass(frozen=True, slots=True)
class Knob:
    """A parameter: the values that are tried, ascending, among them the one that it has unless tuned. All of them are
    tried once if it `scans`, because the best of them may lie behind worse ones."""

    name: str
    values: tuple[Value, ...]
    default: Value
    scans: bool = False

    def __post_init__(self) -> None:
        assert self.default in self.values


class TuningProbe(Struct, frozen=True, omit_defaults=True):
    """`attainment` is what was compared: the share of tokens on time, or of a goal where `at` says with how many models
    or GPUs."""

    parameters: dict[str, Value]
    attainment: float
    at: int | None = None


class Tuned(Struct, frozen=True):
    """The best parameters, and all that were tried, in order."""

    parameters: dict[str, Value]
    probes: tuple[TuningProbe, ...]


_SHARE = Knob("prefill_share", tuple(part / 16 for part in range(2, 9)), 6 / 16, scans=True)
_GROUP = Knob("max_group_size", (2, 4, 8, 16, 32), 8)
_Q_MAX = Knob("q_max_s", (1, 2, 4, 8, 16), 4)
_SWITCHING = Knob("switching_share", (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6), 0.05)
_BATCH = Knob("max_batch", (8, 16, 32, 64, 128, 256), 64)
_WEIGHTS = Knob("weights_share", (0.5, 0.625, 0.75, 0.875, 0.9375), 0.75)
_PREEMPTS = Knob("preempts", (0, 1), 1)
_SLICE = Knob("slice_ms", (12, 25, 50, 100, 200), 50)
_BUDGET = Knob("budget_tokens", (256, 512, 1024, 2048, 4096), 512)

GRIDS: Mapping[str, tuple[Knob, ...]] = {
    "aegaeon": (_SHARE, _SWITCHING, _GROUP, _Q_MAX, _BATCH),
    "serverlessllm": (_BATCH,),
    "qlm": (_PREEMPTS, _BATCH),
    "muxserve": (_WEIGHTS, _SLICE, _BATCH),
    "prism": (_SLICE, _BATCH),
    "s-partition": (_WEIGHTS, _SLICE, _BATCH),
    "muxserve++": (_WEIGHTS, _SLICE, _BATCH),
    "dedicated": (_BATCH,),
    "prefill-first": (_SWITCHING, _Q_MAX, _BATCH),
    "decode-first": (_SWITCHING, _Q_MAX, _BATCH),
    "chunked-prefill": (_SWITCHING, _Q_MAX, _BUDGET, _BATCH),
    "muxwise": (_SWITCHING, _Q_MAX, replace(_BATCH, default=256)),
}
"""What each rival is tuned in, the most important first. The papers of the last two serve one model; here they take
Aegaeon's turns, and are tuned in these, too."""

_DEFAULTS = {knob.name: knob.default for name, knobs in GRIDS.items() if name != "muxwise" for knob in knobs}
"""What is not worth a word: of batches that most have."""

ON_A_SPLIT = tuple(knob for knob in GRIDS["aegaeon"] if knob is not _SHARE)
"""Of `aegaeon` where the numbers of instances are given."""


def climb(
    knobs: Sequence[Knob],
    score: Callable[[Parameters], float],
    *,
    start: Parameters | None = None,
    enough: float = 1.0,
    most: int = PROBES_MAX,
) -> Tuned:
    """From `start`, unless said the defaults: the best of what scans, then one knob after the other upwards as long as
    the score grows, else downwards; again from the first one until a round changes nothing, a score is `enough`, or
    `most` were tried. Of equal scores the first one counts."""
    best = {knob.name: knob.default for knob in knobs} if start is None else dict(start)
    scores: dict[tuple[Value, ...], float] = {}

    def tried(parameters: Parameters) -> float:
        at = tuple(parameters.values())
        if at not in scores:
            ended = len(scores) >= most or max(scores.values(), default=0.0) >= enough
            scores[at] = float("-inf") if ended else score(parameters)
        return scores[at]

    tried(best)
    for knob in [knob for knob in knobs if knob.scans]:
        best = max([best, *({**best, knob.name: value} for value in knob.values)], key=tried)
    improved = True
    while improved:
        improved = False
        for knob in knobs:
            for direction in (1, -1):
                moved = _moved(knob, best, direction, tried)
                if moved != best:
                    best, improved = moved, True
                    break
    names = list(best)
    probes = (
        TuningProbe(dict(zip(names, at, strict=True)), found) for at, found in scores.items() if found != float("-inf")
    )
    return Tuned(best, tuple(probes))


def fitted(knobs: Sequence[Knob], gpus: int) -> tuple[Knob, ...]:
    """The knobs, with each split of so many GPUs once: a climb ends where a step changes nothing."""
    return tuple(_splits(knob, gpus) if knob.name == _SHARE.name else knob for knob in knobs)


def _splits(knob: Knob, gpus: int) -> Knob:
    kept: dict[int, Value] = {}
    for share in (knob.default, *knob.values):
        kept.setdefault(prefill_gpus(share, gpus), share)
    return replace(knob, values=tuple(sorted(kept.values())))


def prefill_gpus(share: Value, gpus: int) -> int:
    """The number of GPUs that prefill: one at least and, where there are several, not all."""
    return max(min(round(share * gpus), gpus - 1), 1)


def _moved(
    knob: Knob, parameters: Parameters, direction: int, tried: Callable[[Parameters], float]
) -> dict[str, Value]:
    value = parameters[knob.name]
    best, at = dict(parameters), min(range(len(knob.values)), key=lambda index: abs(knob.values[index] - value))
    while 0 <= (at := at + direction) < len(knob.values):
        following = {**best, knob.name: knob.values[at]}
        if tried(following) <= tried(best):
            break
        best = following
    return best


def with_parameters(setting: Setting, parameters: Parameters) -> Setting:
    """The simulation with them; `setting.mixed` GPUs are divided where prefill is apart."""
    changes: dict[str, object] = {}
    options, turns, groups = dict(setting.options), dict(setting.turns), dict(setting.groups)
    for name, value in parameters.items():
        match name:
            case "prefill_share":
                prefill = prefill_gpus(value, setting.mixed)
                changes |= {"prefill": prefill, "decode": setting.mixed - prefill}
            case "max_batch" | "budget_tokens":
                changes[name] = int(value)
            case "max_group_size":
                groups[name] = int(value)
            case "q_max_s":
                turns["q_max_ns"] = round(value * NS_PER_S)
            case "switching_share":
                turns[name] = value
            case "slice_ms":
                options["slice_ns"] = round(value * NS_PER_MS)
            case "preempts":
                options[name] = bool(value)
            case "weights_share":
                options["weights_bytes_max"] = int(gpu(setting.gpu).memory_bytes * value)
            case _:
                raise AssertionError(name)
    given = {"options": options, "turns": turns, "groups": groups}
    changes |= {name: tuple(fields.items()) for name, fields in given.items()}
    return replace(setting, **changes)  # type: ignore[arg-type]


_WORDS: Mapping[str, Callable[[Value], str]] = {
    "budget_tokens": lambda value: f"steps of {value:g} tokens",
    "max_batch": lambda value: f"batches of {value:g}",
    "max_group_size": lambda value: f"groups of {value:g}",
    "q_max_s": lambda value: f"Q_MAX {value:g} s",
    "switching_share": lambda value: f"switching {value:.0%}",
    "preempts": lambda value: "not preempting",
    "slice_ms": lambda value: f"slices of {value:g} ms",
    "weights_share": lambda value: f"weights {value:.1%}",
}


def described(parameters: Parameters, gpus: int | None = None) -> str:
    """In a line what is not as it is unless tuned, and how many of `gpus` prefill, or which share where it is not said
    how many there are."""
    words = []
    for name, value in parameters.items():
        if name != "prefill_share":
            words += [_WORDS[name](value)] if value != _DEFAULTS[name] else []
        elif gpus is None:
            words.append(f"prefill {value:.1%}")
        else:
            prefill = prefill_gpus(value, gpus)
            words.append(f"{prefill}+{gpus - prefill}")
    return ", ".join(words)
