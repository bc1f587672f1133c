// A conversation in the form that the model reads, by the rules of scripts/conversation.py and model/answers.py.

// the model may write these even if it is not asked to
const [THINK, END_THINK] = ["<think>", "</think>"];
const SPACES = "[\\t-\\r\\x1c- \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000]*"; // Python's str.lstrip
const BEGINNING = new RegExp(`^${SPACES}`, "u");

/** An answer's text as {thoughts, content}. isWhole: the answer is complete. */
function parseAnswer(text, isWhole) {
  const begun = text.replace(BEGINNING, "");
  if (!begun.startsWith(THINK)) return { thoughts: "", content: isWhole || !THINK.startsWith(begun) ? text : "" };
  const rest = begun.slice(THINK.length);
  const end = rest.indexOf(END_THINK);
  const thoughts = (end < 0 ? rest : rest.slice(0, end)).replace(/^\n+|\n+$/g, "");
  return { thoughts, content: end < 0 ? "" : rest.slice(end + END_THINK.length).replace(/^\n+/, "") };
}

/** The text of an answer in a prompt. Some templates leave out line breaks at its beginning. */
function answerText(content, form) {
  if (form !== "last_line") return content;
  const blanks = content.match(BEGINNING)[0];
  return blanks.replaceAll("\r", "\n").split("\n").at(-1) + content.slice(blanks.length);
}

/** The parts of a prompt: the messages and the template's texts around them, as [text, whether it belongs to a message]. */
function promptParts(template, messages) {
  const parts = [[template.start, false]];
  messages.forEach(({ role, thoughts, content }, i) => {
    if (role === "user") {
      parts.push([content, true], [i === messages.length - 1 ? template.end : template.answer, false]);
    } else if (thoughts && template.thoughts) {
      const [before, behind] = template.thoughts;
      parts.push([before, false], [thoughts, true], [behind, false], [content, true], [template.question, false]);
    } else parts.push([answerText(content, template.answer_form), true], [template.question, false]);
  });
  return parts;
}

/** The ids of parts of a prompt. In a message, the text of a special token becomes ordinary tokens. */
function encodeParts(tokenizer, parts) {
  const ids = [];
  let text = "";
  const flush = () => {
    ids.push(...tokenizer.encode(text));
    text = "";
  };
  for (const [part, isWritten] of parts) {
    for (const [piece, isSpecial] of cut(part, isWritten ? tokenizer.specialPattern : null)) {
      if (isSpecial) {
        flush();
        ids.push(...tokenizer.encode(piece, true));
      } else text += piece;
    }
  }
  flush();
  return ids;
}

class Conversation {
  /** spec: template, context (tokens, including the answer), and most_new_tokens (limit of an answer). */
  constructor(spec, tokenizer) {
    Object.assign(this, { spec, tokenizer, messages: [] });
    const { context, most_new_tokens: most } = spec;
    this.room = context - Math.min(most, Math.floor(context / 2));
  }

  /** Add a question, and drop the oldest turns until an answer has room. Returns {ids, dropped}, or {tooLong} if nothing was added. */
  ask(text) {
    const messages = [...this.messages, { role: "user", content: text }];
    const starts = messages.flatMap(({ role }, i) => (role === "user" ? [i] : []));
    for (const start of starts) {
      const ids = encodeParts(this.tokenizer, promptParts(this.spec.template, messages.slice(start)));
      if (ids.length <= this.room) {
        this.messages = messages.slice(start);
        return { ids, dropped: start };
      }
      if (start === starts.at(-1)) return { tooLong: ids.length };
    }
  }

  /** Add an answer, which may be incomplete. */
  answer(text) {
    this.messages.push({ role: "assistant", ...parseAnswer(text, true) });
  }

  /** A text that the model is to continue. It begins like a document in pretraining. Returns the same as `ask`. */
  continued(text) {
    const { start } = this.spec;
    const ids = this.tokenizer.encode(text);
    const begins = this.tokenizer.specialPattern && text.search(this.tokenizer.specialPattern) === 0;
    if (start !== null && !begins) ids.unshift(start);
    return ids.length <= this.room ? { ids, dropped: 0 } : { tooLong: ids.length };
  }
}
