// The timeline: a row for each instance, drawn on a canvas of its own; only rows that are seen are drawn.

import { colour, fill, ink, swatch, repaint } from "./colours.js";
import { byId, h, keyed, say } from "./dom.js";
import { count, duration, plural, size } from "./numbers.js";
import { after } from "./past.js";

// Runs, weights, KV: where each track is in a row. What ran on a part of the device has that part of the height, and what
// ran on its second lane is below.
const RUNS = 0, SECOND = 3;
const TRACKS = [{ top: 6, height: 24 }, { top: 35, height: 7 }, { top: 46, height: 6 }, { top: 6, height: 24 }];
const ROW = 58, FRAME_MS = 33, DELAY_MS = 1400, NEAR_PX = 4, MARK_PX = 8, LEAST_LABEL_PX = 40;
const FONT = "600 11px system-ui, sans-serif";
const SPANS_S = [10, 30, 120, 600];
const WHAT = {
  prefill: "prefill", decode: "decode", switch: "switch to", load: "weights loaded", prefetch: "weights fetched ahead",
  swap_in: "KV brought in", swap_out: "KV moved out", evict: "evicted", refuse: "refused",
};

export class Timeline {
  constructor(past) {
    this.past = past;
    this.seats = new Map();
    this.span = 30_000;
    this.end = null; // of what is shown; null: it goes with the time
    this.clock = null; // the server's, as this page reckons
    this.only = null;
    this.rows = new Map();
    this.visible = new Set();
    this.drawnAt = 0;
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.tip = new Tip(byId("tip"));
    this.observer = new IntersectionObserver((seen) => {
      for (const { target, isIntersecting } of seen) isIntersecting ? this.visible.add(target) : this.visible.delete(target);
    });
    this.controls();
    const step = (at) => {
      requestAnimationFrame(step);
      if (!document.hidden && at - this.drawnAt >= (this.still.matches ? 1000 : FRAME_MS)) this.draw(at);
    };
    requestAnimationFrame(step);
  }

  /** What is known now ends a little ago: it is shown that much later, so that it moves evenly. */
  hear(live) {
    const offset = live.now_ns / 1e6 - performance.now();
    this.clock = this.clock === null || Math.abs(offset - this.clock) > 500 ? offset : this.clock + (offset - this.clock) / 8;
    for (const { seat, tally } of live.models) this.seats.set(tally[0], seat);
    keyed(byId("lanes"), live.instances, (it) => it.instance, (it) => this.row(it), (row, it) => this.tell(row, it));
    this.empty(live);
  }

  get stop() {
    return this.end ?? performance.now() + this.clock - (this.still.matches ? 0 : DELAY_MS);
  }

  seat(model) {
    return this.seats.get(model) ?? 0;
  }

  controls() {
    const choice = byId("span");
    for (const s of SPANS_S) {
      const text = s < 60 ? `${s} s` : `${s / 60} min`;
      const input = h("input", { type: "radio", name: "span", value: s, checked: s * 1000 === this.span, change: () => this.zoom(s * 1000) });
      choice.append(h("label", {}, input, h("span", {}, text)));
    }
    byId("pause").addEventListener("click", () => this.hold(this.end === null));
  }

  zoom(span) {
    this.span = Math.min(Math.max(span, 500), 600_000);
    for (const input of byId("span").querySelectorAll("input")) input.checked = Number(input.value) * 1000 === this.span;
  }

  hold(held, at = this.stop) {
    this.end = held ? at : null;
    const button = byId("pause");
    button.setAttribute("aria-pressed", String(held));
    say(button.querySelector("span"), held ? "Go live" : "Pause");
  }

  row({ instance }) {
    const canvas = h("canvas", { tabindex: 0, role: "img", height: ROW });
    const row = h("div", { class: "lane" },
      h("div", { class: "lane-name" },
        h("strong", {}, instance), h("span", { class: "state" }),
        h("div", { class: "now" }), h("div", { class: "queue" })),
      canvas);
    row.instance = instance;
    row.canvas = canvas;
    canvas.row = row;
    this.observer.observe(canvas);
    new Pointing(this, row);
    return row;
  }

  tell(row, it) {
    const [name, state, now, queue] = [...row.firstElementChild.children];
    row.past = this.past.of(it.instance);
    row.live = it;
    say(state, it.state === "up" ? "" : it.state);
    state.hidden = it.state === "up";
    const model = it.model ?? "";
    if (now.dataset.model !== model) {
      now.dataset.model = model;
      now.replaceChildren(...(model ? [swatch(this.seat(model)), h("span", {}, model)] : [h("span", { class: "soft" }, "no model yet")]));
    }
    say(queue, it.running + it.queued ? `${count(it.running)} running · ${count(it.queued)} queued` : "idle");
    row.canvas.setAttribute("aria-label", `${name.textContent}: ${model || "no model"}, ${queue.textContent}. Arrow keys move from one stretch to the next.`);
  }

