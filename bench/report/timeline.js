"use strict";
// Draws the schedules. Only what is seen is drawn: of the spans that fall on one pixel of a track, the first.

const TRACKS = [{ top: 0, height: 16 }, { top: 17, height: 5 }, { top: 23, height: 4 }, { top: 28, height: 4 },
  { top: 33, height: 3 }, { top: 0, height: 16, second: true }];
const MARKS = ["evict", "refuse"];
const ROW = 38, HEAD = 22, NAMES = 74, CLOSEST_US = 200;

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const data = await new Response(stream).json();
  for (const instance of data.instances) {
    for (const track of instance.tracks) {
      let at = 0;
      track.start = Float64Array.from(track.start, (step) => (at += step));
    }
  }
  return data;
}

// Where a span is in a row: what ran on a part of the device has that part of the height, the second lane below.
function part({ top, height, second }, track, at, rowTop) {
  const share = second || (height > 10 && track.share[at]) ? (track.share[at] || 1000) / 1000 : 1;
  return { top: rowTop + top + (second ? height * (1 - share) : 0), height: height * share };
}

function firstAfter(sorted, value) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] > value) high = middle; else low = middle + 1;
  }
  return low;
}

function duration(us) {
  if (us >= 1e6) return (us / 1e6).toFixed(3) + " s";
  return us >= 1e3 ? (us / 1e3).toFixed(2) + " ms" : us + " µs";
}

function size(nbytes) {
  for (const [unit, scale] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (nbytes >= scale) return (nbytes / scale).toPrecision(3) + " " + unit;
  }
  return nbytes + " B";
}

class Timeline {
  constructor(figure, data) {
    this.figure = figure;
    this.data = data;
    this.canvas = figure.querySelector("canvas");
    this.tip = figure.querySelector(".tip");
    this.from = 0;
    this.to = data.stop;
    this.model = -1;
    this.waiting = false;
    this.fingers = new Map();
    this.listen();
    this.choose();
    this.recolour();
  }

  get width() { return this.canvas.clientWidth - NAMES; }
  get scale() { return this.width / (this.to - this.from); }
  timeAt(x) { return this.from + (x - NAMES) / this.scale; }

  recolour() {
    const style = getComputedStyle(document.documentElement);
    const value = (name) => style.getPropertyValue(name).trim();
    this.colours = { text: value("--text"), soft: value("--soft"), grid: value("--grid"), switch: value("--switch") };
    this.colours.in = value("--c5");
    this.colours.out = value("--c1");
    this.shade = value("--shade");
    this.models = this.data.models.map((_, at) => `hsl(${Math.round(at * 137.508) % 360} 62% ${this.shade})`);
    this.redraw();
  }

