// "It should have said ...": the answers that the user corrected, in a list, as files to train on, and to teach a model.
import * as api from "./api.js";
import { byId, download, h, iconButton } from "./dom.js";
import * as store from "./store.js";
import { t } from "./text.js";
import { sentence } from "./train.js";

const FEWEST = 3; // corrections that a model is taught from, as in scripts/serve/teaching.py

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

/** The names of a model, of the model whose corrected version it is, and of the version that was kept of that. */
function relatives(models, chosen) {
  const original = (name) => models.find(({ id }) => id === name)?.taught_from ?? name;
  return models.map(({ id }) => id).filter((id) => original(id) === original(chosen));
}

/** The button that teaches the model of the chat, and what is said about it. Returns a function that redraws them. */
function startTeaching(chat, dialog) {
  let trains = false; // whether the server does
  const draw = () => {
    const { models, chosen } = chat.models();
    const own = relatives(models, chosen);
    const [n, all] = [store.toTeach(own).corrections.length, store.corrections().length];
    byId("teach").hidden = !trains || !chosen;
    byId("save-corrections").className = byId("teach").hidden ? "primary" : "quiet";
    byId("teach-hint").textContent = n < FEWEST ? t("teachFew", { model: chosen, n, fewest: FEWEST }) : t("teachHint", { model: chosen, n });
    byId("teach-others").textContent = n < all ? t("teachOthers", { n: all - n }) : "";
    byId("teach-it").disabled = n < FEWEST;
    byId("teach-error").hidden = true;
  };
  byId("teach-it").addEventListener("click", async () => {
    const { models, chosen } = chat.models();
    byId("teach-it").disabled = byId("teach-error").hidden = true;
    try {
      const { name } = await api.teach({ model: chosen, ...store.toTeach(relatives(models, chosen)) });
      dialog.close();
      document.dispatchEvent(new CustomEvent("show-job", { detail: name }));
    } catch (error) {
      byId("teach-error").textContent = error.status === 413 ? t("error_field_corrections") : sentence(error);
      byId("teach-error").hidden = false;
    }
    byId("teach-it").disabled = false;
  });
  document.addEventListener("trains", ({ detail }) => (trains = detail));
  return draw;
}

/**
 * Make the list work. `chat` has takeBack(entry) and models(): {models, chosen: the name of the one that answers}. Returns a
 * function that redraws it.
 */
export function startCorrections(chat) {
  const dialog = byId("corrections");
  const drawTeaching = startTeaching(chat, dialog);
  const draw = () => {
    const found = store.corrections();
    if (dialog.open) drawTeaching();
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
  byId("open-corrections").addEventListener("click", () => {
    dialog.showModal();
    draw();
  });
  byId("close-corrections").addEventListener("click", () => dialog.close());
  byId("save-corrections").addEventListener("click", () => download("corrections.jsonl", store.correctionRecords()));
  byId("save-preferences").addEventListener("click", () => download("preferences.jsonl", store.preferenceRecords()));
  return draw;
}
