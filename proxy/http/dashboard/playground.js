// The same question to several models at once, their answers side by side.

import { repaint, swatch } from "./colours.js";
import { byId, h, keyed, say } from "./dom.js";
import { ask, reason } from "./key.js";
import { duration, plural, rate } from "./numbers.js";

const COLUMNS_MAX = 6, FIRST = 2;

export class Playground {
  constructor() {
    this.seats = new Map();
    this.chosen = null;
    this.running = 0;
    byId("add-model").addEventListener("change", (event) => this.add(event.target.value));
    byId("ask").addEventListener("submit", (event) => (event.preventDefault(), this.run()));
    byId("stop").addEventListener("click", () => this.stop());
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
    });
  }

  hear({ models }) {
    const asked = models.filter(({ generates }) => generates);
    this.models = asked.map(({ tally }) => tally[0]);
    for (const { seat, tally } of asked) this.seats.set(tally[0], seat);
    if (!this.chosen && asked.length) this.chosen = asked.filter(({ state }) => state === "ready").slice(0, FIRST).map(({ tally }) => tally[0]);
    this.show();
  }

  add(model) {
    if (model && !this.chosen.includes(model)) this.chosen.push(model);
    this.show();
  }

  remove(model) {
    this.columns.get(model)?.abort?.abort();
    this.chosen = this.chosen.filter((each) => each !== model);
    this.show();
  }

  get columns() {
    return (byId("columns").kept ??= new Map());
  }

  show() {
    const chosen = this.chosen ?? [];
    keyed(byId("columns"), chosen, (model) => model, (model) => this.column(model), () => {});
    const select = byId("add-model"), others = (this.models ?? []).filter((model) => !chosen.includes(model));
    keyed(select, ["", ...others], (model) => model, (model) => h("option", { value: model }, model || "Add a model…"), () => {});
    if (select.value) select.value = ""; // a list that is open is left alone
    select.disabled = !others.length || chosen.length >= COLUMNS_MAX;
    byId("run").disabled = !chosen.length || this.running > 0;
    byId("stop").disabled = !this.running;
  }

  column(model) {
    const text = h("div", { class: "answer", role: "log", tabindex: 0, "aria-label": `Answer of ${model}` });
    const note = h("p", { class: "note soft" }, "Not asked yet.");
    const head = h("header", {}, swatch(this.seats.get(model) ?? 0), h("strong", {}, model),
      h("button", { type: "button", class: "plain", "aria-label": `Remove ${model}`, click: () => this.remove(model) }, "×"));
    return Object.assign(h("article", { class: "column" }, head, text, note), { model, text, note });
  }

  async run() {
    const prompt = byId("prompt").value;
    const asked = [...byId("columns").children];
    this.running = asked.length;
    this.show();
    await Promise.all(asked.map(async (column) => {
      await this.stream(column, prompt);
      this.running--;
      this.show();
    }));
  }

  stop() {
    for (const column of byId("columns").children) column.abort?.abort();
  }

  async stream(column, prompt) {
    const answer = new Answer(column);
    column.abort = new AbortController();
    try {
      const { path, body } = this.requestOf(column.model, prompt);
      const reply = await ask(path, { method: "POST", headers: { "Content-Type": "application/json" }, body, signal: column.abort.signal });
      if (!reply.ok) throw new Error(await reason(reply));
      for await (const event of events(reply.body)) {
        if (event.error) throw new Error(event.error.message);
        answer.hear(event);
      }
      answer.end();
    } catch (error) {
      answer.fail(error.name === "AbortError" ? "Stopped." : error.message);
    }
  }

  requestOf(model, prompt) {
    const form = byId("ask"), chat = form.mode.value === "chat";
    const how = {
      model, stream: true, stream_options: { include_usage: true }, pace: "smooth",
      max_tokens: form.most.valueAsNumber || 128, temperature: form.temperature.valueAsNumber || 0,
    };
    const what = chat ? { messages: [{ role: "user", content: prompt }] } : { prompt };
    return { path: chat ? "v1/chat/completions" : "v1/completions", body: JSON.stringify({ ...how, ...what }) };
  }

  repaint() {
    for (const drawn of byId("columns").querySelectorAll("svg.swatch")) repaint(drawn, Number(drawn.dataset.seat));
  }
}

/** What is shown of one answer while it comes. */
class Answer {
  constructor(column) {
    this.column = column;
    this.began = performance.now();
    this.first = this.last = null;
    this.tokens = 0;
    column.text.replaceChildren();
    column.dataset.state = "waiting";
    say(column.note, "Waiting for its turn…");
  }

  hear({ choices, usage }) {
    if (usage) this.tokens = usage.completion_tokens;
    const piece = choices?.[0]?.delta?.content ?? choices?.[0]?.text ?? "";
    this.reason = choices?.[0]?.finish_reason ?? this.reason;
    if (!piece) return;
    this.last = performance.now();
    this.first ??= this.last;
    const { text, note } = this.column, follows = text.scrollHeight - text.scrollTop - text.clientHeight < 24;
    text.append(piece);
    if (follows) text.scrollTop = text.scrollHeight;
    this.column.dataset.state = "streaming";
    say(note, `First token after ${duration(this.first - this.began)}`);
  }

  end() {
    const told = [plural(this.tokens, "token"), this.first && `first after ${duration(this.first - this.began)}`];
    if (this.tokens > 1 && this.last > this.first) told.push(`${rate(((this.tokens - 1) * 1000) / (this.last - this.first))} a second`);
    if (this.reason === "length") told.push("cut at its length");
    this.column.dataset.state = "done";
    say(this.column.note, told.filter(Boolean).join(" · "));
  }

  fail(why) {
    this.column.dataset.state = "failed";
    say(this.column.note, why);
  }
}

/** The events of a stream, as objects. */
async function* events(body) {
  let rest = "";
  for await (const part of body.pipeThrough(new TextDecoderStream())) {
    const lines = (rest + part).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}
