// A conversation as the model reads it, with the rules of scripts/conversation.py and model/answers.py.

// what the model is not asked for may still be in its answer
const [THINK, END_THINK] = ["<think>", "</think>"];
const SPACES = "[\\t-\\r\\x1c- \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000]*"; // Python's str.lstrip
const BEGINNING = new RegExp(`^${SPACES}`, "u");

/** An answer's text as {thoughts, content}; isWhole: no more of it comes. */
function parseAnswer(text, isWhole) {
  const begun = text.replace(BEGINNING, "");
  if (!begun.startsWith(THINK)) return { thoughts: "", content: isWhole || !THINK.startsWith(begun) ? text : "" };
  const rest = begun.slice(THINK.length);
  const end = rest.indexOf(END_THINK);
  const thoughts = (end < 0 ? rest : rest.slice(0, end)).replace(/^\n+|\n+$/g, "");
  return { thoughts, content: end < 0 ? "" : rest.slice(end + END_THINK.length).replace(/^\n+/, "") };
}

/** The text of an answer in a prompt: some templates leave out the line breaks that it begins with. */
function answerText(content, form) {
  if (form !== "last_line") return content;
  const blanks = content.match(BEGINNING)[0];
  return blanks.replaceAll("\r", "\n").split("\n").at(-1) + content.slice(blanks.length);
}

/** The parts of a prompt, as [text, whether it is what somebody wrote], with the template's texts around the messages. */
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

/** The ids of parts of a prompt. The text of a special token in what somebody wrote becomes ordinary tokens. */
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
  /** spec: template, context (tokens, the answer included) and most_new_tokens, of an answer. */
  constructor(spec, tokenizer) {
    Object.assign(this, { spec, tokenizer, messages: [] });
    const { context, most_new_tokens: most } = spec;
    this.room = context - Math.min(most, Math.floor(context / 2));
  }

  /** Add a question. The oldest turns are dropped until an answer has room; {ids, dropped}, or {tooLong} and nothing is added. */
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

  /** Add an answer, as far as it came. */
  answer(text) {
    this.messages.push({ role: "assistant", ...parseAnswer(text, true) });
  }

  /** A text that the model is to continue, as a document begins in pretraining; as `ask`. */
  continued(text) {
    const { start } = this.spec;
    const ids = this.tokenizer.encode(text);
    const begins = this.tokenizer.specialPattern && text.search(this.tokenizer.specialPattern) === 0;
    if (start !== null && !begins) ids.unshift(start);
    return ids.length <= this.room ? { ids, dropped: 0 } : { tooLong: ids.length };
  }
}
