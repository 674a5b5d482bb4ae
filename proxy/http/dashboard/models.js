// A row for each model: how many of its tokens were on time, who waits, how fast it goes.

import { repaint, swatch } from "./colours.js";
import { byId, h, keyed, say } from "./dom.js";
import { count, duration, quantile, rate, share } from "./numbers.js";

const MINUTE = 60_000, RATE = 5_000, LATENCY = 300_000, MANY = 12, SHOWN_MAX = 100;
const COLUMNS = ["seat", "attainment", "waiting", "rate", "first"];

export class Models {
  constructor(past, pick) {
    this.past = past;
    this.pick = pick;
    this.by = "seat";
    this.wanted = "";
    byId("filter").addEventListener("input", (event) => {
      this.wanted = event.target.value.trim().toLowerCase();
      this.show();
    });
    for (const button of document.querySelectorAll("#models thead button")) {
      button.addEventListener("click", () => this.sort(button.dataset.by));
    }
  }

  sort(by) {
    this.by = COLUMNS.includes(by) ? by : "seat";
    for (const button of document.querySelectorAll("#models thead button")) {
      button.closest("th").setAttribute("aria-sort", button.dataset.by === this.by ? (this.by === "seat" ? "ascending" : "descending") : "none");
    }
    this.show();
  }

  hear(live) {
    const now = this.past.samples.at(-1), minute = this.past.ago(MINUTE), lately = this.past.ago(RATE);
    this.models = live.models.map(({ seat, state, weights, tally }) => {
      const [model, waiting, running, , , failed, , , tokens, met, due] = tally;
      const before = minute.of.get(model), then = lately.of.get(model), took = this.past.firstTokens(LATENCY, model);
      const dueLately = before ? due - before.due : 0, metLately = before ? met - before.met : 0;
      return {
        model, seat, state, weights, waiting, running, failed, met, due, dueLately, metLately,
        attainment: due ? 1 - met / due : -1,
        rate: then && now.at > lately.at ? ((tokens - then.tokens) / (now.at - lately.at)) * 1000 : 0,
        first: quantile(took, 0.5) ?? -1,
      };
    });
    this.show();
  }

  show() {
    const { by } = this, all = this.models ?? [], found = all.filter(({ model }) => model.toLowerCase().includes(this.wanted));
    const order = by === "seat" ? (a, b) => a.seat - b.seat : (a, b) => b[by] - a[by] || a.seat - b.seat;
    found.sort(order);
    byId("filter").hidden = all.length <= MANY;
    keyed(byId("model-rows"), found.slice(0, SHOWN_MAX), ({ model }) => model, (it) => this.row(it), (row, it) => this.tell(row, it));
    const more = found.length - SHOWN_MAX, note = byId("models-note");
    note.hidden = more <= 0 && found.length > 0;
    say(note, !all.length ? "No model is served yet. Add one: aegis models add PATH" : more > 0 ? `${count(more)} more; narrow them down above.` : "No model of that name.");
  }

  row({ model, seat }) {
    const name = h("button", { type: "button", class: "model-name", title: "Show only this model in the timeline", click: () => this.pick(model) }, swatch(seat), h("span", {}, model));
    const bar = h("span", { class: "fill" }), met = h("span", { class: "number" }), badge = h("span", { class: "state" });
    const cells = Array.from({ length: 3 }, () => h("td", { class: "number" }));
    const row = h("tr", {}, h("th", { scope: "row" }, h("div", { class: "named" }, name, badge)),
      h("td", { class: "attainment" }, h("div", { class: "met" }, h("span", { class: "bar", "aria-hidden": "true" }, bar), met)), ...cells);
    Object.assign(row, { name, bar, met, badge, numbers: cells });
    return row;
  }

  tell(row, { model, state, waiting, running, rate: speed, first, failed, met, due, dueLately, metLately }) {
    const [part, whole] = dueLately ? [metLately, dueLately] : [met, due], ratio = whole ? part / whole : 0;
    say(row.met, share(part, whole));
    row.met.title = due ? `${share(met, due)} of ${count(due)} tokens since the start` : "No token was due yet";
    row.bar.style.width = `${ratio * 100}%`;
    row.bar.dataset.grade = ratio >= 0.99 ? "good" : ratio >= 0.9 ? "fair" : "bad";
    const ailing = state !== "ready" ? state : failed ? `${count(failed)} failed` : "";
    say(row.badge, ailing);
    row.badge.hidden = !ailing;
    row.badge.dataset.state = state === "failed" || failed ? "bad" : "";
    row.name.setAttribute("aria-pressed", String(document.body.dataset.only === model));
    const [queue, rateCell, firstCell] = row.numbers;
    say(queue, running + waiting ? `${count(running)} + ${count(waiting)}` : "–");
    say(rateCell, speed ? rate(speed) : "–");
    say(firstCell, first >= 0 ? duration(first) : "–");
  }

  repaint() {
    for (const drawn of byId("model-rows").querySelectorAll("svg.swatch")) repaint(drawn, Number(drawn.dataset.seat));
  }
}
