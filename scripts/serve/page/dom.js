// Building the page: elements from text (never from HTML), icons, a dialog of one line, short notices.

const SVG = "http://www.w3.org/2000/svg";
const CHOSEN_COLORS = 8; // classes c0 to c7

const ICONS = {
  // paths of 24 x 24 outlines
  plus: "M12 5v14M5 12h14",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  check: "M5 13l4 4L19 7",
  again: "M20 11a8 8 0 1 0-2.3 6.3M20 4v7h-7",
  remove: "M4 7h16M10 7V4h4v3M6 7l1 13h10l1-13M10 11v6M14 11v6",
  menu: "M4 7h16M4 12h16M4 17h16",
  close: "M6 6l12 12M18 6L6 18",
  sliders: "M4 7h9M17 7h3M4 17h3M11 17h9M13 5v4M7 15v4",
  down: "M12 4v11M7 11l5 5 5-5M5 20h14",
  up: "M12 16V5M7 9l5-5 5 5M5 20h14",
  theme: "M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16",
  arrow: "M12 5v14M6 13l6 6 6-6",
  fold: "M9 6l6 6-6 6",
  tool: "M14.5 6.5a4 4 0 0 1 5-1l-3 3 1 1 3-3a4 4 0 0 1-5.4 5L8 18.6a1.8 1.8 0 0 1-2.6-2.6l7.1-7.1a4 4 0 0 1 2-2.4z",
  chat: "M4 5h16v11H11l-5 4v-4H4z",
  curve: "M4 4v16h16M7 8c2 8 6 8 12 9",
};

const DIRECTIONS = /[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g; // characters that reorder the text behind them
const READ = ["title", "aria-label"]; // attributes that a person reads

/** A text with escapes for characters that reorder it: with them one name could pass for another. */
export const visible = (text) => text.replace(DIRECTIONS, (char) => `\\u${char.charCodeAt(0).toString(16).padStart(4, "0")}`);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (READ.includes(name)) element.setAttribute(name, visible(value));
    else element.setAttribute(name, value === true ? "" : value);
  }
  const there = children.filter((child) => child !== null && child !== undefined && child !== false);
  element.append(...there.map((child) => (typeof child === "string" ? visible(child) : child)));
  return element;
}

/** An element; attributes that begin with "on" are listeners. Strings among the children become text. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Give an element the colour of a run: the first ones are chosen (curves.css), those behind them are hues apart. */
export function paint(element, number) {
  element.classList.add(`c${Math.min(number, CHOSEN_COLORS)}`);
  element.style.setProperty("--hue", 137.5 * number);
  element.style.setProperty("--lightness", `${number % 2 ? 44 : 62}%`);
  return element;
}

/** An icon; it is decoration, the label stands on its button. */
export function icon(name) {
  return s("svg", { class: "icon", viewBox: "0 0 24 24", "aria-hidden": "true" }, s("path", { d: ICONS[name] }));
}

/** A button that shows an icon only. */
export function iconButton(name, label, onclick, extra = {}) {
  const named = { type: "button", class: "icon-button", "aria-label": label, title: label, onclick, ...extra };
  return h("button", named, icon(name));
}

/** A table that scrolls by itself where it is too wide. */
export function table(head, rows) {
  return h("div", { class: "table", tabindex: "0" }, h("table", {}, h("thead", {}, head), h("tbody", {}, ...rows)));
}

export const byId = (id) => document.getElementById(id);

/** Tell a screen reader, politely. */
export function announce(text) {
  const region = byId("announcer");
  region.textContent = "";
  setTimeout(() => (region.textContent = visible(text)), 50); // a change is read out, the same text again too
}

let noticeTimer = 0;

/** A short notice at the bottom, with one button if there is something to do; it goes by itself. */
export function notice(text, action = "", onclick = null) {
  const place = byId("notice");
  const hide = () => place.replaceChildren();
  const button = onclick && h("button", { type: "button", class: "link", onclick: () => (hide(), onclick()) }, action);
  place.replaceChildren(h("div", { class: "notice" }, h("span", {}, text), button));
  clearTimeout(noticeTimer);
  noticeTimer = setTimeout(hide, onclick ? 10000 : 5000);
}

/** Put a text on the clipboard. Pages that are neither https nor local may not; then the old way. */
export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = h("textarea", { class: "hidden-copy" });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** A button that copies and shows for a moment that it did. */
export function copyButton(label, text) {
  const button = iconButton("copy", label, async () => {
    await copyText(text());
    button.replaceChildren(icon("check"));
    setTimeout(() => button.replaceChildren(icon("copy")), 1200);
  });
  return button;
}

/** Save a text as a file of the user. */
export function download(name, text) {
  const link = h("a", { download: name, href: URL.createObjectURL(new Blob([text], { type: "application/jsonl" })) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
