"""The documentation's tables of measurements, made from the files in `bench/results`, which `aegis lab`, `aegis bench`
and `aegis simulate` write with `--json bench/results/NAME.json`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from aegis.config.sizes import format_size
from bench.common import provenance
from bench.common.provenance import RESULTS
from bench.simulate.contenders import OURS
from bench.simulate.goodput import MUXWISE, MUXWISE_LIVE
from bench.simulate.sweep import Crossing
from bench.tables.missed_bars import reason_of

Columns = Mapping[str, Callable[[Any], str]]
"""Title → text of a case."""


@dataclass(frozen=True, slots=True)
class Suite:
    """The table of one suite's file: a row for each of its `cases`. `file` is given if it is not the suite's name."""

    title: str
    cases: str
    columns: Columns
    file: str | None = None


_FIGURES: Columns = {
    "figure": lambda figure: figure["name"],
    "value": lambda figure: f"{figure['value']:.4g} {figure['unit']}".rstrip(),
    "has to be": lambda figure: wanted(figure),
}

_BESIDE_LITELLM: Columns = {
    "figure": lambda figure: f"{figure['name']}, {figure['unit']}".removesuffix(", "),
    "aegis": lambda figure: f"{figure['aegis']:.4g}",
    "LiteLLM": lambda figure: "" if figure["litellm"] is None else f"{figure['litellm']:.4g}",
    "ratio": lambda figure: "" if figure["ratio"] is None else f"{figure['ratio']:.3g}",
    "has to be": lambda figure: wanted(figure),
}

_LONG_PROMPT: Columns = {
    "long prompt": lambda cell: f"{cell['prompt_tokens']} tokens",
    "of the model": lambda cell: "of the stream" if cell["to"] == "same" else "beside it",
    "usual gap, ms": lambda cell: f"{cell['usual_gap_s'] * 1e3:.0f}",
}

_INTERFERENCE: Columns = {
    **_LONG_PROMPT,
    "longest gap, ms": lambda cell: f"{cell['longest_gap_s'] * 1e3:.0f}",
    "gap p99, ms": lambda cell: f"{cell['p99_gap_s'] * 1e3:.0f}",
    "short's first token, ms": lambda cell: f"{cell['short_ttft_s'] * 1e3:.0f}",
    "long's first token, s": lambda cell: f"{cell['long_ttft_s']:.2f}",
    "alone, s": lambda cell: f"{cell['alone_s']:.2f}",
}

SUITES = {
    "decode": Suite(
        "Decoding, beside transformers' `generate` on the same checkpoint in the same process",
        "cases",
        {
            "checkpoint": lambda case: case["checkpoint"],
            "dtype": lambda case: case["dtype"],
            "context": lambda case: f"{case['context']}",
            "batch": lambda case: f"{case['batch']}",
            "aegis, tokens/s": lambda case: f"{case['aegis_tokens_per_s']:.0f}",
            "transformers, tokens/s": lambda case: f"{case['transformers_tokens_per_s']:.0f}",
            "ratio": lambda case: f"{case['ratio']:.2f}",
            "÷ batch 1": lambda case: f"{case['times_one_sequence']:.1f}",
        },
    ),
    "embeddings": Suite(
        "Embeddings, beside sentence-transformers: a random model of all-MiniLM-L6's shape, one thread",
        "figures",
        _FIGURES,
    ),
    "llama_cpp": Suite(
        "Decoding, beside llama.cpp on the same checkpoint in the same process, one thread",
        "cases",
        {
            "checkpoint": lambda case: case["checkpoint"],
            "llama.cpp's file": lambda case: case["file_type"],
            "ours": lambda case: case["weights"],
            "batch": lambda case: f"{case['batch']}",
            "aegis, tokens/s": lambda case: f"{case['aegis_tokens_per_s']:.0f}",
            "llama.cpp, tokens/s": lambda case: f"{case['llama_cpp_tokens_per_s']:.0f}",
            "ratio": lambda case: f"{case['ratio']:.2f}",
        },
    ),
    "lora": Suite(
        "Rows of 16 adapters in a step, beside the same rows of their base: half a billion parameters, one thread",
        "figures",
        _FIGURES,
    ),
    "memory": Suite(
        "Moving memory: between instances, to the host and back, under load",
        "figures",
        _FIGURES,
    ),
    "lanes": Suite(
        "A decode beside a long prompt of the same model, on a core each, against each alone and turns on both cores",
        "figures",
        _FIGURES,
    ),
    "interference": Suite(
        "A long prompt beside a stream and before a short one: two models of 57M parameters in bfloat16, one instance, "
        "gap target 250 ms",
        "cells",
        {
            **_LONG_PROMPT,
            "longest gap, ms, at most 250": lambda cell: _within(cell, "longest_gap_s", 0.25),
            "gap p99, ms, at most 150": lambda cell: _within(cell, "p99_gap_s", 0.15),
            "short's first token, ms, at most 500": lambda cell: _within(cell, "short_ttft_s", 0.5),
            "long's first token, s": lambda cell: f"{cell['long_ttft_s']:.2f}",
            "÷ alone, at most 1.35": lambda cell: _slowdown(cell),
        },
    ),
    "interference_before": Suite(
        "The same at 6c38f79, where a prompt is run as a whole",
        "cells",
        _INTERFERENCE,
    ),
    "interference_llama_cpp": Suite(
        "The same first model, in bfloat16 and with one thread, on llama.cpp's server (0c1e570, `-t 1 -np 4`)",
        "cells",
        _INTERFERENCE,
    ),
    "interference_vllm": Suite(
        "The same on vLLM 0.32.0's server for CPUs, with one thread and its defaults otherwise",
        "cells",
        _INTERFERENCE,
    ),
    "interference_vllm_256": Suite(
        "The same with `--max-num-batched-tokens 256`",
        "cells",
        _INTERFERENCE,
    ),
    "overload_live": Suite(
        "Overload, live: eight demo models on two instances and 48 MiB, offered up to eight times what they "
        "can do on time, the medians of rounds; first tokens are due after 2 s, further ones every 0.1 s",
        "runs",
        {
            "policy": lambda run: f"`{run['contender']}`",
            "load": lambda run: f"{run['factor']:g} ×",
            "tokens/s": lambda run: f"{run['saw']['tokens_per_s']:.0f}",
            "on time/s, at 4 × at least 0.9 of the peak": lambda run: _held(run),
            "refused": lambda run: f"{run['saw']['refused'] / run['saw']['sent']:.0%}",
            "TTFT p50, s": lambda run: f"{run['saw']['ttft_ms_p50'] / 1e3:.2f}",
            "p99, s": lambda run: f"{run['saw']['ttft_ms_p99'] / 1e3:.2f}",
            "`/health`, ms, longest (p99), at most 100": lambda run: _answered(run, "health"),
            "`/metrics`, ms": lambda run: _answered(run, "metrics"),
            "cancels, ms": lambda run: _answered(run, "cancels"),
            "own memory, MiB: before, most, after": lambda run: _held_mib(run, "own"),
            "weights and KV, MiB": lambda run: _held_mib(run, "shared"),
            "cores of clients, of instances": lambda run: _cores(run),
        },
    ),
    "prompts": Suite(
        "32 prompts of 100 tokens at once to one model: sharing steps, and one by one",
        "figures",
        _FIGURES,
    ),
    "pace": Suite(
        "The gaps that readers see, as tokens are made and at a smooth pace",
        "figures",
        _FIGURES,
    ),
    "proxy_routes": Suite(
        "What a proxy adds to a request of each route, beside LiteLLM's proxy; each on one core",
        "figures",
        _BESIDE_LITELLM,
    ),
    "proxy": Suite(
        "The proxy alone, where instances answer at once, beside LiteLLM's proxy; each on one core",
        "figures",
        _BESIDE_LITELLM,
    ),
    "rivals": Suite(
        "Ways to share, live: the same requests to eight models on two instances, or an instance each",
        "runs",
        {
            "scene": lambda run: run["scene"],
            "deadlines, s": lambda run: run["slo"],
            "server": lambda run: f"`{run['launched']}`",
            "tokens on time": lambda run: f"{run['attainment']:.1%}",
            "on time, a second": lambda run: f"{run['good_tokens_per_s']:.0f}",
            "failed": lambda run: f"{run['failed']}",
        },
    ),
    "quantised": Suite(
        "Quantised weights beside bfloat16: half a billion parameters, one thread",
        "figures",
        _FIGURES,
    ),
    "schedule": Suite(
        "Decisions of the schedulers, each from its event to its effects",
        "decisions",
        {
            "setting": lambda decision: decision["setting"],
            "event": lambda decision: decision["event"],
            "p50, µs": lambda decision: f"{decision['p50_us']:.1f}",
            "p99, µs": lambda decision: f"{decision['p99_us']:.1f}",
            "p99 has to be": lambda decision: _limit(decision),
        },
    ),
    "simulator": Suite(
        "The simulator, with Aegaeon's policy on one core; models × instances × requests",
        "cases",
        {
            "size": lambda case: " × ".join(str(case["size"][part]) for part in ("models", "instances", "requests")),
            "requests": lambda case: f"{case['requests']}",
            "process time, s": lambda case: f"{case['process_s']:.2f}",
            "requests/s": lambda case: f"{case['requests'] / case['process_s']:.0f}",
            "µs each": lambda case: f"{1e6 * case['process_s'] / case['requests']:.1f}",
        },
    ),
    "start": Suite(
        "A start and recoveries: 6 + 10 instances of the demo market, made beforehand",
        "figures",
        _FIGURES,
    ),
    "structured": Suite(
        "Structured output, live: the demo market's eight models, eight chats at once with one of them",
        "figures",
        _FIGURES,
    ),
    "switch": Suite(
        "Activating a model, beside a memcpy of the same number of bytes in the same run",
        "sizes",
        {
            "model": lambda size: format_size(size["nbytes"]),
            "switch, ms": lambda size: f"{size['switch_ns'] / 1e6:.1f}",
            "memcpy, ms": lambda size: f"{size['memcpy_ns'] / 1e6:.1f}",
            "ratio": lambda size: f"{size['ratio']:.2f}",
            "prefetched, ms": lambda size: f"{size['prefetched_ns'] / 1e6:.2f}",
        },
    ),
    "vllm": Suite(
        "Decoding, beside stock vLLM in a process of its own: same checkpoint, dtype and threads",
        "cases",
        {
            "dtype": lambda case: case["dtype"],
            "batch": lambda case: f"{case['batch']}",
            "engine": lambda case: case["engine"],
            "aegis, tokens/s": lambda case: f"{case['aegis_tokens_per_s']:.0f}",
            "vLLM, tokens/s": lambda case: f"{case['vllm_tokens_per_s']:.0f}",
            "ratio": lambda case: f"{case['ratio']:.2f}",
        },
    ),
    "vllm-replacing": Suite(
        "Replacing one model by another, to its first token, beside stopping and starting stock vLLM",
        "replacements",
        {
            "dtype": lambda done: done["dtype"],
            "engine": lambda done: done["engine"],
            "image, MB": lambda done: f"{done['image_bytes'] / 1e6:.0f}",
            "aegis, ms": lambda done: f"{done['aegis_s'] * 1e3:.1f}",
            "vLLM, s": lambda done: f"{done['vllm_s']:.1f}",
            "ratio": lambda done: f"{done['ratio']:.0f}",
        },
        file="vllm",
    ),
}


_SLOWDOWN_MAX = 1.35

_UNCHANGED, _CHANGED, _UNKNOWN = "unchanged", "changed since", "unknown"


def wanted(figure: Mapping[str, Any]) -> str:
    """The bar of a figure and, if the figure misses it, that it does and why."""
    if figure["ok"] is not False:
        return figure["wanted"]  # type: ignore[no-any-return]
    return f"{figure['wanted']} **missed**: {reason_of(figure['name'])}"


def _limit(decision: Mapping[str, Any]) -> str:
    limit_us = decision["limit_us"]
    if not limit_us:
        return ""
    return f"≤ {limit_us:g}" + (" **missed**" if decision["p99_us"] > limit_us else "")


def _within(cell: Mapping[str, Any], name: str, most_s: float) -> str:
    return f"{cell[name] * 1e3:.0f}" + (_missed(cell, name) if cell[name] > most_s else "")


def _slowdown(cell: Mapping[str, Any]) -> str:
    ratio = cell["long_ttft_s"] / cell["alone_s"]
    return f"{ratio:.2f}" + (_missed(cell, "slowdown") if ratio > _SLOWDOWN_MAX else "")


def _held(run: Mapping[str, Any]) -> str:
    return f"{run['saw']['good_tokens_per_s']:.0f}" + _missed_live(run, "goodput")


def _answered(run: Mapping[str, Any], what: str) -> str:
    return f"{run[what]['longest_ms']:.0f} ({run[what]['p99_ms']:.0f})" + _missed_live(run, what)


def _held_mib(run: Mapping[str, Any], kind: str) -> str:
    held = ", ".join(f"{run[when][kind] >> 20}" for when in ("start", "peak", "after"))
    return held + (_missed_live(run, "memory") if kind == "own" else "")


def _cores(run: Mapping[str, Any]) -> str:
    return f"{run['saw']['cpu_share']:.2f}, {run['instance_cpu']:.2f}" if "instance_cpu" in run else ""


def _missed_live(run: Mapping[str, Any], bar: str) -> str:
    """The run says which bars it missed; those of rivals are none."""
    if bar not in run["missed"]:
        return ""
    return f" **missed**: {reason_of(f'live overload: {bar}')}"


def _missed(cell: Mapping[str, Any], name: str) -> str:
    figure = f"{cell['prompt_tokens']} {cell['to']}: {name}"
    return f" **missed**: {reason_of(figure)}"


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    head = list(head)
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])


def results(directory: Path = RESULTS) -> str:
    """One table for each results file of a known suite, or a line that says there are none."""
    tables = [
        _table(suite, file.stem, json.loads(file.read_text(encoding="utf-8")))
        for name, suite in sorted(SUITES.items())
        if (file := directory / f"{suite.file or name}.json").exists()
    ]
    return "\n\n".join(tables) or "Nothing has been measured yet; the commands above do it."


def files(directory: Path = RESULTS) -> str:
    """One table of the results files: when, where and on which commit each was measured, and if that still holds."""
    rows = [
        (f"`{file.name}`", *_origin(file.stem, json.loads(file.read_text(encoding="utf-8"))))
        for file in sorted(directory.glob("*.json"))
    ]
    return markdown(("file", "measured", "machine", "commit", "code it depends on"), rows)


def crossings(directory: Path = RESULTS) -> str:
    """One table of what the suites that vary the number of models found: a row for each policy."""
    found: dict[str, dict[str, str]] = {}
    heads, origins = [], []
    for name in ("fig11a", "fig11b"):
        measured = json.loads((directory / f"{name}.json").read_text(encoding="utf-8"))
        panel = measured["panels"][0]
        heads.append(panel["title"])
        origins.append(f"{panel['title']}: {where(name, measured)}")
        for curve in panel["curves"]:
            found.setdefault(curve["policy"], {})[panel["title"]] = str(msgspec.convert(curve["crossing"], Crossing))
    rows = ([f"`{policy}`", *(of.get(head, "") for head in heads)] for policy, of in found.items())
    return "\n\n".join((*origins, markdown(["policy", *heads], rows)))


_WITHIN = 0.2
"""How far from a published ratio one may be that is taken to be the same."""
_TTFT_MAX = 1.3
"""Times the best rival's, at its rate."""


