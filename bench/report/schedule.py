"""Section: the work of the instances over time. Drawn by `timeline.js`."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from aegis.core.decision import Decision, DecisionKind
from aegis.core.ids import InstanceId
from aegis.telemetry.spans import Span, SpanKind
from bench.report.folder import Folder
from bench.report.markup import Markup, element
from bench.report.run import Run
from bench.report.section import SPANS, lacking, section
from bench.report.usage import COMPUTE, WEIGHTS, instances

SPANS_MAX = 200_000
INSTANCES_MAX = 64
_MARKS = (DecisionKind.EVICT, DecisionKind.REFUSE)
_KINDS = (*SpanKind, *_MARKS)
_TRACKS = ((*COMPUTE, SpanKind.SWITCH), WEIGHTS, (SpanKind.SWAP_IN,), (SpanKind.SWAP_OUT,))


def schedule(folder: Folder) -> Markup:
    told = [run for run in folder.runs if run.spans]
    return section(
        "schedule",
        "Schedule",
        "A row for each instance: what it computed, in the colour of the model, prefill with an edge above, and grey "
        "where it waited for another model; what it computed on a part of its device takes that part of the row. Below "
        "it, thin: weights, KV inwards, KV outwards and marks where something was evicted or a request refused. Drag "
        "to move, use the buttons or Ctrl and the wheel to come closer, point at a stretch to read it, and why it came "
        "where that was written down. Keys: arrows, +, −, 0 for all.",
        *(_timeline(run) for run in told),
        lacking("schedule", folder.without(lambda run: run.spans), SPANS),
    )


def packed(run: Run) -> dict[str, Any]:
    """The data from which the timeline is drawn, times in microseconds since the start. A track is a list for each
    field of its spans; starts are stored as steps from one to the next, reasons as places in their list, which begins
    with none. The last track is the second lane of a device that was divided."""
    shown = dict(list(instances(run.spans).items())[:INSTANCES_MAX])
    marks = {name: [each for each in run.decisions if each.kind in _MARKS and each.instance == name] for name in shown}
    known = {span.model for spans in shown.values() for span in spans}
    models = sorted(known | {each.model for told in marks.values() for each in told})
    number = {model: index for index, model in enumerate(models)}
    reasons = {"": 0}
    tracks = {
        name: [
            *(_track([s for s in spans if s.kind in kinds and not s.lane], number, reasons, run) for kinds in _TRACKS),
            _mark_track(marks[name], number, reasons, run),
            _track([s for s in spans if s.lane], number, reasons, run),
        ]
        for name, spans in shown.items()
    }
    return {
        "stop": (run.stop_ns - run.start_ns) / 1e3,
        "models": models,
        "kinds": _KINDS,
        "reasons": list(reasons),
        "instances": [{"name": name, "tracks": told} for name, told in tracks.items()],
    }


def _track(spans: Sequence[Span], number: dict[Any, int], reasons: dict[str, int], run: Run) -> dict[str, list[int]]:
    ordered = sorted(spans, key=lambda span: (span.start_ns, span.stop_ns))
    starts = [(span.start_ns - run.start_ns) // 1000 for span in ordered]
    return {
        "start": [after - before for before, after in zip([0, *starts], starts, strict=False)],
        "length": [(span.stop_ns - run.start_ns) // 1000 - at for span, at in zip(ordered, starts, strict=True)],
        "kind": [_KINDS.index(span.kind) for span in ordered],
        "model": [number[span.model] for span in ordered],
        "requests": [span.requests for span in ordered],
        "steps": [span.steps for span in ordered],
        "tokens": [span.tokens for span in ordered],
        "nbytes": [span.nbytes for span in ordered],
        "share": [span.share for span in ordered],
        "why": [reasons.setdefault(run.reasons.line(span), len(reasons)) for span in ordered],
    }


def _mark_track(
    told: Sequence[Decision], number: dict[Any, int], reasons: dict[str, int], run: Run
) -> dict[str, list[int]]:
    """Decisions as spans of no length."""
    ordered = sorted(told, key=lambda each: each.at_ns)
    starts = [(each.at_ns - run.start_ns) // 1000 for each in ordered]
    none = [0] * len(ordered)
    return {
        "start": [after - before for before, after in zip([0, *starts], starts, strict=False)],
        "length": none,
        "kind": [_KINDS.index(each.kind) for each in ordered],
        "model": [number[each.model] for each in ordered],
        "requests": none,
        "steps": none,
        "tokens": none,
        "nbytes": none,
        "share": none,
        "why": [reasons.setdefault(each.line, len(reasons)) for each in ordered],
    }


def _timeline(run: Run) -> Markup:
    kept = _first(run)
    data = base64.b64encode(gzip.compress(msgspec.json.encode(packed(kept)), mtime=0)).decode()
    names = list(instances(run.spans))
    buttons = [
        element("button", sign, type="button", data_do=do, aria_label=label)
        for do, sign, label in (("in", "+", "Closer"), ("out", "−", "Further away"), ("all", "All", "All of it"))
    ]
    choice = element("label", "Model ", element("select", element("option", "all", value=""), class_="model"))
    return element(
        "figure",
        element("figcaption", run.name),
        element("div", *buttons, choice, class_="tools"),
        element("canvas", tabindex="0", role="img", aria_label=_alt(run, names)),
        element("div", class_="tip", role="status"),
        element("script", Markup(data), type="application/gzip", class_="spans"),
        *_left_out(run, kept, names),
        class_="card wider timeline",
    )


def _first(run: Run) -> Run:
    """The run up to the point where there are too many spans to draw."""
    if len(run.spans) <= SPANS_MAX:
        return run
    return replace(run, spans=sorted(run.spans, key=lambda span: span.start_ns)[:SPANS_MAX])


def _left_out(run: Run, kept: Run, names: Sequence[InstanceId]) -> list[Markup]:
    notes = []
    if len(kept.spans) < len(run.spans):
        notes.append(f"The first {len(kept.spans):,} of {len(run.spans):,} spans")
    if len(names) > INSTANCES_MAX:
        notes.append(f"The first {INSTANCES_MAX} of {len(names)} instances")
    return [element("p", f"{note}; aegis bench timeline exports all.", class_="lacking") for note in notes]


def _alt(run: Run, names: Sequence[InstanceId]) -> str:
    return (
        f"Schedule of {run.name}: {len(names)} instances over {(run.stop_ns - run.start_ns) / 1e9:.1f} seconds, "
        f"{len({span.model for span in run.spans if span.model})} models. Utilisation and Links have it as text."
    )
