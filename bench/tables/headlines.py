"""The README's table: the figures that say most, each from its file of results, beside the best that others do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from bench.common.provenance import RESULTS
from bench.simulate.contenders import OURS
from bench.tables.results import markdown

_LOADS = (1.0, 2.0, 4.0)
_LONG_TOKENS = 12_000
_CHECKPOINT = {"checkpoint": "50m", "dtype": "bfloat16", "context": 1000, "batch": 32}
_MIB = 1 << 20

Row = tuple[str, str, str]
Result = Mapping[str, Any]
Reader = Callable[[str], Result | None]
"""Of a file by its name; None where it is not there."""


def headlines(directory: Path = RESULTS) -> str:
    """One table of all whose results are there."""
    rows = [row for make in _ROWS for row in make(lambda name: _read(directory, name))]
    return markdown(("", "aegis", "others"), rows)


def _read(directory: Path, name: str) -> Result | None:
    file = directory / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def _cells(read: Reader) -> Iterator[Row]:
    if found := read("cells"):
        ratios = [cell["ratio"] for cell in found["cells"] if cell["ratio"] is not None]
        what = f"models that 16 GPUs serve with 90 % of tokens on time, in {len(ratios)} markets, simulated"
        yield what, _ahead(ratios), _best(found)


def _overload(read: Reader) -> Iterator[Row]:
    if found := read("overload"):
        ratios = [cell["ratio"] for cell in found["cells"] if cell["ratio"] is not None]
        what = f"tokens on time where not all can be, in {len(ratios)} cells of recorded and random traffic, simulated"
        yield what, _ahead(ratios), _best(found)


def _live(read: Reader) -> Iterator[Row]:
    if found := read("overload_live"):
        good = {(run["contender"], run["factor"]): run["saw"]["good_tokens_per_s"] for run in found["runs"]}
        names = list(dict.fromkeys(run["contender"] for run in found["runs"]))
        at = {name: ", ".join(f"{good[name, factor]:.0f}" for factor in _LOADS) for name in names}
        others = "; ".join(f"`{name}` {figures}" for name, figures in at.items() if not name.startswith(OURS))
        *lower, most = (f"{factor:g}" for factor in _LOADS)
        what = f"tokens/s on time at {', '.join(lower)} and {most} times what two instances can do, live, on 2 cores"
        yield what, at[OURS], others


def _gaps(read: Reader) -> Iterator[Row]:
    named = {"vLLM": "interference_vllm_256", "llama.cpp": "interference_llama_cpp"}
    if ours := read("interference"):
        others = [(name, found) for name, file in named.items() if (found := read(file))]
        what = f"longest gap of a stream while a prompt of {_LONG_TOKENS} tokens runs, live, 57M parameters"
        yield what, f"{_gap_ms(ours):.0f} ms", ", ".join(f"{name} {_gap_ms(found):.0f} ms" for name, found in others)


def _decoding(read: Reader) -> Iterator[Row]:
    if found := read("decode"):
        (case,) = [each for each in found["cases"] if _CHECKPOINT.items() <= each.items()]
        what = "tokens/s of 32 streams with 1 000 tokens of context, 50M parameters, bfloat16, one thread"
        yield what, f"{case['aegis_tokens_per_s']:.0f}", f"transformers {case['transformers_tokens_per_s']:.0f}"


def _switch(read: Reader) -> Iterator[Row]:
    if found := read("switch"):
        largest = max(found["sizes"], key=lambda each: each["nbytes"])
        what = f"a switch to a model of {largest['nbytes'] // _MIB} MiB that was not fetched ahead"
        yield what, f"{largest['switch_ns'] / 1e6:.0f} ms", f"memcpy {largest['memcpy_ns'] / 1e6:.0f} ms"


def _proxy(read: Reader) -> Iterator[Row]:
    if found := read("proxy"):
        ours, theirs = (median(each["whole"]["added_p50_ms"] for each in found[f"{who}_rounds"]) for who in _PROXIES)
        yield "what the proxy adds to a request, median", f"{ours:.1f} ms", f"LiteLLM {theirs:.1f} ms"


_PROXIES = ("aegis", "litellm")
_ROWS = (_cells, _overload, _live, _gaps, _decoding, _switch, _proxy)


def _best(found: Result) -> str:
    names = [each["contender"].split()[0].rstrip(",") for cell in found["cells"] for each in cell["contenders"]]
    rivals = sorted({f"`{name}`" for name in names} - {f"`{OURS}`"})
    return f"the best measured in each, tuned, of {', '.join(rivals)}"


def _ahead(ratios: Iterable[float]) -> str:
    found = sorted(ratios)
    return f"{found[0]:.2f} to {found[-1]:.2f} × as many, {median(found):.2f} × in the median"


def _gap_ms(found: Result) -> float:
    (cell,) = [each for each in found["cells"] if (each["prompt_tokens"], each["to"]) == (_LONG_TOKENS, "same")]
    return 1e3 * float(cell["longest_gap_s"])