  redraw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.draw(); });
  }

  draw() {
    const { canvas, data } = this, ratio = window.devicePixelRatio || 1;
    const wide = canvas.clientWidth, high = HEAD + ROW * data.instances.length;
    canvas.style.height = high + "px";
    canvas.width = Math.round(wide * ratio);
    canvas.height = Math.round(high * ratio);
    const pen = (this.pen = canvas.getContext("2d"));
    pen.scale(ratio, ratio);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    this.axis(pen, wide, high);
    data.instances.forEach((instance, row) => this.row(pen, instance, HEAD + row * ROW));
    this.figure.dataset.ready = "yes";
  }

  axis(pen, wide, high) {
    const rough = (this.to - this.from) / Math.max(this.width / 80, 1);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
    pen.textAlign = "center";
    for (let at = Math.ceil(this.from / step) * step; at <= this.to; at += step) {
      const x = NAMES + (at - this.from) * this.scale;
      pen.fillStyle = this.colours.grid;
      pen.fillRect(x, HEAD - 4, 1, high);
      pen.fillStyle = this.colours.soft;
      const shown = +(at / 1e6).toFixed(6) + " s";
      if (x + pen.measureText(shown).width / 2 < wide) pen.fillText(shown, x, 9);
    }
  }

  row(pen, instance, top) {
    pen.textAlign = "left";
    pen.fillStyle = this.colours.text;
    pen.fillText(instance.name, 0, top + 9, NAMES - 6);
    pen.save();
    pen.beginPath();
    pen.rect(NAMES, top, this.width, ROW);
    pen.clip();
    instance.tracks.forEach((track, at) => this.track(pen, track, top, TRACKS[at]));
    pen.restore();
  }

  track(pen, track, rowTop, place) {
    const { kinds } = this.data, scale = this.scale;
    let drawn = -1;
    for (let at = this.firstSeen(track); at < track.start.length && track.start[at] < this.to; at++) {
      const x = (track.start[at] - this.from) * scale, end = x + track.length[at] * scale;
      if (end <= drawn) continue;
      const left = Math.max(x, drawn, 0), right = Math.max(end, left + 1);
      drawn = right;
      const kind = kinds[track.kind[at]], { top, height } = part(place, track, at, rowTop);
      pen.globalAlpha = this.model >= 0 && track.model[at] !== this.model ? 0.12 : kind === "prefetch" ? 0.65 : 1;
      pen.fillStyle = this.colour(kind, track.model[at]);
      if (kind === "switch") pen.fillRect(NAMES + left, top + height / 2 - 2, right - left, 4);
      else pen.fillRect(NAMES + left, top, right - left, height);
      if (kind === "prefill" && height > 4) {
        pen.fillStyle = this.colours.text;
        pen.fillRect(NAMES + left, top, right - left, 2);
      }
    }
    pen.globalAlpha = 1;
  }

  firstSeen(track) {
    // Spans of a track may overlap a little, so one that starts before the window may not be the only one to reach in.
    return Math.max(firstAfter(track.start, this.from) - 8, 0);
  }

  colour(kind, model) {
    if (kind === "switch") return this.colours.switch;
    if (kind === "refuse") return this.colours.text;
    if (kind === "swap_in") return this.colours.in;
    return kind === "swap_out" ? this.colours.out : this.models[model];
  }

  move(from, to) {
    const stop = this.data.stop, span = Math.min(Math.max(to - from, CLOSEST_US), Math.max(stop, CLOSEST_US));
    this.from = Math.min(Math.max(from, 0), Math.max(stop - span, 0));
    this.to = this.from + span;
    this.redraw();
  }

  zoom(factor, x = NAMES + this.width / 2) {
    const at = this.timeAt(x);
    this.move(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }

  pan(pixels) {
    const by = pixels / this.scale;
    this.move(this.from - by, this.to - by);
  }

  at(x, y) {
    const row = Math.floor((y - HEAD) / ROW), instance = this.data.instances[row];
    if (!instance || x < NAMES) return null;
    const inside = y - HEAD - row * ROW, time = this.timeAt(x), slack = 2 / this.scale;
    for (const [number, track] of instance.tracks.entries()) {
      for (let at = firstAfter(track.start, time + slack) - 1, tried = 0; at >= 0 && tried < 8; at--, tried++) {
        const { top, height } = part(TRACKS[number], track, at, 0);
        if (inside < top || inside > top + height) continue;
        if (track.start[at] + track.length[at] >= time - slack) return { instance, track, at };
      }
    }
    return null;
  }

  told({ instance, track, at }) {
    const kind = this.data.kinds[track.kind[at]], parts = [];
    parts.push(`${instance.name}: ${kind.replace("_", " ")} ${this.data.models[track.model[at]]}`);
    const from = `${(track.start[at] / 1e6).toFixed(4)} s`;
    parts.push(MARKS.includes(kind) ? `at ${from}` : `${duration(track.length[at])} from ${from}`);
    if (track.requests[at]) parts.push(`batch ${track.requests[at]}, ${track.steps[at]} steps`);
    if (track.tokens[at]) parts.push(`${track.tokens[at]} ${kind === "prefill" ? "prompt" : "cached"} tokens`);
    if (track.share[at] && track.share[at] < 1000) parts.push(`on ${track.share[at] / 10} % of the device`);
    if (track.nbytes[at]) parts.push(size(track.nbytes[at]));
    if (track.why[at]) parts.push(this.data.reasons[track.why[at]]);
    return parts.join("\n");
  }

  point(x, y) {
    const found = this.at(x, y);
    this.tip.textContent = found ? this.told(found) : "";
    const left = this.canvas.offsetLeft + x, room = this.figure.clientWidth - this.tip.offsetWidth - 8;
    this.tip.style.left = Math.max(Math.min(left + 12, room), 4) + "px";
    this.tip.style.top = this.canvas.offsetTop + y + 16 + "px";
  }

  choose() {
    const select = this.figure.querySelector("select");
    this.data.models.forEach((name, at) => { if (name) select.add(new Option(name, at)); });
    select.addEventListener("change", () => { this.model = select.value === "" ? -1 : +select.value; this.redraw(); });
  }

  listen() {
    const { canvas } = this;
    const place = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    canvas.addEventListener("pointerdown", (event) => {
      this.fingers.set(event.pointerId, place(event));
      canvas.setPointerCapture(event.pointerId);
      this.point(...place(event));
    });
    canvas.addEventListener("pointermove", (event) => {
      const now = place(event);
      if (this.fingers.has(event.pointerId)) this.drag(event.pointerId, now);
      this.point(...now);
    });
    for (const end of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(end, (event) => this.fingers.delete(event.pointerId));
    }
    canvas.addEventListener("pointerleave", () => { this.tip.textContent = ""; });
    canvas.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.metaKey) this.zoom(event.deltaY > 0 ? 1.25 : 0.8, place(event)[0]);
      else if (event.deltaX) this.pan(-event.deltaX);
      else return;
      event.preventDefault();
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
    for (const button of this.figure.querySelectorAll("button")) {
      button.addEventListener("click", () => this.press(button.dataset.do));
    }
    new ResizeObserver(() => this.redraw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.recolour());
  }

  drag(id, now) {
    const before = this.fingers.get(id), other = [...this.fingers].find(([finger]) => finger !== id);
    this.fingers.set(id, now);
    if (!other) { this.pan(now[0] - before[0]); return; }
    const was = Math.abs(before[0] - other[1][0]), is = Math.abs(now[0] - other[1][0]);
    if (was > 10 && is > 10) this.zoom(was / is, (now[0] + other[1][0]) / 2);
  }

  press(what) {
    if (what === "all") this.move(0, this.data.stop);
    else this.zoom(what === "in" ? 0.5 : 2);
  }

  key(event) {
    const actions = {
      ArrowLeft: () => this.pan(this.width / 5), ArrowRight: () => this.pan(-this.width / 5),
      "+": () => this.press("in"), "=": () => this.press("in"), "-": () => this.press("out"), 0: () => this.press("all"),
    };
    if (!actions[event.key] || event.ctrlKey || event.metaKey) return;
    actions[event.key]();
    event.preventDefault();
  }
}

for (const figure of document.querySelectorAll(".timeline")) {
  unpacked(figure.querySelector("script.spans").textContent).then(
    (data) => { figure.timeline = new Timeline(figure, data); },
    () => { figure.querySelector(".tip").textContent = "This browser cannot unpack the schedule."; },
  );
}
