// "It should have said ...": the answers that the user corrected, in a list, and as files to train on.
import { byId, download, h, iconButton } from "./dom.js";
import * as store from "./store.js";
import { t } from "./text.js";

/** The field below an answer, with the answer to be corrected. `save` gets the corrected text. */
export function correctionField(message, save, close) {
  const area = h("textarea", { rows: "4", "aria-label": t("shouldHave") });
  area.value = message.correction || message.content;
  const keep = () => (save(area.value.trim()), close());
  const onkeydown = (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    close();
  };
  const cancel = h("button", { type: "button", class: "quiet", onclick: close }, t("cancel"));
  const submit = h("button", { type: "button", class: "primary", onclick: keep }, t("save"));
  const field = h("div", { class: "edit correcting", onkeydown }, h("strong", {}, t("shouldHave")), area, h("div", { class: "buttons" }, cancel, submit));
  setTimeout(() => area.focus());
  return field;
}

/** A correction below its answer. */
export const correctionView = (text) => h("p", { class: "correction" }, h("strong", {}, `${t("shouldHave")} `), text);

/** Make the list work. `chat` has takeBack(entry). Returns a function that redraws it. */
export function startCorrections(chat) {
  const dialog = byId("corrections");
  const draw = () => {
    const found = store.corrections();
    byId("open-corrections").hidden = !found.length;
    byId("open-corrections").textContent = t("corrections", { n: found.length });
    byId("correction-list").replaceChildren(...found.map(row));
    if (!found.length) dialog.close();
  };
  const row = (entry) => {
    const remove = () => (chat.takeBack(entry), draw());
    const texts = [h("strong", {}, entry.question), h("s", { class: "muted" }, entry.message.content), h("span", {}, entry.message.correction)];
    return h("li", {}, h("div", {}, ...texts), iconButton("remove", `${t("remove")}: ${entry.question}`, remove));
  };
  byId("open-corrections").addEventListener("click", () => (draw(), dialog.showModal()));
  byId("close-corrections").addEventListener("click", () => dialog.close());
  byId("save-corrections").addEventListener("click", () => download("corrections.jsonl", store.correctionRecords()));
  byId("save-preferences").addEventListener("click", () => download("preferences.jsonl", store.preferenceRecords()));
  return draw;
}
