// What is where: each device's pages as squares, by who holds them and for what; then slabs by shape and the host.

import { fill, swatch, colour } from "./colours.js";
import { byId, h, keyed, say } from "./dom.js";
import { count, plural, share, size } from "./numbers.js";

const SQUARES_MAX = 640, FEW = 96, SIDE = 9, GAP = 2, SHAPES_SHOWN = 12;

export class Memory {
  constructor() {
    this.seats = new Map();
    new ResizeObserver(() => this.repaint()).observe(byId("devices"));
  }

  hear({ memory, models }) {
    this.memory = memory;
    for (const { seat, tally } of models) this.seats.set(tally[0], seat);
    this.show();
  }

  repaint() {
    if (this.memory) this.show();
  }

  show() {
    const { devices, host_kv: host, model_cache: cache } = this.memory;
    keyed(byId("devices"), devices, (it) => it.device, (it) => section(`Device ${it.device}`), (box, it) => this.device(box, it));
    this.cache(cache);
    this.host(host);
    this.shapes([...devices.flatMap((it) => it.slabs.shapes.map((shape) => ({ where: `device ${it.device}`, ...shape }))),
      ...host.slabs.shapes.map((shape) => ({ where: "host", ...shape }))]);
  }

  seat(model) {
    return this.seats.get(model) ?? 0;
  }

  device(box, it) {
    const held = it.capacity_bytes - it.free_bytes, [head, body] = box.children;
    say(head.lastElementChild, `${size(held)} of ${size(it.capacity_bytes)} held`);
    const pages = it.capacity_bytes / it.page_bytes, unit = it.page_bytes * Math.ceil(pages / SQUARES_MAX);
    this.side = pages <= FEW ? 2 * SIDE : SIDE;
    const groups = it.instances.map((each) => ({ name: each.instance, note: limit(each), parts: this.parts(each) }));
    const free = [{ what: "free", bytes: it.free_bytes, look: "free" }, { what: "being wiped", bytes: it.wiping_bytes, look: "wiping" }];
    if (free.some(({ bytes }) => bytes)) groups.push({ name: "nobody", note: "", parts: free });
    keyed(body, groups, ({ name }) => name, () => group(), (row, told) => this.group(row, told, unit));
  }

  parts({ ranges, weights_bytes, kv_bytes, unused_bytes, returning_bytes, held_bytes }) {
    const known = ranges.weights.reduce((sum, each) => sum + each.nbytes, 0) || 1;
    const weights = ranges.weights.map(({ model, state, nbytes }) => ({
      what: `weights of ${model}${state === "loading" ? ", loading" : ""}`, bytes: (weights_bytes * nbytes) / known, seat: this.seat(model),
    }));
    const told = weights_bytes + kv_bytes + unused_bytes + returning_bytes;
    return [...weights, { what: "KV", bytes: kv_bytes, look: "kv" }, { what: "unused", bytes: unused_bytes + Math.max(held_bytes - told, 0), look: "unused" },
      { what: "on their way back", bytes: returning_bytes, look: "wiping" }];
  }

  group(row, { name, note, parts }, unit) {
    const [head, canvas] = row.children, some = parts.filter(({ bytes }) => bytes > 0);
    const all = some.reduce((sum, { bytes }) => sum + bytes, 0);
    const [title, numbers] = head.children;
    say(title, name === "nobody" ? "Nobody’s" : name);
    say(numbers, size(all) + note);
    const told = some.map(({ what, bytes }) => `${what} ${size(bytes)}`).join(", ");
    canvas.setAttribute("aria-label", told || "nothing");
    canvas.title = told;
    this.squares(canvas, some, unit);
  }

  squares(canvas, parts, unit) {
    const { side } = this, wide = canvas.clientWidth || 300, perRow = Math.max(Math.floor((wide + GAP) / (side + GAP)), 1);
    const cells = parts.flatMap((part) => Array(Math.max(Math.round(part.bytes / unit), 1)).fill(part));
    const high = Math.max(Math.ceil(cells.length / perRow), 1) * (side + GAP) - GAP, ratio = devicePixelRatio || 1;
    canvas.width = Math.round(wide * ratio);
    canvas.height = Math.round(high * ratio);
    canvas.style.height = `${high}px`;
    const pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    pen.scale(ratio, ratio);
    cells.forEach((part, at) => square(pen, part, (at % perRow) * (side + GAP), Math.floor(at / perRow) * (side + GAP), side, style));
  }

