// How the page asks this server: with a key where the server wants one. Kept until the tab is closed.

import { byId, say } from "./dom.js";

const SLOT = "aegis-key";
let asking = null;

/** As `fetch`, with the key; given up after `lateMs`. Where the server wants another key, the user is asked for it. */
export async function ask(path, options = {}, lateMs = 0) {
  for (;;) {
    const key = sessionStorage.getItem(SLOT);
    const headers = key ? { ...options.headers, Authorization: `Bearer ${key}` } : options.headers;
    const signal = lateMs ? AbortSignal.timeout(lateMs) : options.signal;
    const reply = await fetch(path, { ...options, headers, signal });
    if (reply.status !== 401) return reply;
    await askForKey(await reason(reply));
  }
}

/** The server's own words for what is wrong. */
export async function reason(reply) {
  const told = await reply.json().catch(() => null);
  return told?.error?.message ?? `The server answered ${reply.status}.`;
}

/** Returns when the user has given a key; who asks meanwhile waits for the same. */
export function askForKey(why) {
  return (asking ??= asked(why).finally(() => (asking = null)));
}

function asked(why) {
  const dialog = byId("key-dialog"), field = byId("key-field");
  say(byId("key-why"), sessionStorage.getItem(SLOT) ? `That was not the key. ${why}` : why);
  field.value = "";
  dialog.showModal();
  return new Promise((given) => {
    dialog.addEventListener("close", () => {
      sessionStorage.setItem(SLOT, field.value.trim());
      field.value = "";
      given();
    }, { once: true });
  });
}