def goodput(directory: Path = RESULTS) -> str:
    """One table of what MuxWise's suites found: a row for each contender of each panel."""
    rows, origins = [], []
    for file in sorted(directory.glob("mux_*.json")):
        measured = json.loads(file.read_text(encoding="utf-8"))
        origins.append(f"{measured['title']}: {where(file.stem, measured)}")
        rows += [_contender(panel, result) for panel in measured["panels"] for result in panel["results"]]
    titles = (
        "panel",
        "contender",
        "requests/s",
        "MuxWise over it",
        "wanted",
        "TTFT p99, s",
        "ours there",
        "gap p99, ms",
    )
    return "\n\n".join(("  \n".join(origins), markdown(titles, rows))) if rows else "Nothing has been searched for yet."


def _contender(panel: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    name, ratio, published, at = result["contender"], result["muxwise_over_it"], result["published"], result["at"] or {}
    wanted = "" if published is None else f"{published:g}"
    if name == OURS:
        live = next((each["rps"] for each in panel["results"] if each["contender"] == MUXWISE_LIVE.name), None)
        wanted, missed = ("", False) if live is None else (f"at least {live:g} requests/s", result["rps"] < live)
    else:
        missed = bool(ratio and published and abs(ratio / published - 1) > _WITHIN)
    if missed:
        reason = reason_of(f"{panel['panel']}/{name}")
        wanted = f"{wanted} **missed**: {reason}"
    ttft_ms, gap_ms, ours_ms = at.get("ttft_p99_ms"), at.get("tbt_p99_ms"), result.get("ours_ttft_p99_ms")
    ours = "" if ours_ms is None else f"{ours_ms / 1e3:.2f}"
    if name in (MUXWISE.name, MUXWISE_LIVE.name) and ours_ms and ttft_ms and ours_ms > _TTFT_MAX * ttft_ms:
        reason = reason_of(f"{panel['panel']}/{name}: TTFT")
        ours = f"{ours} **missed**, at most {_TTFT_MAX:g} × its: {reason}"
    return [
        panel["panel"],
        f"`{name}`",
        f"{result['rps']:g}",
        "" if ratio is None else f"{ratio:.2f}",
        wanted,
        "" if ttft_ms is None else f"{ttft_ms / 1e3:.2f}",
        ours,
        "" if gap_ms is None else f"{gap_ms:.0f}",
    ]


def _table(suite: Suite, name: str, measured: Mapping[str, Any]) -> str:
    rows = [[show(case) for show in suite.columns.values()] for case in measured[suite.cases]]
    return f"**{suite.title}** ({where(name, measured)})\n\n{markdown(suite.columns, rows)}"


def where(name: str, measured: Mapping[str, Any]) -> str:
    """Where it was measured, like `2026-11-21, AMD EPYC, 2 cores, commit 52e40ba; code changed since`."""
    date, machine, commit, code = _origin(name, measured)
    return f"{date}, {machine}, commit {commit}" + (f"; code {code}" if code == _CHANGED else "")


def _origin(name: str, measured: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Date, machine, commit, and what has become of the code since."""
    head = provenance.read(measured)
    if head is None:
        return "unknown day", "unknown machine", "unknown", _UNKNOWN
    if name not in provenance.DEPENDENCIES:
        code = _UNKNOWN
    else:
        code = _CHANGED if provenance.has_changed(name, head) else _UNCHANGED
    return head.date, head.machine, head.commit or "unknown", code
