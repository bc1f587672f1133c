// The tokenizer of the model: byte-level BPE, with the same results as the tokenizers library.

// Unicode's white space, which is not quite JavaScript's \s
const SPACE = "\\t-\\r \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000";
// patterns of the pieces within which tokens merge, by llama.cpp's names
const PIECES = {
  qwen2: "'(?:[sStTmMdD\\u017f]|[rR][eE]|[vV][eE]|[lL][lL])|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^S\\p{L}\\p{N}]+[\\r\\n]*|[S]*[\\r\\n]+|[S]+(?![^S])|[S]+",
  "gpt-2": "'(?:[stmd]|re|ve|ll)| ?\\p{L}+| ?\\p{N}+| ?[^S\\p{L}\\p{N}]+|[S]+(?![^S])|[S]+",
};
const HALF_CHARACTER = /\p{Surrogate}/gu;

/** For each byte, the character that represents it in a vocabulary: itself if it is printable, otherwise one from 256 on. */
function byteCharacters() {
  const isPrintable = (byte) => (byte >= 33 && byte <= 126) || (byte >= 161 && byte !== 173);
  let next = 256;
  return Array.from({ length: 256 }, (_, byte) => String.fromCharCode(isPrintable(byte) ? byte : next++));
}

/** A pattern that matches the longest of these texts; null if there are none. */
function anyOf(texts) {
  const longestFirst = [...texts].sort((a, b) => b.length - a.length);
  const escaped = longestFirst.map((text) => text.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&"));
  return escaped.length ? new RegExp(escaped.join("|"), "gu") : null;
}

/** Split a text at the matches of a pattern: [[part, whether it is a match]], without empty parts. */
function cut(text, pattern) {
  const parts = [];
  let at = 0;
  for (const match of pattern ? text.matchAll(pattern) : []) {
    parts.push([text.slice(at, match.index), false], [match[0], true]);
    at = match.index + match[0].length;
  }
  parts.push([text.slice(at), false]);
  return parts.filter(([part]) => part);
}

class Tokenizer {
  /** vocabulary: the tokens by id. merges: pairs of ids, the first one merges first. added: [{id, text, special}]. */
  constructor({ vocabulary, merges, added, pieces }) {
    const characters = byteCharacters();
    const bytes = new Map(characters.map((character, byte) => [character, byte]));
    const ids = new Map(vocabulary.map((token, id) => [token, id]));
    this.size = vocabulary.length;
    this.idOfByte = characters.map((character) => ids.get(character));
    const own = new Map(added.map(({ id, text }) => [text, id]));
    this.added = own;
    this.special = new Set(added.filter(({ special }) => special).map(({ id }) => id));
    // in messages and answers, the text of a special token is plain text
    this.plainPattern = anyOf(added.filter(({ special }) => !special).map(({ text }) => text));
    this.specialPattern = anyOf(added.filter(({ special }) => special).map(({ text }) => text));
    this.pattern = anyOf(own.keys());
    this.pieces = new RegExp(PIECES[pieces].replaceAll("[S]", `[${SPACE}]`).replaceAll("[^S", `[^${SPACE}`), "gu");
    this.merges = new Map(merges.map(([a, b], rank) => [a * this.size + b, { rank, id: ids.get(vocabulary[a] + vocabulary[b]) }]));
    this.bytesOf = vocabulary.map((token) => {
      const known = [...token].map((character) => bytes.get(character));
      return known.includes(undefined) ? [...new TextEncoder().encode(token)] : known;
    });
  }

  /** The ids of a text. isPlain: the text of a special token is plain text. */
  encode(text, isPlain = false) {
    const ids = [];
    const whole = text.replace(HALF_CHARACTER, "\ufffd");
    for (const [part, isToken] of cut(whole, isPlain ? this.plainPattern : this.pattern)) {
      if (isToken) ids.push(this.added.get(part));
      else for (const [piece] of part.matchAll(this.pieces)) this.merge(piece, ids);
    }
    return ids;
  }

  /** Append the ids of a piece. The neighbours whose merge has the highest priority become one token, until none merge. */
  merge(piece, ids) {
    let parts = Array.from(new TextEncoder().encode(piece), (byte) => this.idOfByte[byte]);
    for (;;) {
      let first = null;
      for (let i = 0; i + 1 < parts.length; i++) {
        const found = this.merges.get(parts[i] * this.size + parts[i + 1]);
        if (found && (!first || found.rank < first.rank)) first = { ...found, left: parts[i], right: parts[i + 1] };
      }
      if (!first) break;
      const merged = [];
      for (let i = 0; i < parts.length; i++) {
        const isPair = parts[i] === first.left && parts[i + 1] === first.right;
        merged.push(isPair ? first.id : parts[i]);
        if (isPair) i++;
      }
      parts = merged;
    }
    for (const id of parts) ids.push(id);
  }

  /** A function that takes the ids of an answer one by one and returns the text that each completes; without an id, the rest. */
  decoder() {
    const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    return (id) => {
      if (id === undefined) return decoder.decode();
      const bytes = this.special.has(id) ? [] : (this.bytesOf[id] ?? []);
      return decoder.decode(new Uint8Array(bytes), { stream: true });
    };
  }
}
