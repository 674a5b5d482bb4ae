"""A log of the cores' decisions, one line each: `time_ns who what`. The simulator and the live server write the same
lines, so that two runs can be compared line for line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from aegis.core.decision import Decision
from aegis.core.effects import (
    AbandonLoad,
    CopyBlocks,
    Effect,
    EndRun,
    LoadWeights,
    MoveBlocks,
    Row,
    Run,
    Send,
    UnmapWeights,
    WipePages,
)
from aegis.core.ids import InstanceId
from aegis.core.messages import (
    Adopt,
    BringIn,
    Broken,
    BroughtIn,
    Cancel,
    FetchKv,
    FromInstance,
    GaveBack,
    GaveUp,
    GrantPages,
    GrantSlabs,
    HandedOver,
    HandOver,
    KeepKv,
    KvFetched,
    KvKept,
    KvReleased,
    NeedPages,
    NeedSlabs,
    OfferKv,
    Phase,
    Prefilled,
    PrefixChecked,
    ReleaseKv,
    ReturnSlabs,
    Reused,
    StepsTook,
    Submit,
    SwitchDone,
    TakeBack,
    ToInstance,
)
from aegis.core.request import EventHandle


class Decisions(Struct, frozen=True, tag=True):
    """The decisions that an instance has made since its last message, sent to the node now and then."""

    decisions: tuple[Decision, ...]


class DecisionLog:
    """Lines in the order in which they were decided."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def did(self, instance: InstanceId, effects: Iterable[Effect], now_ns: int) -> None:
        """Logs the effects that an instance's core asked its shell for."""
        for effect in effects:
            what = _described_from_instance(effect.message) if isinstance(effect, Send) else _done(effect)
            if what:
                self.lines.append(f"{now_ns} {instance} {what}")

    def explained(self, decision: Decision) -> None:
        """Logs the decisions of the market's cores, if they are explained."""
        self.lines.append(f"{decision.at_ns} market for {decision.instance}: {decision.line}")

    def sent(self, instance: InstanceId, message: ToInstance, now_ns: int) -> None:
        """Logs the messages that the market's cores send to an instance."""
        what = _described_to_instance(message)
        if what:
            self.lines.append(f"{now_ns} market tells {instance}: {what}")


def _done(effect: Effect) -> str | None:
    """None for what follows from another line."""
    match effect:
        case Run():
            return _run(effect)
        case EndRun():
            return "end run"
        case LoadWeights(stream, model, event):
            return f"load {model} on {stream}, {_event(event)}"
        case AbandonLoad(event):
            return f"abandon load {_event(event)}"
        case UnmapWeights(model):
            return f"evict {model}"
        case CopyBlocks(stream, _, copies, after, event):
            return f"copy on {stream} {_copies(copies)} after {_event(after) if after else None}, {_event(event)}"
        case MoveBlocks(_, copies):
            return f"move {_copies(copies)}"
        case WipePages(runs, event):
            return f"wipe {_runs(runs)}, {_event(event)}"
        case Decision():
            return effect.line
        case _:
            return None


def _run(run: Run) -> str:
    prompts = "; ".join([_prompt(row) for row in run.prompts])
    rows = [f"{row.job.request}.{row.job.attempt}@{row.start}" for row in run.rows if row.decodes]
    if not prompts:
        return f"decode {run.model} {' '.join(rows)}, {run.steps} steps, until {run.until_ns}"
    beside = f", beside {' '.join(rows)}" if rows else ""
    return f"prefill {run.model} {prompts}{beside}"


def _prompt(row: Row) -> str:
    job = row.job
    part = "" if row.stop - row.start == job.prefill_tokens else f"{row.start}-{row.stop} of "
    return f"{job.request}.{job.attempt}, {part}{job.prefill_tokens} tokens in {_runs(row.blocks)}"