  cache({ capacity_bytes, used_bytes, images }) {
    const there = images.filter(({ nbytes }) => nbytes);
    say(byId("cache-size"), `${size(used_bytes)} of ${size(capacity_bytes)}, ${plural(there.length, "model")}`);
    keyed(byId("cache"), there, ({ model }) => model, ({ model }) => this.piece(model), (piece, { model, nbytes, state, pinned }) => {
      piece.style.flexGrow = nbytes;
      piece.title = `${model}: ${size(nbytes)}, ${state}${pinned ? ", pinned" : ""}`;
      piece.style.background = colour(this.seat(model));
    });
    byId("cache").setAttribute("aria-label", there.map(({ model, nbytes }) => `${model} ${size(nbytes)}`).join(", ") || "empty");
  }

  piece(model) {
    return h("span", { class: "piece", "data-model": model });
  }

  host({ capacity_bytes, leased_bytes, kept_bytes, orphaned_bytes }) {
    const told = `${size(leased_bytes)} of ${size(capacity_bytes)} leased, ${size(kept_bytes)} kept for later`;
    say(byId("host-size"), told);
    const parts = byId("host").children;
    for (const [at, bytes] of [leased_bytes, kept_bytes, orphaned_bytes].entries()) {
      parts[at].style.width = `${(100 * bytes) / capacity_bytes}%`;
      parts[at].hidden = !bytes;
    }
    byId("host").setAttribute("aria-label", `${told}, ${size(orphaned_bytes)} of lost instances`);
  }

  shapes(all) {
    const held = all.filter(({ slabs }) => slabs).sort((a, b) => b.slabs - a.slabs);
    byId("shapes-empty").hidden = held.length > 0;
    byId("shapes-table").hidden = !held.length;
    keyed(byId("shapes"), held.slice(0, SHAPES_SHOWN), (it) => `${it.where} ${it.block_bytes} ${it.models}`, (it) => this.shapeRow(it), (row, it) => {
      const blocks = it.free_blocks + it.reserved_blocks + it.used_blocks + it.moving_blocks;
      say(row.slabs, count(it.slabs));
      row.used.style.width = `${(100 * (it.used_blocks + it.reserved_blocks)) / blocks}%`;
      row.moving.style.width = `${(100 * it.moving_blocks) / blocks}%`;
      say(row.told, `${count(blocks - it.free_blocks)} of ${count(blocks)}`);
      row.told.title = `${share(it.fragmentation, 1)} of the slabs’ bytes hold no block`;
    });
  }

  shapeRow({ where, models, block_bytes }) {
    const names = h("div", { class: "named" }, ...models.slice(0, 6).map((model) => swatch(this.seat(model))),
      h("span", {}, models.length === 1 ? models[0] : plural(models.length, "model")));
    const used = h("span", { class: "fill" }), moving = h("span", { class: "fill moving" });
    const slabs = h("td", { class: "number" }), told = h("span", { class: "number" });
    const row = h("tr", { title: models.join(", ") }, h("th", { scope: "row" }, names, h("span", { class: "soft" }, `${size(block_bytes)} a block, ${where}`)), slabs,
      h("td", {}, h("div", { class: "met" }, h("span", { class: "bar", "aria-hidden": "true" }, used, moving), told)));
    return Object.assign(row, { slabs, used, moving, told });
  }
}

function limit({ limit_bytes, wish_bytes }) {
  return (limit_bytes ? `, at most ${size(limit_bytes)}` : "") + (wish_bytes ? `, waits for ${size(wish_bytes)}` : "");
}

function square(pen, { seat, look }, x, y, side, style) {
  const value = (name) => style.getPropertyValue(`--${name}`).trim();
  const inset = look === "free" ? 0.5 : 0; // an edge is drawn on both sides of its line
  pen.beginPath();
  pen.roundRect(x + inset, y + inset, side - 2 * inset, side - 2 * inset, side / 5);
  if (look === "free") {
    pen.strokeStyle = value("line");
    pen.stroke();
    return;
  }
  pen.fillStyle = look === undefined ? fill(pen, seat) : value({ kv: "kv", unused: "unused", wiping: "warn" }[look]);
  pen.fill();
}

function section(title) {
  return h("section", { class: "device" }, h("h3", {}, h("span", {}, title), h("span", { class: "soft" })), h("div", { class: "groups" }));
}

function group() {
  return h("div", { class: "group" }, h("div", { class: "group-head" }, h("span", {}), h("span", { class: "soft" })), h("canvas", { role: "img" }));
}
