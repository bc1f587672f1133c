// Saves a model as a page to send, which the server makes.
import * as api from "./api.js";
import { announce, download, notice } from "./dom.js";
import { size, t } from "./text.js";

/** Have the page of a model made, and save it. The button is disabled meanwhile. */
export async function savePage(button, model) {
  const say = (key, values) => (notice(t(key, values)), announce(t(key, values)));
  const name = model.replaceAll("/", " ");
  button.disabled = true;
  say("makingPage", { name });
  try {
    const page = await api.pageToSend(model);
    download(`${name}.html`, page);
    say("pageMade", { name, size: size(page.size) });
  } catch (error) {
    say("pageFailed", { text: error.detail || error.message });
  }
  button.disabled = false;
}