def _described_from_instance(message: FromInstance) -> str | None:
    match message:
        case Prefilled(request, attempt, _, kv):
            return f"prefilled {request}.{attempt} into {_runs(kv.blocks) if kv else 'its own memory'}"
        case HandedOver(request, attempt, generated, kv):
            where = f"KV in {_runs(kv.blocks)}" if kv else "no KV"
            return f"hands {request}.{attempt} over after {generated} tokens, {where}"
        case BroughtIn(model, there):
            return f"has {model} there" if there else f"has no room for {model} yet"
        case KvReleased(request, attempt):
            return f"releases KV of {request}.{attempt}"
        case Phase(requests, running):
            return f"{'runs' if running else 'preempts'} {' '.join(map(str, requests))}"
        case GaveUp(request, attempt):
            return f"gives up {request}.{attempt}"
        case Broken(request, attempt, reason):
            return f"breaks {request}.{attempt}: {reason}"
        case SwitchDone(model, prefetched, make_room_ns, copy_ns, kv_ns):
            return f"switched to {model} in {make_room_ns}+{copy_ns}+{kv_ns}{' prefetched' if prefetched else ''}"
        case StepsTook(model, context_tokens, rows, step_ns):
            return f"reckons with {step_ns} for a step of {model}, {rows} rows of {context_tokens} tokens"
        case NeedPages(count, urgent):
            return f"needs {count} pages{' urgently' if urgent else ''}"
        case GaveBack(number, runs, refused, spare):
            return f"gives back for {number}: {f'nothing of {spare}' if refused else _runs(runs)}"
        case OfferKv(offer, model, tokens):
            return f"offers KV of {model}, {len(tokens)} bytes of tokens, as {offer}"
        case KvKept(offer, done):
            return f"{'has kept' if done else 'does not keep'} offer {offer}"
        case Reused(request, attempt, tokens):
            return f"reuses {tokens} tokens for {request}.{attempt}"
        case NeedSlabs(count):
            return f"needs {count} slabs"
        case ReturnSlabs(slabs):
            return f"returns slabs {' '.join(map(str, slabs))}"
        case FetchKv(request, attempt, kv, blocks):
            return f"fetches KV of {request}.{attempt} from {kv.machine} {_runs(kv.blocks)} into {_runs(blocks)}"
        case _:
            return None


def _described_to_instance(message: ToInstance) -> str | None:
    match message:
        case Submit(job, group):
            kept = f", {job.kept.tokens} tokens kept in {_runs(job.kept.blocks)}" if job.kept else ""
            return f"submit {job.request}.{job.attempt} of {job.model} in group {group}{kept}"
        case KeepKv(offer, first, blocks):
            return f"keep of offer {offer} from {first} on in {_runs(blocks)}"
        case PrefixChecked(request, attempt, intact):
            return f"prefix of {request}.{attempt} is {'intact' if intact else 'gone'}"
        case Adopt(job, tokens, kv):
            return f"adopt {job.request}.{job.attempt} of {job.model} with {len(tokens)} tokens from {_runs(kv.blocks)}"
        case BringIn(model):
            return f"bring {model} in"
        case HandOver(request, attempt, with_kv):
            return f"hand {request}.{attempt} over{'' if with_kv else ' without its KV'}"
        case Cancel(request, attempt):
            return f"cancel {request}.{attempt}"
        case ReleaseKv(request, attempt):
            return f"release KV of {request}.{attempt}"
        case GrantSlabs(slabs, refused):
            return "slabs refused" if refused else f"slabs {' '.join(map(str, slabs))}"
        case KvFetched(request, attempt, reason):
            return f"KV of {request}.{attempt} is {f'not fetched: {reason}' if reason else 'fetched'}"
        case GrantPages(runs, refused, excessive):
            return f"pages refused{' as excessive' if excessive else ''}" if refused else f"pages {_runs(runs)}"
        case TakeBack(number, pages, _, gentle, keep):
            return f"take back {pages} pages for {number}{f' gently, keep {keep}' if gentle else ''}"
        case _:
            return None


def _event(event: EventHandle) -> str:
    return f"{event.word}:{event.value}"


def _runs(runs: Iterable[Sequence[int]]) -> str:
    return " ".join(f"{start}-{stop}" for start, stop in runs) or "nothing"


def _copies(copies: Iterable[Sequence[int]]) -> str:
    return " ".join(f"{source}>{target}x{count}" for source, target, count in copies)
