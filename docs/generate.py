"""Writes what is derived from the code: the JSON Schemas, the lifecycle, the tables of options, keys, results and what
can be served, and the picture of long prompts.

`python docs/generate.py` renews them, `--check` only names those that are not current and exits 1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from aegis.config.config import OPTIONS, Config, SloTargets, config_schema, leaves, variable
from aegis.config.sizes import format_size
from aegis.control.messages import json_schema
from aegis.core.lifecycle import TABLE, TERMINAL, State
from aegis.models.served import ARCHITECTURES, FORMS, Outcome
from bench.common.provenance import RESULTS
from bench.interference.picture import svg
from bench.interference.suite import Timeline
from bench.tables.figures import ends, figure, fragmentation, prism, stages, switch_times, switches, utilisation
from bench.tables.headlines import headlines
from bench.tables.markets import cells, overload, overload_rivals
from bench.tables.results import crossings, files, goodput, markdown, results

ROOT = Path(__file__).resolve().parent.parent
SIZES = (("memory", "device"), ("memory", "floor"), ("memory", "host"), ("memory", "slab"), ("server", "body_max"))


def schema() -> str:
    """configs/schema.json"""
    return json.dumps(config_schema(), indent=2) + "\n"


def bus_schema() -> str:
    """configs/bus.schema.json"""
    return json.dumps(json_schema(), indent=2) + "\n"


def _default(path: tuple[str, ...], field: Any) -> str:
    if path in SIZES:
        return f"`{format_size(field.default)}`"
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    if isinstance(field.default, float):
        return f"`{field.default:g}`"
    if isinstance(field.default, SloTargets):
        slo = field.default
        return f"`ttft={slo.ttft_ms / 1000:g},tbt={slo.tbt_ms / 1000:g},gap={slo.gap_ms / 1000:g}`"
    return "" if field.default in ((), None) else f"`{field.default}`"


def options() -> str:
    """The options of `aegis launch`."""
    fields = dict(leaves()) | {OPTIONS["slo"]: Config.model_fields["slo"]}
    rows = [
        (f"`--{name.replace('_', '-')}`", f"`{'.'.join(path)}`", _default(path, fields[path]), fields[path].description)
        for name, path in OPTIONS.items()
    ]
    return markdown(("option", "key in the file", "default", "meaning"), rows)


def keys() -> str:
    """Every key of the file, with its variable."""
    rows = [
        (f"`{'.'.join(path)}`", f"`{variable(path)}`", _default(path, field), field.description)
        for path, field in leaves()
    ]
    return markdown(("key", "variable", "default", "meaning"), rows)


def lifecycle() -> str:
    """The life of a request as a diagram and as a table."""
    table = {state: steps for state, steps in TABLE.items() if state not in TERMINAL}
    events = list(dict.fromkeys(step for steps in table.values() for step in steps))
    everywhere = [step for step in events if len({steps.get(step) for steps in table.values()}) == 1]
    diagram = ["```mermaid", "stateDiagram-v2", "    [*] --> live", "    state live {", "        [*] --> queued"]
    diagram += [
        f"        {state} --> {after}: {step}"
        for state, steps in table.items()
        for step, after in steps.items()
        if step not in everywhere
    ]
    diagram += ["    }"] + [f"    live --> {table[State.QUEUED][step]}: {step}" for step in everywhere]
    diagram += [f"    {state} --> [*]" for state in sorted(TERMINAL)] + ["```"]
    rows = [(f"**{state}**", *(steps.get(step, "") for step in events)) for state, steps in table.items()]
    return "\n".join(diagram) + "\n\n" + markdown(("state", *events), rows)


def _told(outcome: Outcome) -> str:
    return outcome.told if outcome.served else f"no: *{outcome.told}*"


def forms() -> str:
    """The forms of checkpoints, by engine."""
    rows = [(form.name, form.known_by, _told(form.transformers), _told(form.vllm)) for form in FORMS]
    return markdown(("form", "known by", "`--engine transformers`", "`--engine vllm`"), rows)


def architectures() -> str:
    """Those that were tried, by engine and form."""
    rows = []
    for each in ARCHITECTURES:
        dense, int8, vllm = map(_told, (each.transformers, each.int8 or each.transformers, each.vllm))
        rows.append((f"`{each.model_type}`", dense, int8, each.gguf, vllm))
    return markdown(("`model_type`", "safetensors", "`--weights int8`", "in GGUF files", "`--engine vllm`"), rows)


LONG_PROMPT_TOKENS = 4000


def interference() -> str:
    """The timelines of a long prompt beside a stream of the same model, as an image."""
    named = {
        "aegis 6c38f79": "interference_before",
        "aegis": "interference",
        "vLLM": "interference_vllm",
        "llama.cpp": "interference_llama_cpp",
    }
    panels = []
    for name, file in named.items():
        cells = msgspec.json.decode((RESULTS / f"{file}.json").read_bytes())["cells"]
        (cell,) = [each for each in cells if (each["prompt_tokens"], each["to"]) == (LONG_PROMPT_TOKENS, "same")]
        panels.append((name, msgspec.convert(cell["timeline"], Timeline)))
    title = f"A prompt of {LONG_PROMPT_TOKENS} tokens (orange) and one of 50 (green) beside a stream of the same model"
    return svg(title, panels)


SECTIONS: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "README.md": {"headlines": headlines},
    "docs/options.md": {"options": options},
    "docs/results.md": {"crossings": crossings, "files": files, "goodput": goodput, "results": results},
    "docs/checkpoints.md": {"forms": forms, "architectures": architectures},
    "docs/configuration.md": {"keys": keys},
    "docs/lifecycle.md": {"lifecycle": lifecycle},
    "docs/policy.md": {"cells": cells},
    "docs/simulate.md": {"overload": overload, "overload-rivals": overload_rivals},
    "docs/figures.md": {
        "switches": partial(figure, "fig7", switches),
        "fig11c": partial(figure, "fig11c", ends),
        "fig12": partial(figure, "fig12", ends),
        "fig13": partial(figure, "fig13", ends),
        "fig17": partial(figure, "fig17", ends),
        "stages": partial(figure, "fig14", stages),
        "switch_times": partial(figure, "fig15", switch_times),
        "fragmentation": partial(figure, "fig16", fragmentation),
        "utilisation": partial(figure, "fig18", utilisation),
        "prism": prism,
    },
}


def fill(text: str, name: str, content: str) -> str:
    """Puts `content` between the marks `<!-- name -->` and `<!-- /name -->`."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, rest = text.split(start)
    _, after = rest.split(end)
    return f"{before}{start}\n{content}\n{end}{after}"


def generated() -> dict[Path, str]:
    """Every generated file as it should be."""
    files = {
        ROOT / "configs/schema.json": schema(),
        ROOT / "configs/bus.schema.json": bus_schema(),
        ROOT / "docs/interference.svg": interference(),
    }
    for file, sections in SECTIONS.items():
        text = (ROOT / file).read_text(encoding="utf-8")
        for name, make in sections.items():
            text = fill(text, name, make())
        files[ROOT / file] = text
    return files


def main() -> int:
    """Renews the files, or with `--check` names the stale ones."""
    stale = {
        path: text
        for path, text in generated().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }
    for path, text in stale.items():
        if "--check" in sys.argv[1:]:
            print(f"{path.relative_to(ROOT)} is not current; run: make generate", file=sys.stderr)
        else:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return 1 if stale and "--check" in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
