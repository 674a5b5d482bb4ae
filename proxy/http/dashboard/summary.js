// The figures at the top, each with its last two minutes.

import { byId, h, say, svg } from "./dom.js";
import { count, duration, plural, quantile, rate, share } from "./numbers.js";
import { after } from "./past.js";

const MINUTE = 60_000, DRAWN = 120_000, RATE = 5_000;
const WIDE = 120, HIGH = 28;

const TILES = [
  { id: "on-time", name: "Tokens on time", hint: "of the last minute" },
  { id: "tokens", name: "Tokens per second", hint: "" },
  { id: "requests", name: "Requests running", hint: "" },
  { id: "first", name: "First token, 1 min", hint: "" },
  { id: "switches", name: "Switches per minute", hint: "" },
];

export class Summary {
  constructor(past) {
    this.past = past;
    this.tiles = new Map(TILES.map(({ id, name, hint }) => [id, tile(name, hint)]));
    byId("summary").replaceChildren(...[...this.tiles.values()].map(({ root }) => root));
  }

  hear() {
    const { samples } = this.past, last = samples.at(-1), minute = this.past.ago(MINUTE);
    const due = last.all.due - minute.all.due, met = last.all.met - minute.all.met;
    this.show("on-time", due ? share(met, due) : share(last.all.met, last.all.due), due ? `${count(due)} due in the last minute` : "since the start");
    this.show("tokens", rate(this.rate(last)), `${count(last.all.tokens)} since the start`);
    this.show("requests", count(last.all.running), `${count(last.all.waiting)} waiting · ${count(last.all.finished)} finished`);
    const firsts = this.past.firstTokens(MINUTE);
    this.show("first", firsts.length ? duration(quantile(firsts, 0.5)) : "–", firsts.length ? `median; ${duration(quantile(firsts, 0.99))} at p99` : "none in the last minute");
    const switches = this.past.switches.slice(after(this.past.switches, last.at - MINUTE, "at"));
    const took = switches.map((each) => each.took).sort((a, b) => a - b);
    this.show("switches", count(switches.length), took.length ? `median ${duration(quantile(took, 0.5))}; ${duration(quantile(took, 0.99))} at p99` : "none in the last minute");
    this.draw("on-time", (now, then) => (now.all.due > then.all.due ? (now.all.met - then.all.met) / (now.all.due - then.all.due) : null), 1);
    this.draw("tokens", (now, then) => perSecond(now, then));
    this.draw("requests", (now) => now.all.running);
    this.events("first", this.past.firsts);
    this.events("switches", this.past.switches);
  }

  rate(now) {
    return perSecond(now, this.past.ago(RATE));
  }

  show(id, value, hint) {
    const { big, small } = this.tiles.get(id);
    say(big, value);
    say(small, hint);
  }

  draw(id, of, top) {
    const { samples } = this.past, end = samples.at(-1).at;
    const from = Math.max(after(samples, end - DRAWN, "at"), 1);
    const points = [];
    for (let at = from; at < samples.length; at++) points.push([samples[at].at - end + DRAWN, of(samples[at], samples[Math.max(at - 3, 0)])]);
    this.curve(id, points.filter(([, value]) => value !== null), top);
  }

  /** How many there were in each five seconds. */
  events(id, list) {
    const end = this.past.samples.at(-1).at, counts = Array(DRAWN / RATE).fill(0);
    for (const { at } of list.slice(after(list, end - DRAWN, "at"))) counts[Math.min(Math.floor((at - end + DRAWN) / RATE), counts.length - 1)]++;
    this.curve(id, counts.map((value, at) => [(at + 0.5) * RATE, value]));
  }

  curve(id, points, top = Math.max(...points.map(([, value]) => value), 1)) {
    const { line, area } = this.tiles.get(id);
    const at = points.map(([when, value]) => `${((when / DRAWN) * WIDE).toFixed(1)} ${(HIGH - 2 - (value / top) * (HIGH - 4)).toFixed(1)}`);
    line.setAttribute("d", at.length > 1 ? `M${at.join("L")}` : "");
    area.setAttribute("d", at.length > 1 ? `M${at[0].split(" ")[0]} ${HIGH}L${at.join("L")}L${at.at(-1).split(" ")[0]} ${HIGH}Z` : "");
  }
}

function perSecond(now, then) {
  return now.at > then.at ? ((now.all.tokens - then.all.tokens) / (now.at - then.at)) * 1000 : 0;
}

function tile(name, hint) {
  const big = h("dd", { class: "big" }, "–"), small = h("dd", { class: "small" }, hint);
  const line = svg("path", { class: "line" }), area = svg("path", { class: "area" });
  const curve = svg("svg", { class: "spark", viewBox: `0 0 ${WIDE} ${HIGH}`, preserveAspectRatio: "none", "aria-hidden": "true" }, area, line);
  return { root: h("dl", { class: "tile" }, h("dt", {}, name), big, small, curve), big, small, line, area };
}
