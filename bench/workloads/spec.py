"""`--workload SPEC`: a generator and its keys in one line of text, `poisson:models=80,rps=0.1,ox=2`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from difflib import get_close_matches
from math import nan
from typing import Any, Protocol

from aegis.core.errors import UserError
from aegis.core.ids import ModelId
from aegis.core.rng import Stream
from bench.workloads import lengths, tasks
from bench.workloads.arrival import Arrival, in_order, model_name
from bench.workloads.arrival_processes import Artifact, Gamma, Poisson
from bench.workloads.grid import Grid
from bench.workloads.lengths import Lengths
from bench.workloads.market import Market


class Generator(Protocol):
    """A generator of the times at which each of so many models is called."""

    @property
    def models(self) -> int: ...
    @property
    def rps(self) -> float: ...
    @property
    def duration_s(self) -> float: ...
    def times_ns(self, model: int, draws: Stream) -> Iterator[int]: ...


@dataclass(frozen=True, slots=True)
class _Key:
    """A number that a generator takes, in [low, high]."""

    field: str
    low: float
    high: float
    meaning: str
    whole: bool = False


GENERATORS: dict[str, type[Poisson | Gamma | Market | Artifact | Grid]] = {
    "poisson": Poisson,
    "gamma": Gamma,
    "market": Market,
    "artifact": Artifact,
    "grid": Grid,
}
REQUESTS_MAX = 20_000_000
_KEYS = {
    "models": _Key("models", 1, 100_000, "how many models", whole=True),
    "rps": _Key("rps", 1e-6, 1e6, "mean requests per second and model"),
    "duration": _Key("duration_s", 1e-3, 1e8, "seconds over which requests arrive"),
    "cv": _Key("cv", 0.01, 100, "coefficient of variation of the gaps; 1 is Poisson"),
    "alpha": _Key("alpha", 0, 10, "Zipf exponent of popularity; 0: all alike"),
    "group": _Key("group", 1, 1e6, "mean requests of a burst"),
    "gap": _Key("gap_s", 1e-6, 1e6, "mean seconds between the requests of a burst"),
    "rows": _Key("rows", 1, 65_536, "requests of the largest groups", whole=True),
    "prompt": _Key("prompt", 1, 1e8, "tokens of the longest prompts", whole=True),
    "answer": _Key("answer", 1, 1e8, "tokens of an answer", whole=True),
    "repeats": _Key("repeats", 1, 10_000, "how often each group comes", whole=True),
    "every": _Key("every_s", 1e-6, 1e6, "seconds from one group to the next"),
}
_LENGTH_KEYS = {
    "lengths": f"sharegpt, fixed, uniform, or one of MuxWise's tasks: {', '.join(tasks.TASKS)} [sharegpt]",
    "input": "tokens of a prompt, for fixed N [512], for uniform LOW-HIGH [8-512]",
    "output": "tokens of an answer, for fixed N [128], for uniform LOW-HIGH [8-512]",
    "ix": "factor on the input tokens [1]",
    "ox": "factor on the output tokens [1]",
}
_FACTOR = _Key("", 1e-3, 1e3, "")
_LENGTH_DEFAULTS = {"fixed": ("512", "128"), "uniform": ("8-512", "8-512")}


def parse(text: str, seed: int) -> list[Arrival]:
    """The workload that `text` describes. Each model has its own chance, which no other model or key changes.

    Raises `UserError`, its `param` the key at fault.
    """
    kind, keys = _split(text)
    generator = _generator(kind, keys)
    if isinstance(generator, Grid):
        if generator.requests > REQUESTS_MAX:
            raise UserError(f"workload {text!r}: more than {REQUESTS_MAX:,} requests; lower models or rows")
        return in_order(generator.arrivals(Stream(seed, "grid")))
    if generator.models * generator.rps * generator.duration_s > REQUESTS_MAX:
        raise UserError(f"workload {text!r}: more than {REQUESTS_MAX:,} requests; lower models, rps or duration")
    draw = _lengths(keys)
    return in_order(
        _arrival(at_ns, name, draw(tokens))
        for model in range(generator.models)
        for name, tokens in ((model_name(model), Stream(seed, "lengths", model)),)
        for at_ns in generator.times_ns(model, Stream(seed, "arrivals", model))
    )


def override(text: str, key: str, value: str) -> str:
    """The workload with one key set anew: a step of a sweep."""
    name, keys = _split(text)
    return f"{name}:" + ",".join(f"{key}={value}" for key, value in {**keys, key: value}.items())


def describe() -> str:
    """Generators, keys and defaults, for `--help`."""
    lines = ["GENERATOR[:KEY=VALUE,...]"]
    for name, kind in GENERATORS.items():
        defaults = _defaults(name)
        lines += ["", f"{name}: {(kind.__doc__ or '').splitlines()[0]}"]
        lines += [
            f"  {key:<9} {about.meaning} [{defaults[about.field]:g}]"
            for key, about in _KEYS.items()
            if about.field in defaults
        ]
    lines += ["", "lengths, with any generator but grid, which has its own:"]
    lines += [f"  {key:<9} {meaning}" for key, meaning in _LENGTH_KEYS.items()]
    return "\n".join(lines)


def _arrival(at_ns: int, model: ModelId, drawn: tuple[int, ...]) -> Arrival:
    input_tokens, output_tokens, *reused = drawn
    return Arrival(at_ns, model, input_tokens, output_tokens, reused_tokens=sum(reused))


def _split(text: str) -> tuple[str, dict[str, str]]:
    name, _, rest = text.partition(":")
    if name not in GENERATORS:
        raise UserError(f"unknown workload {name!r}; expected one of {', '.join(GENERATORS)}", param="workload")
    known = [key for key, about in _KEYS.items() if about.field in _defaults(name)]
    if name != "grid":
        known += _LENGTH_KEYS
    keys: dict[str, str] = {}
    for item in rest.split(",") if rest else []:
        key, equals, value = (part.strip() for part in item.partition("="))
        if key not in known:
            near = get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}"
            raise UserError(f"workload {name} has no key {key!r}; {hint}", param=key)
        if key in keys or not equals or not value:
            problem = "is given twice" if key in keys else "has no value"
            raise UserError(f"workload key {key!r} {problem}; expected {key}=VALUE once", param=key)
        keys[key] = value
    return name, keys


def _defaults(name: str) -> dict[str, Any]:
    return {field.name: field.default for field in fields(GENERATORS[name])}


def _generator(name: str, keys: dict[str, str]) -> Generator | Grid:
    given = {about.field: _number(key, keys[key], about) for key, about in _KEYS.items() if key in keys}
    return GENERATORS[name](**{**_defaults(name), **given})


def _lengths(keys: dict[str, str]) -> Lengths:
    kind = keys.get("lengths", "sharegpt")
    if kind == "sharegpt":
        if unused := [key for key in ("input", "output") if key in keys]:
            raise UserError(f"workload key {unused[0]!r} needs lengths=fixed or lengths=uniform", param=unused[0])
        draw: Lengths = lengths.sharegpt
    elif kind in tasks.TASKS:
        draw = tasks.TASKS[kind].draw
    elif kind in _LENGTH_DEFAULTS:
        defaults = zip(("input", "output"), _LENGTH_DEFAULTS[kind], strict=True)
        inputs, outputs = (_tokens(key, keys.get(key, default), kind) for key, default in defaults)
        draw = lengths.uniform(inputs, outputs)
    else:
        known = f"got {kind!r}, which is no task of MuxWise's either: {', '.join(tasks.TASKS)}"
        raise UserError(f"workload key 'lengths': expected sharegpt, fixed or uniform, {known}", param="lengths")
    ix, ox = (_number(key, keys.get(key, "1"), _FACTOR) for key in ("ix", "ox"))
    return draw if ix == ox == 1 else lengths.scaled(draw, ix, ox)


def _number(key: str, text: str, about: _Key) -> float:
    plain = text.isascii() and "_" not in text  # no digits of other scripts, nor Python's own groups of them
    try:
        value = nan if not plain else int(text) if about.whole else float(text)
    except ValueError:
        value = nan
    if not about.low <= value <= about.high:
        what = "a whole number" if about.whole else "a number"
        raise UserError(
            f"workload key {key!r}: expected {what} from {about.low:g} to {about.high:g}, got {text!r}", param=key
        )
    return value


def _tokens(key: str, text: str, kind: str) -> range:
    """`N`, or `LOW-HIGH` where the lengths are uniform: both ends are drawn."""
    low, _, high = text.partition("-") if kind == "uniform" else (text, "", "")
    ends = [int(end) for end in (low, high or low) if end.isascii() and end.isdigit() and len(end) < 9]
    if len(ends) < 2 or not 1 <= ends[0] <= ends[1]:
        expected = "LOW-HIGH with 1 <= LOW <= HIGH" if kind == "uniform" else "a whole number of tokens, 1 or more"
        raise UserError(f"workload key {key!r}: expected {expected}, got {text!r}", param=key)
    return range(ends[0], ends[1] + 1)
