// The list of conversations in the side bar: open, rename, delete, export.
import { byId, download, h, iconButton, notice } from "./dom.js";
import * as store from "./store.js";
import { t } from "./text.js";

/** Make the list work. `chat` has open(conversation), current() and stop(id); returns a function that redraws it. */
export function startHistory(chat) {
  const draw = () => byId("conversations").replaceChildren(...store.conversations().map((one) => entry(one, chat, draw)));
  byId("export-one").addEventListener("click", () => download("minimind-chat.jsonl", store.exported([chat.current()])));
  byId("export-all").addEventListener("click", () => download("minimind-chats.jsonl", store.exported(store.conversations())));
  return draw;
}

function entry(one, chat, draw) {
  const title = one.title || t("newChat");
  const isOpen = one.id === chat.current().id;
  const open = () => chat.open(one);
  const name = h("button", { type: "button", class: "name", "aria-current": isOpen && "true", onclick: open }, title);
  const row = h("li", { class: isOpen ? "entry current" : "entry" }, name);
  row.append(iconButton("edit", `${t("rename")}: ${title}`, () => rename(row, one, chat, draw)));
  row.append(iconButton("remove", `${t("remove")}: ${title}`, () => remove(one, title, chat, draw)));
  return row;
}

/** The title as an input field. Enter, or leaving the field, keeps the new title; Escape keeps the old one. */
function rename(row, one, chat, draw) {
  const input = h("input", { type: "text", maxlength: "200", "aria-label": t("rename"), value: one.title });
  input.addEventListener("blur", () => {
    const isOpen = one.id === chat.current().id;
    const kept = isOpen ? chat.current() : one;
    kept.title = input.value.trim() || kept.title;
    store.write(store.CHAT + kept.id, kept); // not `keep`, so that it stays at its place in the list
    draw();
  });
  input.addEventListener("keydown", (event) => {
    event.stopPropagation();
    if (event.key === "Escape") input.value = one.title;
    if (event.key === "Escape" || (event.key === "Enter" && !event.isComposing)) input.blur();
  });
  row.replaceChildren(input);
  input.focus();
  input.select();
}

/** Delete a conversation. A button in the notice restores it. */
function remove(one, title, chat, draw) {
  chat.stop(one.id);
  const last = store.conversation(one.id) ?? one;
  store.drop(one.id);
  if (one.id === chat.current().id) chat.open(store.newConversation());
  draw();
  notice(t("deleted", { title }), () => {
    store.write(store.CHAT + last.id, last);
    chat.open(last);
  });
}
