// Elements without a framework. No HTML is ever parsed: what a server or a model says can only be text.

const SVG = "http://www.w3.org/2000/svg";

/** An element; `attributes` that are functions listen, those that are null or false are left out. */
export function h(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Sets a text only where it is another one: what is not changed is not laid out again, nor read out. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Makes `parent` hold a child for each of `items`, in their order, keeping those that it has. */
export function keyed(parent, items, key, make, update) {
  const kept = (parent.kept ??= new Map()), wanted = new Set();
  let before = parent.firstElementChild;
  for (const item of items) {
    const name = key(item);
    wanted.add(name);
    let child = kept.get(name);
    if (!child) kept.set(name, (child = make(item)));
    if (child === before) before = before.nextElementSibling;
    else parent.insertBefore(child, before);
    update(child, item);
  }
  for (const [name, child] of kept) {
    if (!wanted.has(name)) {
      child.remove();
      kept.delete(name);
    }
  }
}
