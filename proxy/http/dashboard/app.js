// Puts the page together.

import { swatch } from "./colours.js";
import { byId, say } from "./dom.js";
import { Feed } from "./feed.js";
import { askForKey } from "./key.js";
import { Memory } from "./memory.js";
import { Models } from "./models.js";
import { Past } from "./past.js";
import { Playground } from "./playground.js";
import { Summary } from "./summary.js";
import { Timeline } from "./timeline.js";

const THEMES = ["auto", "light", "dark"];
const SAID = { live: "Live", lost: "Reconnecting", refused: "Refused", hidden: "Paused" };

let parts, past, feed;

/** Everything anew: what was seen of another start of the server says nothing of this one. */
function begin() {
  past = new Past();
  if (!parts) {
    const timeline = new Timeline(past);
    parts = [new Summary(past), timeline, new Models(past, (model) => only(timeline, model)), new Memory(), new Playground()];
  }
  for (const part of parts) if ("past" in part) part.past = past;
}

function hear(live, isOther) {
  if (isOther) begin();
  past.hear(live);
  for (const part of parts) part.hear(live);
  say(byId("about"), `${live.policy} · aegis ${live.version}`);
  document.body.dataset.loaded = "";
}

function only(timeline, model) {
  timeline.only = timeline.only === model ? null : model;
  document.body.dataset.only = timeline.only ?? "";
  const note = byId("only");
  note.hidden = !timeline.only;
  say(note.firstElementChild, timeline.only ? `Only ${timeline.only}` : "");
  parts[2].show();
}

function changed({ state, why, retryAt }) {
  document.body.dataset.state = state;
  say(byId("connection-text"), SAID[state]);
  const banner = byId("banner");
  banner.hidden = state !== "lost" && state !== "refused";
  byId("other-key").hidden = state !== "refused";
  if (banner.hidden) return;
  const tick = () => {
    if (banner.hidden || document.body.dataset.state !== state) return;
    const left = Math.ceil((retryAt - performance.now()) / 1000);
    say(byId("banner-text"), left > 0 ? `${why} Trying again in ${left} s.` : `${why} Trying again…`);
    if (left > 0) setTimeout(tick, 250);
  };
  tick();
}

function theme(next) {
  const now = document.documentElement.dataset.theme ?? "auto";
  const chosen = next ? THEMES[(THEMES.indexOf(now) + 1) % THEMES.length] : now;
  if (chosen === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
  if (next) localStorage.setItem("aegis-theme", chosen);
  const button = byId("theme");
  button.dataset.theme = chosen;
  button.setAttribute("aria-label", `Theme: ${chosen}`);
  button.title = `Theme: ${chosen}`;
  for (const part of parts) part.repaint?.();
}

byId("tip").firstElementChild.prepend(swatch(0));
begin();
theme(false);
byId("theme").addEventListener("click", () => theme(true));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme(false));
byId("only").lastElementChild.addEventListener("click", () => only(parts[1], parts[1].only));
feed = new Feed(hear, changed);
byId("retry").addEventListener("click", () => feed.now());
byId("other-key").addEventListener("click", () => askForKey("Give the server’s admin key.").then(() => feed.now()));
feed.now();
