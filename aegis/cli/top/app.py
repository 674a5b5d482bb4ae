"""The terminal's side of `aegis top`."""

from __future__ import annotations

from concurrent.futures import CancelledError
from contextlib import suppress
from threading import Thread
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Footer, Static

from aegis.admin_client import AdminClient
from aegis.cli.top.cells import bar, count, milliseconds, named, rate, share, size
from aegis.cli.top.recent_activity import FollowedServer, InstanceRow, ModelRow, Summary
from aegis.config.sizes import format_size
from aegis.core.errors import UserError
from aegis.core.ids import ModelId
from aegis.telemetry.live_view import Live

_INSTANCES = ("instance", "role", "state", "model", "running", "queued", "resident", "busy", "memory")
_MODELS = ("model", "state", "weights", "running", "waiting", "tokens/s", "on time", "first token")
_SORTS = ("order", "tokens/s", "queue", "on time")
_BAR = 10


class Top(App[None]):
    """Asks `client` for news every `every_s` seconds; goes on trying if it does not answer."""

    TITLE = "aegis top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: $background; }
    #head { height: auto; padding: 0 1; }
    .title { height: 1; padding: 0 1; margin-top: 1; text-style: bold; color: $text-muted; }
    DataTable { height: auto; max-height: 100%; background: $background; }
    #memory { height: auto; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "quit", "Quit"),
        ("p", "pause", "Pause"),
        ("s", "sort", "Sort models"),
        Binding("ctrl+c", "quit", show=False, priority=True),
    ]

    def __init__(self, client: AdminClient, url: str, every_s: float) -> None:
        super().__init__()
        self._client = client
        self._url = url
        self._every_s = every_s
        self._server = FollowedServer()
        self._live: Live | None = None
        self._paused = False
        self._asking = False
        self._sort = _SORTS[0]

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        with VerticalScroll():
            for name, columns in (("instances", _INSTANCES), ("models", _MODELS)):
                yield Static(name, id=f"{name}-title", classes="title")
                table: DataTable[Text | str] = DataTable(id=name, show_cursor=False, zebra_stripes=True)
                table.can_focus = False  # the whole view scrolls
                for column in columns:
                    table.add_column(column, key=column)
                yield table
            yield Static("memory", classes="title")
            yield Static(id="memory")
        yield Footer()

    def on_mount(self) -> None:
        self._show_message(f"asking {self._url} …")
        self._fetch()
        self.set_interval(self._every_s, self._fetch)

    def action_pause(self) -> None:
        self._paused = not self._paused
        if self._live:
            self._show(self._live)

    def action_sort(self) -> None:
        self._sort = _SORTS[(_SORTS.index(self._sort) + 1) % len(_SORTS)]
        if self._live:
            self._show(self._live)

    def _fetch(self) -> None:
        """One question at a time, in a thread that nobody who quits has to wait for."""
        if not self._paused and not self._asking:
            self._asking = True
            Thread(target=self._ask, daemon=True).start()

    def _ask(self) -> None:
        answer: Live | UserError
        try:
            answer = self._client.live(self._server.seen)
        except UserError as error:
            answer = error
        if self.is_running:
            with suppress(RuntimeError, CancelledError):  # it quits just now
                self.call_from_thread(self._on_answer, answer)

    def _on_answer(self, answer: Live | UserError) -> None:
        self._asking = False
        if isinstance(answer, UserError):
            self._show_message(f"{answer.message} — trying again", "bold red")
        else:
            self._on_live(answer)

    def _on_live(self, live: Live) -> None:
        if self._is_shown() and self._server.add(live):
            self._live = live
            self._show(live)

    def _show_message(self, text: str, style: str = "") -> None:
        if self._is_shown():
            self.query_one("#head", Static).update(Text(text, style=style))

    def _is_shown(self) -> bool:
        """No longer while it quits, which an answer may come during."""
        return bool(self.query("#head"))

    # --- showing ------------------------------------------------------------------------------------------------------

    def _show(self, live: Live) -> None:
        activity, seats = self._server.activity, {model.tally.model: model.seat for model in live.models}
        self.query_one("#head", Static).update(self._head(live, activity.summary(live)))
        instances = {row.now.instance: _instance(row, seats) for row in activity.instances(live)}
        self._fill("instances", {str(name): cells for name, cells in instances.items()})
        models = sorted(activity.models(live), key=self._order)
        self._fill("models", {str(row.now.tally.model): _model(row) for row in models})
        title = "models" if self._sort == _SORTS[0] else f"models, by {self._sort}"
        self.query_one("#models-title", Static).update(title)
        self.query_one("#memory", Static).update(_memory(live))

    def _head(self, live: Live, now: Summary) -> Text:
        state = ("paused", "bold yellow") if self._paused else ("live", "bold green")
        return Text.assemble(
            state,
            (f"  {self._url}  {live.policy}  aegis {live.version}\n", "dim"),
            (f"{now.tokens_per_s:,.0f}", "bold"), " tokens/s   ",
            share(now.on_time), " on time   ",
            (f"{now.running:,}", "bold"), " running   ", (f"{now.waiting:,}", "bold"), " waiting   ",
            (f"{now.switches:,}", "bold"), " switches in the last minute",
        )  # fmt: skip

    def _order(self, row: ModelRow) -> tuple[float, int]:
        tally = row.now.tally
        first = {
            "order": 0.0,
            "tokens/s": -row.tokens_per_s,
            "queue": -float(tally.running + tally.waiting),
            "on time": 1.0 if row.on_time is None else row.on_time,
        }[self._sort]
        return first, row.now.seat

    def _fill(self, name: str, rows: dict[str, list[Text | str]]) -> None:
        """Changes the cells of rows that stay in place, so that the scroll position stays, too."""
        table: DataTable[Text | str] = self.query_one(f"#{name}", DataTable)
        if [str(key.value) for key in table.rows] != list(rows):
            table.clear()
            for key, cells in rows.items():
                table.add_row(*cells, key=key)
            return
        for key, cells in rows.items():
            for column, cell in zip(table.columns, cells, strict=True):
                table.update_cell(key, column, cell, update_width=True)