  repaint() {
    for (const drawn of byId("lanes").querySelectorAll("svg.swatch")) repaint(drawn, Number(drawn.dataset.seat));
  }

  empty(live) {
    const since = this.stop - this.span;
    const none = live.instances.every(({ instance }) => (this.past.instances.get(instance)?.tracks ?? []).every((track) => (track.at(-1)?.stop ?? 0) < since));
    byId("timeline-empty").hidden = !none;
  }

  draw(at) {
    if (this.clock === null) return;
    this.drawnAt = at;
    const style = getComputedStyle(document.documentElement);
    this.paint = Object.fromEntries(["ink", "soft", "line", "kv", "bad", "warn", "track"].map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    const stop = this.stop;
    this.axis(stop);
    for (const canvas of this.visible) this.paintRow(canvas, stop);
    this.tip.follow();
  }

  pen(canvas, high) {
    const ratio = devicePixelRatio || 1, wide = canvas.clientWidth;
    if (canvas.width !== Math.round(wide * ratio) || canvas.height !== Math.round(high * ratio)) {
      canvas.width = Math.round(wide * ratio);
      canvas.height = Math.round(high * ratio);
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, wide, high);
    return pen;
  }

  axis(stop) {
    const canvas = byId("axis"), wide = canvas.clientWidth, pen = this.pen(canvas, 22);
    pen.font = "11px system-ui, sans-serif";
    pen.fillStyle = this.paint.soft;
    pen.textBaseline = "middle";
    const latest = performance.now() + this.clock - DELAY_MS;
    this.ticks(stop, wide, (x, tick) => {
      const ago = Math.round((latest - tick) / 1000), text = ago <= 0 ? "now" : `−${ago < 120 ? `${ago} s` : `${+(ago / 60).toFixed(1)} min`}`;
      const half = pen.measureText(text).width / 2;
      if (x - half > 0 && x + half < wide) pen.fillText(text, x - half, 11);
    });
  }

  /** Marks at whole steps before the end when the view goes with the time; else they move with what is shown. */
  ticks(stop, wide, mark) {
    const rough = (this.span * 90) / wide;
    const step = [100, 200, 500, 1000, 2000, 5000, 10_000, 15_000, 30_000, 60_000, 120_000, 300_000].find((each) => each >= rough) ?? 600_000;
    const origin = performance.now() + this.clock - DELAY_MS;
    for (let back = Math.ceil((origin - stop) / step); origin - back * step > stop - this.span; back++) {
      mark(wide - ((stop - (origin - back * step)) * wide) / this.span, origin - back * step);
    }
  }

  paintRow(canvas, stop) {
    const wide = canvas.clientWidth, pen = this.pen(canvas, ROW), { row } = canvas, view = { stop, wide, scale: wide / this.span };
    pen.fillStyle = this.paint.track;
    for (const { top, height } of TRACKS.slice(0, SECOND)) pen.fillRect(0, top, wide, height);
    pen.fillStyle = this.paint.line;
    this.ticks(stop, wide, (x) => pen.fillRect(Math.round(x), 0, 1, ROW));
    row.past.tracks.forEach((track, number) => this.track(pen, track, number, view));
    this.marks(pen, row.past.marks, view);
    if (row.chosen) this.frame(pen, row.chosen, view);
  }

  track(pen, track, number, { stop, wide, scale }) {
    const start = stop - this.span;
    let drawn = -1;
    for (let at = after(track, start, "stop"); at < track.length && track[at].start < stop; at++) {
      const stretch = track[at], right = (stretch.stop - start) * scale;
      if (right <= drawn) continue;
      const left = Math.max((stretch.start - start) * scale, drawn, -10), width = Math.max(right - left, 1);
      drawn = left + width;
      const { top, height } = part(number, stretch);
      pen.globalAlpha = this.only && this.only !== stretch.model ? 0.12 : 1;
      this.stretch(pen, stretch, left, top, width, height);
      if (height > 11 && width > LEAST_LABEL_PX && stretch.kind !== "switch") this.label(pen, stretch, left, top, Math.min(width, wide - left), height);
    }
    pen.globalAlpha = 1;
  }

  stretch(pen, { kind, model }, left, top, width, height) {
    const seat = this.seat(model);
    pen.fillStyle = fill(pen, seat);
    const gap = width > 4 ? 0.5 : 0;
    if (kind === "switch") {
      pen.fillStyle = this.paint.soft;
      pen.fillRect(left, top + height / 2 - 2, width, 4);
    } else if (kind === "prefetch") {
      pen.strokeStyle = colour(seat);
      pen.lineWidth = 1.5;
      pen.strokeRect(left + 0.75, top + 0.75, Math.max(width - 1.5, 0.5), height - 1.5);
    } else if (kind === "swap_in" || kind === "swap_out") {
      pen.fillStyle = this.paint.kv; // of several models at once
      pen.fillRect(left, top + (kind === "swap_out" ? height / 2 : 0), width, height / 2);
    } else {
      pen.beginPath();
      pen.roundRect(left + gap, top, width - 2 * gap, height, Math.min(3, width / 2));
      pen.fill();
      if (kind === "prefill") {
        pen.fillStyle = this.paint.ink;
        pen.fillRect(left + gap, top, width - 2 * gap, 3);
      }
    }
  }

  label(pen, stretch, left, top, width, height) {
    pen.font = FONT;
    pen.textBaseline = "middle";
    const seat = this.seat(stretch.model), text = shortened(pen, stretch.model, Math.min(width, width + left) - 12);
    if (!text) return;
    const x = Math.max(left, 0) + 6, wide = pen.measureText(text).width;
    pen.fillStyle = colour(seat); // a texture behind letters makes them hard to read
    pen.fillRect(x - 3, top + 5, wide + 6, height - 8);
    pen.fillStyle = ink(seat);
    pen.fillText(text, x, top + height / 2 + 1.5);
  }

  marks(pen, marks, { stop, scale }) {
    const start = stop - this.span;
    let drawn = -MARK_PX;
    for (let at = after(marks, start, "at"); at < marks.length && marks[at].at < stop; at++) {
      const x = (marks[at].at - start) * scale;
      if (x < drawn + MARK_PX && marks[at].kind !== "refuse") continue;
      drawn = x;
      pen.fillStyle = marks[at].kind === "refuse" ? this.paint.bad : this.paint.warn;
      pen.beginPath();
      pen.moveTo(x - 3, 0);
      pen.lineTo(x + 3, 0);
      pen.lineTo(x, 4.5);
      pen.fill();
    }
  }

  frame(pen, { stretch, track }, { stop, scale }) {
    const { top, height } = part(track, stretch), left = (stretch.start - stop + this.span) * scale;
    pen.strokeStyle = this.paint.ink;
    pen.lineWidth = 2;
    pen.strokeRect(left - 1, top - 1, Math.max((stretch.stop - stretch.start) * scale, 1) + 2, height + 2);
  }

  /** What is under a point of a row: a mark, else the stretch that is nearest. */
  at(row, x, y) {
    const wide = row.canvas.clientWidth, perPx = this.span / wide, when = this.stop - (wide - x) * perPx;
    const mark = y < 9 && row.past.marks.find((each) => Math.abs(each.at - when) < NEAR_PX * perPx);
    if (mark) return { mark };
    const under = Math.max(TRACKS.slice(0, SECOND).findLastIndex(({ top }) => y >= top - 3), RUNS);
    for (const track of under === RUNS ? [SECOND, RUNS] : [under]) {
      const list = row.past.tracks[track], found = list[after(list, when - NEAR_PX * perPx, "stop")];
      if (!found || found.start > when + NEAR_PX * perPx) continue;
      if (track !== SECOND || y >= part(track, found).top) return { stretch: found, track };
    }
    return null;
  }

  /** The lines that tell of it: what, numbers, why. */
  told(row, { stretch, mark }) {
    if (mark) return { model: mark.model, title: `${mark.model} ${WHAT[mark.kind]}`, facts: "", why: mark.line };
    const { kind, model, start, stop, requests, steps, made, tokens, bytes, share } = stretch;
    const facts = [duration(stop - start)];
    if (kind === "decode") facts.push(`batch of ${count(requests)}`, plural(steps, "step"), plural(made, "token"));
    if (kind === "prefill") facts.push(plural(tokens, "token"));
    if (share < 1000) facts.push(`on ${share / 10} % of the device`);
    if (bytes) facts.push(size(bytes));
    const title = kind === "switch" ? `switch to ${model}` : model ? `${model}: ${WHAT[kind]}` : WHAT[kind];
    return { model, title, facts: facts.join(" · "), why: row.past.why(stretch) };
  }
}

/** Where a stretch is in its row. */
function part(track, { share }) {
  const { top, height } = TRACKS[track], own = (height * share) / 1000;
  return { top: track === SECOND ? top + height - own : top, height: own };
}

function shortened(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  const letters = Math.floor((width / pen.measureText(text).width) * text.length) - 1;
  return letters > 3 ? `${text.slice(0, letters)}…` : "";
}

/** The mouse, fingers and keys on a row. */
class Pointing {
  constructor(timeline, row) {
    this.timeline = timeline;
    this.row = row;
    this.dragged = null;
    const { canvas } = row;
    canvas.addEventListener("pointerdown", (event) => this.down(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", () => (this.dragged = null));
    canvas.addEventListener("pointercancel", () => (this.dragged = null));
    canvas.addEventListener("pointerleave", () => this.leave());
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("blur", () => this.leave());
  }

  down(event) {
    this.dragged = { x: event.clientX, stop: this.timeline.stop, moved: false };
    if (event.pointerType === "mouse") this.row.canvas.setPointerCapture(event.pointerId);
    else this.show(event);
  }

  move(event) {
    const { timeline, dragged } = this;
    if (dragged && event.buttons) {
      const moved = event.clientX - dragged.x;
      dragged.moved ||= Math.abs(moved) > NEAR_PX;
      if (dragged.moved) {
        const latest = performance.now() + timeline.clock - DELAY_MS;
        timeline.hold(true, Math.min(dragged.stop - (moved * timeline.span) / this.row.canvas.clientWidth, latest));
        timeline.tip.hide();
        return;
      }
    }
    if (event.pointerType === "mouse") this.show(event);
  }

  show(event) {
    const box = this.row.canvas.getBoundingClientRect(), { timeline, row } = this;
    const { clientX, clientY } = event;
    timeline.tip.watch(() => {
      const found = timeline.at(row, clientX - box.left, clientY - box.top);
      return found && { told: timeline.told(row, found), seat: timeline.seat((found.stretch ?? found.mark).model), x: clientX, y: box.bottom };
    });
  }

  leave() {
    this.row.chosen = null;
    this.timeline.tip.hide();
  }

  wheel(event) {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    this.timeline.zoom(this.timeline.span * (event.deltaY > 0 ? 1.25 : 0.8));
  }

  key(event) {
    const { timeline } = this, does = {
      ArrowLeft: () => this.choose(-1), ArrowRight: () => this.choose(1), Escape: () => this.leave(),
      "+": () => timeline.zoom(timeline.span / 2), "-": () => timeline.zoom(timeline.span * 2),
      End: () => (this.leave(), timeline.hold(false)), " ": () => timeline.hold(timeline.end === null),
    }[event.key];
    if (!does || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    does();
  }

  /** The next stretch of what runs, in time; the view stands still meanwhile. */
  choose(step) {
    const { timeline, row } = this, runs = row.past.tracks[0];
    if (timeline.end === null) timeline.hold(true);
    const start = timeline.end - timeline.span, known = row.chosen ? runs.indexOf(row.chosen.stretch) : -1;
    const at = known >= 0 ? known + step : after(runs, timeline.end, "start") - 1;
    const stretch = runs[at];
    if (!stretch) return;
    row.chosen = { stretch, track: 0 };
    if (stretch.start < start || stretch.stop > timeline.end) timeline.hold(true, stretch.stop + timeline.span / 2);
    const box = row.canvas.getBoundingClientRect(), middle = (Math.max(stretch.start, start) + stretch.stop) / 2;
    timeline.tip.watch(() => ({
      told: timeline.told(row, row.chosen), seat: timeline.seat(stretch.model),
      x: box.left + ((middle - timeline.end + timeline.span) * box.width) / timeline.span, y: row.canvas.getBoundingClientRect().bottom,
    }));
  }
}

/** What is pointed at, told in a box that stays on the screen; what moves beneath the pointer is told anew. */
class Tip {
  constructor(box) {
    this.box = box;
    this.source = null;
    addEventListener("scroll", () => this.hide(), { passive: true });
  }

  watch(source) {
    this.source = source;
    this.follow();
  }

  hide() {
    this.source = null;
    this.box.hidden = true;
  }

  follow() {
    const found = this.source?.();
    this.box.hidden = !found;
    if (!found) return;
    const { told: { title, facts, why }, seat, x, y } = found, [head, numbers, reason] = this.box.children;
    const [mark, text] = head.children;
    if (Number(mark.dataset.seat) !== seat) repaint(mark, seat);
    say(text, title);
    say(numbers, facts);
    say(reason, why);
    reason.hidden = !why;
    const { offsetWidth: wide, offsetHeight: high } = this.box;
    const below = y + 8 + high < innerHeight;
    this.box.style.left = `${Math.min(Math.max(x - wide / 2, 8), document.documentElement.clientWidth - wide - 8)}px`;
    this.box.style.top = `${below ? y + 8 : Math.max(y - ROW - high - 8, 8)}px`;
  }
}
