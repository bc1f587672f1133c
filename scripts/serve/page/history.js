// The list of conversations in the side bar: open, rename, delete, export, import.
import { byId, download, h, iconButton, notice } from "./dom.js";
import * as store from "./store.js";
import { t } from "./text.js";

/** Make the list work. `chat` has open(conversation), current() and stop(id); returns a function that draws it anew. */
export function startHistory(chat) {
  const list = byId("conversations");
  const draw = () => list.replaceChildren(...store.conversations().map((one) => entry(one, chat, draw)));
  const save = (name, list) => download(name, store.exported(list));
  byId("export-all").addEventListener("click", () => save("minimind-chats.jsonl", store.conversations()));
  byId("export-one").addEventListener("click", () => save("minimind-chat.jsonl", [chat.current()]));
  byId("import").addEventListener("click", () => byId("import-file").click());
  byId("import-file").addEventListener("change", async (event) => {
    const [file] = event.target.files;
    event.target.value = ""; // the same file again is a change too
    if (!file) return;
    const { ids, records, messages } = store.imported(await file.text());
    if (ids.length) chat.open(ids[0]);
    const dropped = [records && t("droppedRecords", { n: records }), messages && t("droppedMessages", { n: messages })];
    const message = [t("imported", { n: ids.length }), ...dropped].filter(Boolean).join(" ");
    notice(ids.length ? message : t("importBad"));
    draw();
  });
  window.addEventListener("storage", draw); // another tab
  document.addEventListener("language", draw);
  draw();
  return draw;
}

function entry(one, chat, draw) {
  const title = one.title || t("untitled");
  const here = one.id === chat.current().id;
  const onclick = () => chat.open(one);
  const name = h("button", { type: "button", class: "name", "aria-current": here ? "true" : null, onclick }, title);
  const node = h("li", { class: here ? "entry current" : "entry" }, name);
  node.append(iconButton("edit", `${t("rename")}: ${title}`, () => rename(node, one, chat, draw)));
  node.append(iconButton("remove", `${t("remove")}: ${title}`, () => remove(one, title, chat, draw)));
  return node;
}

function rename(node, one, chat, draw) {
  const input = h("input", { type: "text", maxlength: "200", "aria-label": t("rename") });
  input.value = one.title;
  let done = false;
  const finish = (keep) => {
    if (done) return;
    done = true;
    const title = input.value.trim();
    if (keep && title) chat.rename(one.id, title);
    draw();
    byId("conversations").querySelector(".current .name")?.focus();
  };
  input.addEventListener("blur", () => finish(true));
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.isComposing) finish(true);
    if (event.key === "Escape") finish(false);
    event.stopPropagation();
  });
  node.replaceChildren(input);
  input.focus();
  input.select();
}

function remove(one, title, chat, draw) {
  chat.stop(one.id);
  const last = store.conversation(one.id) ?? one;
  store.drop(one.id);
  if (chat.current().id === one.id) chat.open(store.newConversation());
  draw();
  notice(t("deleted", { title }), t("undo"), () => {
    store.keep(last);
    chat.open(last);
    draw();
  });
}
