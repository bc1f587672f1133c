// The start of the page: tabs, language, theme, the side bar on narrow screens; then chat and curves.
import { startChat } from "./chat.js";
import { startCurves } from "./curves.js";
import { byId, icon } from "./dom.js";
import { startSettings } from "./settings.js";
import { read, write, writeTheme } from "./store.js";
import { currentLanguage, firstLanguage, setLanguage } from "./text.js";

const LANGUAGE = "minimind.language";
const TABS = { chat: "chat-side", training: "curves-side" }; // tab -> what the side bar shows with it

function openTab(name) {
  for (const [tab, side] of Object.entries(TABS)) {
    const here = tab === name;
    byId(`tab-${tab}`).setAttribute("aria-selected", String(here));
    byId(`tab-${tab}`).tabIndex = here ? 0 : -1;
    byId(tab).hidden = byId(side).hidden = !here;
  }
  byId("export-one").hidden = name !== "chat";
  history.replaceState(null, "", `#${name}`);
  document.dispatchEvent(new CustomEvent("tab", { detail: name }));
}

function startTabs() {
  const names = Object.keys(TABS);
  for (const name of names) {
    byId(`tab-${name}`).addEventListener("click", () => openTab(name));
    byId(`tab-${name}`).addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      const other = names[1 - names.indexOf(name)];
      openTab(other);
      byId(`tab-${other}`).focus();
    });
  }
  openTab(location.hash === "#training" ? "training" : "chat");
}

function startMenu() {
  const set = (open) => {
    byId("sidebar").classList.toggle("open", open);
    byId("veil").hidden = !open;
    byId("open-menu").setAttribute("aria-expanded", String(open));
    (open ? byId("close-menu") : byId("open-menu")).focus();
  };
  const close = () => byId("sidebar").classList.contains("open") && set(false);
  byId("open-menu").addEventListener("click", () => set(true));
  byId("close-menu").addEventListener("click", close);
  byId("veil").addEventListener("click", close);
  document.addEventListener("opened", close);
  byId("sidebar").addEventListener("keydown", (event) => event.key === "Escape" && close());
}

function startTheme() {
  byId("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    root.dataset.theme = (root.dataset.theme ?? system) === "dark" ? "light" : "dark";
    writeTheme(root.dataset.theme);
  });
}

function startLanguage() {
  setLanguage(firstLanguage(read(LANGUAGE, "")));
  byId("language").addEventListener("click", () => {
    setLanguage(currentLanguage() === "en" ? "zh" : "en");
    write(LANGUAGE, currentLanguage());
  });
}

for (const element of document.querySelectorAll("[data-icon]")) element.prepend(icon(element.dataset.icon));
startLanguage();
startTheme();
startMenu();
startSettings();
startChat();
startCurves();
startTabs();
document.documentElement.dataset.ready = "true";
