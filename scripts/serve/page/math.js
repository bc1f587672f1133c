// Formulas: a small part of LaTeX becomes MathML, which browsers draw themselves. What is not understood is not a
// formula: the text stays as it was written.
const MATHML = "http://www.w3.org/1998/Math/MathML";
const LONGEST = 2000; // characters of a formula
const DEPTH = 40; // groups and commands within each other

const words = (text) => Object.fromEntries(text.trim().split(/\s+/).map((pair) => pair.split(":")));
const GREEK = words(`alpha:α beta:β gamma:γ delta:δ epsilon:ϵ varepsilon:ε zeta:ζ eta:η theta:θ vartheta:ϑ iota:ι kappa:κ
  lambda:λ mu:μ nu:ν xi:ξ pi:π rho:ρ sigma:σ tau:τ upsilon:υ phi:ϕ varphi:φ chi:χ psi:ψ omega:ω Gamma:Γ Delta:Δ Theta:Θ
  Lambda:Λ Xi:Ξ Pi:Π Sigma:Σ Phi:Φ Psi:Ψ Omega:Ω ell:ℓ hbar:ℏ infty:∞ partial:∂ nabla:∇ emptyset:∅ Re:ℜ Im:ℑ aleph:ℵ`);
const OPERATORS = words(`cdot:⋅ times:× div:÷ pm:± mp:∓ ast:∗ star:⋆ circ:∘ bullet:∙ oplus:⊕ otimes:⊗ le:≤ leq:≤ ge:≥ geq:≥
  ne:≠ neq:≠ approx:≈ equiv:≡ sim:∼ simeq:≃ cong:≅ propto:∝ ll:≪ gg:≫ in:∈ notin:∉ ni:∋ subset:⊂ subseteq:⊆ supset:⊃
  supseteq:⊇ cup:∪ cap:∩ setminus:∖ forall:∀ exists:∃ neg:¬ lnot:¬ land:∧ wedge:∧ lor:∨ vee:∨ to:→ rightarrow:→
  leftarrow:← leftrightarrow:↔ Rightarrow:⇒ implies:⇒ Leftarrow:⇐ Leftrightarrow:⇔ iff:⇔ mapsto:↦ ldots:… dots:… cdots:⋯
  vdots:⋮ mid:∣ parallel:∥ perp:⊥ angle:∠ prime:′ langle:⟨ rangle:⟩ lfloor:⌊ rfloor:⌋ lceil:⌈ rceil:⌉ lbrace:{ rbrace:}
  vert:| Vert:‖ colon::`);
const LARGE = words("sum:∑ prod:∏ coprod:∐ int:∫ iint:∬ oint:∮ bigcup:⋃ bigcap:⋂");
const FUNCTIONS = new Set(`sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh exp log ln lg lim sup inf max min
  arg det dim gcd ker Pr argmax argmin`.split(/\s+/));
const BELOW = new Set(["lim", "max", "min", "sup", "inf", "argmax", "argmin"]); // their limits stand below them
const ACCENTS = words("hat:^ widehat:^ bar:¯ overline:¯ vec:→ tilde:~ widetilde:~ dot:˙ ddot:¨");
const STYLES = words("mathrm:normal text:normal textrm:normal operatorname:normal mathbf:bold boldsymbol:bold textbf:bold");
const DOUBLE = words("C:ℂ E:𝔼 N:ℕ P:ℙ Q:ℚ R:ℝ Z:ℤ");
const SPACES = words(",:0.17em ::0.22em ;:0.28em !:-0.17em quad:1em qquad:2em");
const ESCAPED = "{}%$&#_|";
const IGNORED = new Set(["displaystyle", "textstyle", "limits", "nolimits", "big", "Big", "bigg", "Bigg", "bigl", "bigr"]);
const FRACTIONS = new Set(["frac", "dfrac", "tfrac"]);
const own = (table, name) => (Object.hasOwn(table, name) ? table[name] : undefined);