def _instance(row: InstanceRow, seats: dict[ModelId, int]) -> list[Text | str]:
    now = row.now
    model = named(now.model, seats.get(now.model, 0)) if now.model else Text("–", style="dim")
    state = Text(now.state, style="" if now.state == "up" else "bold yellow")
    busy = Text.assemble(bar(row.busy, _BAR), f" {row.busy:4.0%}")
    return [
        str(now.instance),
        str(now.role),
        state,
        model,
        count(now.running),
        count(now.queued),
        count(len(now.resident)),
        busy,
        size(row.held_bytes),
    ]


def _model(row: ModelRow) -> list[Text | str]:
    now = row.now
    state = Text(now.state, style="" if now.state == "ready" else "bold yellow")
    return [
        named(now.tally.model, now.seat),
        state,
        now.weights,
        count(now.tally.running),
        count(now.tally.waiting),
        rate(row.tokens_per_s),
        share(row.on_time),
        milliseconds(row.first_token_ms),
    ]


def _memory(live: Live) -> Text:
    memory = live.memory
    uses = [
        (f"device {device.device}", device.capacity_bytes - device.free_bytes, device.capacity_bytes)
        for device in memory.devices
    ]
    uses.append(("host KV", memory.host_kv.leased_bytes, memory.host_kv.capacity_bytes))
    uses.append(("model cache", memory.model_cache.used_bytes, memory.model_cache.capacity_bytes))
    lines = [
        Text.assemble(
            f"{name:12} ",
            bar(used / capacity if capacity else 0.0, 3 * _BAR),
            f" {format_size(used)} of {format_size(capacity)}",
        )
        for name, used, capacity in uses
    ]
    return Text("\n").join(lines)
