// Asks the server for what is new, once a second while the page is seen; tries again by itself when the server is gone.

import { ask, reason } from "./key.js";

const EVERY_MS = 1000, LATE_MS = 8000, PAUSES_MS = [1000, 2000, 4000, 8000, 15000];

export class Feed {
  /** `heard` is called with each `Live`, `changed` with `{ state, why, retryAt }`: "live", "lost", "refused", "hidden". */
  constructor(heard, changed) {
    this.heard = heard;
    this.changed = changed;
    this.seen = { spans: 0, decisions: 0, records: 0 };
    this.start = null;
    this.failures = 0;
    this.timer = null;
    this.busy = false;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.hide() : this.now()));
    addEventListener("online", () => this.now());
  }

  /** Asks at once. */
  now() {
    clearTimeout(this.timer);
    if (!this.busy && !document.hidden) this.turn();
  }

  hide() {
    clearTimeout(this.timer);
    this.changed({ state: "hidden" });
  }

  async turn() {
    this.busy = true;
    let pause = EVERY_MS;
    try {
      const began = performance.now();
      const live = await this.fetched();
      this.failures = 0;
      this.changed({ state: "live" });
      this.heard(live, this.follow(live));
      pause = Math.max(EVERY_MS - (performance.now() - began), 100);
    } catch (error) {
      if (!(error instanceof Unanswered)) throw error; // a bug of the page's
      pause = PAUSES_MS[Math.min(this.failures++, PAUSES_MS.length - 1)];
      this.changed({ state: error.refused ? "refused" : "lost", why: error.message, retryAt: performance.now() + pause });
    } finally {
      this.busy = false;
      if (!document.hidden) this.timer = setTimeout(() => this.now(), pause);
    }
  }

  /** What the server is like now. Throws Unanswered where it does not say. */
  async fetched() {
    const query = new URLSearchParams(this.seen);
    let reply;
    try {
      reply = await ask(`debug/live?${query}`, {}, LATE_MS);
      if (reply.ok) return await reply.json();
    } catch {
      throw new Unanswered("The server does not answer.");
    }
    throw new Unanswered(await reason(reply), reply.status === 403);
  }

  /** Whether it is another start of the server than before; all of its news are asked for then. */
  follow(live) {
    const isOther = this.start !== null && live.start !== this.start;
    if (isOther) live.news = { seen: { spans: 0, decisions: 0, records: 0 }, spans: [], decisions: [], records: [] };
    this.start = live.start;
    this.seen = live.news.seen;
    return isOther;
  }
}

class Unanswered extends Error {
  constructor(why, refused = false) {
    super(why);
    this.refused = refused;
  }
}
