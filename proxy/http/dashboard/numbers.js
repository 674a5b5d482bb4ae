// Numbers as people read them.

export function duration(ms) {
  if (ms === null || !Number.isFinite(ms)) return "–";
  if (ms >= 60_000) return `${Math.floor(ms / 60_000)} min ${Math.round((ms % 60_000) / 1000)} s`;
  if (ms >= 1000) return `${(ms / 1000).toFixed(ms >= 10_000 ? 1 : 2)} s`;
  if (ms >= 1) return `${ms >= 100 ? Math.round(ms) : ms.toPrecision(2)} ms`;
  return `${Math.round(ms * 1000)} µs`;
}

export function size(bytes) {
  for (const [unit, scale] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (bytes >= scale) return `${short(bytes / scale)} ${unit}`;
  }
  return `${bytes} B`;
}

export function count(value) {
  for (const [unit, scale] of [["G", 1e9], ["M", 1e6], ["k", 1e4]]) {
    if (value >= scale) return short(value / (unit === "k" ? 1e3 : scale)) + unit;
  }
  return Math.round(value).toLocaleString("en");
}

export function rate(perSecond) {
  return perSecond > 0 && perSecond < 10 ? perSecond.toFixed(1) : count(perSecond);
}

/** 100 % only where nothing at all is missing. */
export function share(part, whole) {
  if (!whole) return "–";
  const percent = (100 * part) / whole;
  if (part < whole && percent > 99.9) return "99.9 %";
  return `${percent >= 99.95 || percent === 0 ? Math.round(percent) : percent.toFixed(1)} %`;
}

export function plural(value, one, many = one + "s") {
  return `${count(value)} ${value === 1 ? one : many}`;
}

/** The value below which a share `at` of the sorted `values` lies; null where there is none. */
export function quantile(values, at) {
  return values.length ? values[Math.min(values.length - 1, Math.floor(at * values.length))] : null;
}

function short(value) {
  return value >= 100 ? String(Math.round(value)) : String(Number(value.toPrecision(3)));
}