function m(tag, children = [], attributes = {}) {
  const node = document.createElementNS(MATHML, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const row = (nodes) => (nodes.length === 1 ? nodes[0] : m("mrow", nodes));

class Unknown extends Error {}

/** Reads one formula from left to right. Throws Unknown where it does not understand it. */
class Reader {
  constructor(text) {
    this.tokens = text.match(/\\[A-Za-z]+|\\[\s\S]|\d+(?:\.\d+)?|\s+|[\s\S]/gu) ?? [];
    this.at = 0;
    this.depth = 0;
  }

  peek() {
    while (this.at < this.tokens.length && /^\s/.test(this.tokens[this.at])) this.at++;
    return this.tokens[this.at];
  }

  take() {
    const token = this.peek();
    if (token === undefined) throw new Unknown();
    this.at++;
    return token;
  }

  /** Everything up to a token that ends it (undefined: the end of the formula). */
  list(end) {
    if (++this.depth > DEPTH) throw new Unknown();
    const nodes = [];
    while (this.peek() !== end) nodes.push(...this.scripted());
    this.at++;
    this.depth--;
    return nodes;
  }

  /** One thing with what stands above and below it; a space gives none. */
  scripted() {
    const name = (this.peek() ?? "").slice(1);
    const large = BELOW.has(name) || (own(LARGE, name) && !name.includes("int"));
    const base = this.atom();
    if (!base) return [];
    let [below, above] = [null, null];
    for (;;) {
      const mark = this.peek();
      if (mark === "_" && !below) below = (this.take(), this.argument());
      else if (mark === "^" && !above) above = (this.take(), this.argument());
      else if (mark === "'" && !above) above = this.primes();
      else if (mark === "_" || mark === "^") throw new Unknown();
      else break;
    }
    const [both, under, over] = large ? ["munderover", "munder", "mover"] : ["msubsup", "msub", "msup"];
    if (below && above) return [m(both, [base, below, above])];
    if (below) return [m(under, [base, below])];
    return above ? [m(over, [base, above])] : [base];
  }

  primes() {
    let text = "";
    while (this.peek() === "'") text += (this.take(), "′");
    return m("mo", [text]);
  }

  /** What a command or a script applies to: a group, or one thing. */
  argument() {
    if (this.peek() === "{") return (this.take(), row(this.list("}")));
    const token = this.peek();
    if (/^\d/.test(token ?? "") && token.length > 1) {
      this.tokens[this.at] = token.slice(1); // x^23 is x² and a 3
      return m("mn", [token[0]]);
    }
    const node = this.atom();
    if (!node) throw new Unknown();
    return node;
  }

  /** The text of a group, as it is written. */
  raw() {
    if (this.take() !== "{") throw new Unknown();
    let text = "";
    while (this.at < this.tokens.length && this.tokens[this.at] !== "}") text += this.tokens[this.at++];
    if (this.at++ >= this.tokens.length || /[{\\$]/.test(text)) throw new Unknown();
    return text;
  }

  atom() {
    const token = this.take();
    if (token === "{") return row(this.list("}"));
    if (token[0] === "\\") {
      if (++this.depth > DEPTH) throw new Unknown();
      const node = this.command(token.slice(1));
      this.depth--;
      return node;
    }
    if (/^\d/.test(token)) return m("mn", [token]);
    if (/^\p{L}$/u.test(token)) return m("mi", [token]);
    if (/^[-+*/=<>()[\]|,.;:!?]$/.test(token)) return m("mo", [token === "-" ? "−" : token], stretchy(token));
    throw new Unknown();
  }

  command(name) {
    if (FRACTIONS.has(name)) return m("mfrac", [this.argument(), this.argument()]);
    if (name === "sqrt") return this.root();
    if (name === "left") return this.fenced();
    if (name === "mathbb") return m("mi", [own(DOUBLE, this.raw()) ?? fail()]);
    if (own(STYLES, name)) {
      const text = this.raw().replace(/^\s|\s$/g, "\u00a0"); // MathML drops spaces at the ends
      return m("mtext", [text], { class: own(STYLES, name) });
    }
    if (own(ACCENTS, name)) return m("mover", [this.argument(), m("mo", [own(ACCENTS, name)])], { accent: "true" });
    if (own(GREEK, name)) return m("mi", [own(GREEK, name)]);
    if (own(LARGE, name)) return m("mo", [own(LARGE, name)], { largeop: "true", movablelimits: "true" });
    if (own(OPERATORS, name)) return m("mo", [own(OPERATORS, name)], { stretchy: "false" });
    if (FUNCTIONS.has(name)) return m("mi", [name]);
    if (own(SPACES, name)) return m("mspace", [], { width: own(SPACES, name) });
    if (name.length === 1 && ESCAPED.includes(name)) return m("mo", [name], { stretchy: "false" });
    if (IGNORED.has(name) || name === " ") return null;
    throw new Unknown();
  }

  root() {
    if (this.peek() !== "[") return m("msqrt", [this.argument()]);
    this.take();
    const index = row(this.list("]"));
    return m("mroot", [this.argument(), index]);
  }

  fenced() {
    const open = this.fence();
    const nodes = this.list("\\right");
    return m("mrow", [open, ...nodes, this.fence()]);
  }

  fence() {
    const token = this.take();
    const sign = token === "." ? "" : token.length === 1 ? token : (own(OPERATORS, token.slice(1)) ?? token[1]);
    if (!/^[()[\]{}|‖⟨⟩⌊⌋⌈⌉]?$/u.test(sign)) throw new Unknown();
    return m("mo", [sign], { stretchy: "true" });
  }
}

const fail = () => {
  throw new Unknown();
};
const stretchy = (token) => ("()[]|".includes(token) ? { stretchy: "false" } : {});

/** The MathML of a formula, on lines of its own with `display`; null if it is not understood. */
export function formula(text, display = false) {
  if (!text.trim() || text.length > LONGEST) return null;
  try {
    const reader = new Reader(text.trim());
    const nodes = reader.list(undefined);
    return m("math", [row(nodes)], display ? { display: "block" } : {});
  } catch (error) {
    if (error instanceof Unknown) return null;
    throw error;
  }
}

const MARKS = [["$$", "$$", true], ["\\[", "\\]", true], ["\\(", "\\)", false], ["$", "$", false]];

/** The formula that begins at a place of a text: {nodes, end}; null if none does. */
export function formulaAt(text, at) {
  const [open, close, display] = MARKS.find(([mark]) => text.startsWith(mark, at)) ?? [];
  if (!open) return null;
  const start = at + open.length;
  const end = text.slice(start, start + LONGEST).indexOf(close) + start;
  if (end < start) return null;
  const inner = text.slice(start, end);
  if (inner.includes(open)) return null;
  if (open === "$" && !isInline(inner, text[end + 1])) return null;
  const node = formula(inner, display);
  return node && { nodes: [node], end: end + close.length };
}

/** Whether what stands between two dollars can be a formula: "$5 and $6" are prices, $HOME:$PATH are names. */
function isInline(inner, next) {
  if (/^\s|\s$|\n\n/.test(inner) || /[A-Za-z\d]/.test(next ?? "")) return false;
  return !/\s/.test(inner) || /[\\^_=+<>{}|/*-]/.test(inner);
}
