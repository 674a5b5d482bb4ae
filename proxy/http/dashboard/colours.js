// Which colour a model has: by its seat, a number that is its own for the life of the server.
//
// Eight colours that stay apart for people with protanopia, deuteranopia and tritanopia (a test simulates them), each in
// six textures, so that 48 models look different; and wherever there is room the name stands beside the colour.

import { svg } from "./dom.js";

export const LIGHT = ["#2450c8", "#b9540f", "#3db18c", "#8a4a68", "#2d88b0", "#b8960a", "#8c1a14", "#9f77fd"];
export const DARK = ["#4aa3dc", "#dd5216", "#7bf0c8", "#b8608a", "#74cde6", "#f3d53f", "#f8877a", "#7268ee"];

// Lines of each texture on a tile of 8 by 8.
const TEXTURES = ["", "M-2 2 2-2M0 8 8 0M6 10 10 6", "M0 4H8", "M4 0V8", "M-2 6 2 10M0 0 8 8M6-2 10 2", "M0 4H8M4 0V8"];
export const TILE = 8;

export const texture = (seat) => TEXTURES[Math.floor(seat / LIGHT.length) % TEXTURES.length];
export const colour = (seat) => (isDark() ? DARK : LIGHT)[seat % LIGHT.length];

/** Black or white: what is read best on the colour. */
export function ink(seat) {
  const channels = [1, 3, 5].map((at) => parseInt(colour(seat).slice(at, at + 2), 16) / 255);
  const [r, g, b] = channels.map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#ffffff";
}

export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

/** A small square in the model's colour and texture. */
export function swatch(seat) {
  const drawn = svg("svg", { class: "swatch", viewBox: "0 0 12 12", "aria-hidden": "true" });
  repaint(drawn, seat);
  return drawn;
}

export function repaint(drawn, seat) {
  drawn.dataset.seat = seat;
  const lines = texture(seat);
  drawn.replaceChildren(
    svg("rect", { width: 12, height: 12, rx: 3, fill: colour(seat) }),
    ...(lines ? [svg("path", { d: lines, transform: "translate(2 2)", stroke: ink(seat), "stroke-width": 1.6 })] : []),
  );
}

const tiles = new Map();

/** What the model's blocks are filled with on a canvas; made once for each model and theme. */
export function fill(pen, seat) {
  const lines = texture(seat);
  if (!lines) return colour(seat);
  const name = `${colour(seat)} ${lines}`;
  if (!tiles.has(name)) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = TILE;
    const on = tile.getContext("2d");
    on.fillStyle = colour(seat);
    on.fillRect(0, 0, TILE, TILE);
    on.strokeStyle = ink(seat);
    on.globalAlpha = 0.75;
    on.lineWidth = 1.3;
    on.stroke(new Path2D(lines));
    tiles.set(name, pen.createPattern(tile, "repeat"));
  }
  return tiles.get(name);
}
