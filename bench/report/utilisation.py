"""Section: what each instance did with its time, and its links with theirs."""

from __future__ import annotations

from collections.abc import Iterable

from aegis.telemetry.spans import SpanKind
from bench.common.numbers import percent, size
from bench.report.folder import Folder
from bench.report.markup import Markup, table
from bench.report.page_charts import Axis, Series, lines, shares
from bench.report.run import Run
from bench.report.section import SPANS, card, lacking, section
from bench.report.usage import BUSY, INWARDS, WEIGHTS, computing, instances, link, rates, utilisation

_OUTWARDS = (SpanKind.SWAP_OUT,)


def instance_use(folder: Folder) -> Markup:
    told = [run for run in folder.runs if run.spans]
    return section(
        "utilisation",
        "Utilisation",
        "What instances did with the time of the run: prefill, decode, waiting for another model, or nothing.",
        *(_instances(run) for run in told),
        *([_computing(told)] if told else []),
        lacking("utilisation", folder.without(lambda run: run.spans), SPANS),
    )


def link_use(folder: Folder) -> Markup:
    told = [run for run in folder.runs if run.spans]
    return section(
        "links",
        "Links",
        "What was copied between host and devices: weights and KV inwards, KV outwards.",
        *(_links(run) for run in told),
        lacking("use of links", folder.without(lambda run: run.spans), SPANS),
    )


def _instances(run: Run) -> Markup:
    bars = utilisation(run)
    rows = [
        (name, *(percent(parts[part]) for part in BUSY), percent(1 - sum(parts.values())))
        for name, parts in bars.items()
    ]
    told = "; ".join(f"{name}: idle {row[-1]}" for (name, *row) in rows)
    return card(
        run.name,
        shares(f"Utilisation of {run.name}. {told}.", {str(name): parts for name, parts in bars.items()}, BUSY),
        table(("instance", *BUSY, "idle"), rows, caption=f"Utilisation of {run.name}"),
    )


def _computing(runs: Iterable[Run]) -> Markup:
    series = [Series(run.name, computing(run)) for run in runs]
    means = {each.name: sum(value for _, value in each.points) / len(each.points) for each in series}
    rows = [(name, percent(mean)) for name, mean in means.items()]
    told = "; ".join(f"{name}: {mean} on average" for name, mean in rows)
    return card(
        "Computing, all instances",
        lines(
            f"Share of instances that compute, over time. {told}.",
            series,
            Axis("seconds", 0.0),
            Axis("", 0.0, 1.0, percent=True),
        ),
        table(("run", "mean"), rows, caption="Share of the instances' time spent computing"),
    )


def _links(run: Run) -> Markup:
    whole_ns = run.stop_ns - run.start_ns
    rows = []
    for name, spans in instances(run.spans).items():
        inwards, outwards = link(spans, INWARDS, whole_ns), link(spans, _OUTWARDS, whole_ns)
        copied = (sum(inwards.nbytes[kind] for kind in kinds) for kinds in (WEIGHTS, (SpanKind.SWAP_IN,)))
        rows.append(
            (
                str(name),
                *map(size, copied),
                size(outwards.nbytes[SpanKind.SWAP_OUT]),
                percent(inwards.busy),
                size(inwards.bytes_per_s) + "/s",
                percent(outwards.busy),
                size(outwards.bytes_per_s) + "/s",
            )
        )
    head = ("instance", "weights in", "KV in", "KV out", "in busy", "in, while busy", "out busy", "out, while busy")
    series = [
        Series(name, [(at, rate / 1e9) for at, rate in rates(run, kinds)])
        for name, kinds in (("weights in", WEIGHTS), ("KV in", (SpanKind.SWAP_IN,)), ("KV out", _OUTWARDS))
    ]
    highest = "; ".join(f"{each.name}: at most {max(rate for _, rate in each.points):.3g} GB/s" for each in series)
    return card(
        f"{run.name}: GB/s, all instances",
        lines(f"Bytes copied per second. {highest}.", series, Axis("seconds", 0.0), Axis("", 0.0)),
        table(head, rows, caption=f"Links of {run.name}"),
    )
