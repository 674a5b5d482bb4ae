// What the server did, as far as this page has seen it. Times are milliseconds since the server's clock began.

const KEPT_MS = 660_000, JOINED_MS = 3;
const TRACK = { prefill: 0, decode: 0, switch: 0, load: 1, prefetch: 1, swap_in: 2, swap_out: 2 };
const LED_TO = new Set(["prefill", "decode", "switch"]);
const SECOND = 3; // what runs beside, on a part of the device
const TRACKS = 4;

const ms = (ns) => ns / 1e6;

/** One instance: its stretches on four tracks (runs, weights, KV, runs on the second lane of its device), its marks, and
 * what was decided there. */
class InstancePast {
  constructor() {
    this.tracks = Array.from({ length: TRACKS }, () => []);
    this.marks = [];
    this.decisions = [];
  }

  /** A run that goes on where the last one of the same model ended is part of the same turn. */
  add([, kind, model, startNs, stopNs, requests, steps, tokens, bytes, , , lane = 0, share = 1000]) {
    const track = this.tracks[lane ? SECOND : TRACK[kind]], start = ms(startNs), stop = ms(stopNs), last = track.at(-1);
    const same = last && last.kind === kind && last.model === model && last.share === share;
    if (same && kind === "decode" && start - last.stop < JOINED_MS) {
      last.stop = Math.max(last.stop, stop);
      last.requests = Math.max(last.requests, requests);
      last.made += requests * steps;
      last.steps += steps;
      return;
    }
    const made = kind === "decode" ? requests * steps : 0;
    insert(track, { kind, model, start, stop, requests, steps, made, tokens, bytes, share });
  }

  decided({ at_ns, kind, model, what, why }) {
    const told = { at: ms(at_ns), kind, model, line: `${what}: ${why.because}` };
    if (kind === "turn" || kind === "prefill") insert(this.decisions, told, "at");
    else if (kind === "evict" || kind === "refuse") insert(this.marks, told, "at");
  }

  /** Why a stretch is there: the last decision before it, if that was for its model. A switch begins with its turn. */
  why(stretch) {
    if (!LED_TO.has(stretch.kind)) return "";
    const at = stretch.kind === "switch" ? stretch.stop : stretch.start;
    const found = this.decisions[after(this.decisions, at, "at") - 1];
    return found?.model === stretch.model ? found.line : "";
  }

  forget(before) {
    for (const list of this.tracks) list.splice(0, after(list, before, "stop"));
    for (const list of [this.marks, this.decisions]) list.splice(0, Math.max(after(list, before, "at") - 1, 0));
  }
}

/** The place of the first entry whose `field` is beyond `value`; entries are in its order. */
export function after(sorted, value, field) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle][field] > value) high = middle; else low = middle + 1;
  }
  return low;
}

function insert(sorted, entry, field = "start") {
  let at = sorted.length;
  while (at > 0 && sorted[at - 1][field] > entry[field]) at--;
  if (at === sorted.length) sorted.push(entry); else sorted.splice(at, 0, entry);
}

export class Past {
  constructor() {
    this.instances = new Map();
    this.samples = [];
    this.firsts = [];
    this.switches = [];
    this.from = null;
  }

  hear(live) {
    const now = ms(live.now_ns);
    this.from ??= now;
    this.learn(live.news);
    this.sample(live, now);
    const before = now - KEPT_MS;
    for (const past of this.instances.values()) past.forget(before);
    for (const list of [this.firsts, this.switches]) list.splice(0, after(list, before, "at"));
    this.samples.splice(0, after(this.samples, before, "at"));
  }

  learn({ spans, decisions, records }) {
    for (const span of spans) {
      this.of(span[0]).add(span);
      if (span[1] === "switch") insert(this.switches, { at: ms(span[4]), took: ms(span[4] - span[3]) }, "at");
    }
    for (const decision of decisions) this.of(decision.instance).decided(decision);
    for (const { model, arrival_ns, first_ns } of records) {
      if (first_ns) insert(this.firsts, { at: ms(first_ns), model, took: ms(first_ns - arrival_ns) }, "at");
    }
  }

  sample(live, at) {
    const of = new Map(), before = this.samples.at(-1)?.of, all = { met: 0, due: 0, tokens: 0, waiting: 0, running: 0, finished: 0 };
    for (const { tally } of live.models) {
      const [model, waiting, running, , finished, , , , tokens, met, due] = tally;
      const was = before?.get(model), same = was && was.tokens === tokens && was.due === due && was.met === met;
      of.set(model, same ? was : { tokens, met, due });
      all.met += met; all.due += due; all.tokens += tokens; all.finished += finished;
      all.waiting += waiting; all.running += running;
    }
    this.samples.push({ at, of, all });
  }

  of(instance) {
    let past = this.instances.get(instance);
    if (!past) this.instances.set(instance, (past = new InstancePast()));
    return past;
  }

  /** The sample of so long ago, or the first there is. */
  ago(duration) {
    const last = this.samples.at(-1);
    return this.samples[Math.max(after(this.samples, last.at - duration - 1, "at") - 1, 0)];
  }

  /** How long first tokens took of late, in order of size; of one model or of all. */
  firstTokens(duration, model) {
    const since = after(this.firsts, this.samples.at(-1).at - duration, "at");
    const found = this.firsts.slice(since).filter((each) => model === undefined || each.model === model);
    return found.map((each) => each.took).sort((a, b) => a - b);
  }
}
