// Builds the page: elements from text (never from HTML), icons, short notices.
import { t } from "./text.js";

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
  page: "M6 3h8l4 4v14H6zM14 3v4h4M12 11v6M9.5 14.5L12 17l2.5-2.5",
  theme: "M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16",
};

/** An element; attributes that begin with "on" are listeners. Strings among the children become text. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** An icon; it is decoration, the label stands on its button. */
export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const path = document.createElementNS(svg.namespaceURI, "path");
  svg.classList.add("icon");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** A button that shows an icon only. */
export function iconButton(name, label, onclick) {
  return h("button", { type: "button", class: "icon-button", "aria-label": label, title: label, onclick }, icon(name));
}

export const button = (text, kind, onclick, more = {}) => h("button", { type: "button", class: kind, onclick, ...more }, text);
export const line = (text, kind = "") => h("p", { class: kind }, text);

export const byId = (id) => document.getElementById(id);

let noticeTimer = 0;

/** A short notice at the bottom, with a button if the action can be undone. It disappears by itself. */
export function notice(text, undo = null) {
  const hide = () => byId("notice").replaceChildren();
  const button = undo && h("button", { type: "button", class: "primary", onclick: () => (hide(), undo()) }, t("undo"));
  byId("notice").replaceChildren(h("div", { class: "notice" }, h("span", {}, text), button));
  clearTimeout(noticeTimer);
  noticeTimer = setTimeout(hide, undo ? 10000 : 5000);
}

/** Have a screen reader read a text out, when it has time. */
export function announce(text) {
  byId("announcer").textContent = "";
  setTimeout(() => (byId("announcer").textContent = text), 50); // so that the same text is read out again
}

/** Copy a text to the clipboard. Pages that are neither https nor from this machine must use the old API. */
async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = h("textarea", { class: "visually-hidden" });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  return area.remove();
}

/** A button that copies a text, and shows for a moment that it has done so. */
export function copyButton(label, text) {
  const button = iconButton("copy", label, async () => {
    await copyText(text());
    button.replaceChildren(icon("check"));
    setTimeout(() => button.replaceChildren(icon("copy")), 1200);
  });
  return button;
}

/** Let the user save a text or a Blob as a file. */
export function download(name, content) {
  const link = h("a", { download: name, href: URL.createObjectURL(new Blob([content], { type: "application/octet-stream" })) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
