// One picture: axes, curves of several runs, the values under the pointer or at the keyboard's place. Drawn as SVG.
import { announce, h, paint, s } from "./dom.js";
import { duration, logTicks, nearest, short, ticks, timeUnit } from "./series.js";
import { t } from "./text.js";

const HEIGHT = 216;
const PAD = { left: 56, right: 12, top: 10, bottom: 26 };
const FEW = 40; // a curve of fewer points shows them

const tenths = (value) => Math.round(10 * value) / 10;

let count = 0;

/**
 * A picture. draw(lines, {x, end, log}) shows lines of {name, color, x, y} and, if there are any, {raw, low, high,
 * experts, bad, heldOut}: `bad` are places that are marked, `heldOut` is dashed; `onMove(at)` is called with the place of the pointer, null when it leaves; point(at) shows a place.
 */
export class Plot {
  constructor(title, onMove) {
    Object.assign(this, { title, onMove, lines: [], view: {}, clip: `clip-${count++}` });
    this.svg = s("svg", { role: "img", tabindex: "0" });
    this.over = s("g");
    this.tip = h("div", { class: "tip", hidden: true });
    this.element = h("section", { class: "plot" }, h("h2", {}, title), this.svg, this.tip);
    this.svg.addEventListener("pointermove", (event) => this.move(this.place(event)));
    this.svg.addEventListener("pointerleave", () => this.move(null));
    this.svg.addEventListener("blur", () => this.move(null));
    this.svg.addEventListener("keydown", (event) => this.step(event));
    new ResizeObserver(() => this.svg.clientWidth !== this.width && this.redraw()).observe(this.element);
  }

  draw(lines, view) {
    this.lines = lines;
    this.view = view;
    this.redraw();
  }

  redraw() {
    this.width = this.svg.clientWidth;
    if (!this.width || !this.lines.length) return;
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.limits();
    const [left, right] = [PAD.left, this.width - PAD.right];
    const inside = s("rect", { x: left - 2, y: 0, width: right - left + 4, height: HEIGHT - PAD.bottom + 3 });
    const clip = s("clipPath", { id: this.clip }, inside);
    const curves = s("g", { "clip-path": `url(#${this.clip})` }, ...this.lines.flatMap((line) => this.curve(line)));
    this.svg.replaceChildren(s("defs", {}, clip), ...this.axes(left, right), curves, this.over);
    const values = this.lines.map((line) => `${line.name} ${this.value(line, line.x.length - 1)}`).join(", ");
    this.svg.setAttribute("aria-label", t("plotLabel", { title: this.title, values }));
    this.over.replaceChildren();
    if (this.at !== null && this.at !== undefined) this.onMove(this.at, this); // the pointer is still there
  }

  limits() {
    const sources = this.lines.flatMap((line) => [line.y, ...(line.experts ?? [])]);
    const ys = sources.flatMap((values) => values.filter((value) => value !== null && (!this.view.log || value > 0)));
    let low = ys.reduce((a, b) => Math.min(a, b), Infinity);
    let high = ys.reduce((a, b) => Math.max(a, b), -Infinity);
    if (!ys.length) [low, high] = [0.1, 1];
    this.log = this.view.log && low > 0 ? Math.log10 : (value) => value;
    const room = (this.log(high) - this.log(low)) * 0.06 || Math.abs(this.log(high)) * 0.1 || 0.5;
    const back = this.log === Math.log10 ? (value) => 10 ** value : (value) => value;
    this.low = back(this.log(low) - room);
    if (this.log !== Math.log10 && low >= 0 && low < 0.4 * high) this.low = 0;
    this.high = back(this.log(high) + room);
    [this.x0, this.x1] = [0, this.view.end]; // the same for all pictures
  }

  atX(value) {
    return PAD.left + ((value - this.x0) / (this.x1 - this.x0)) * (this.width - PAD.left - PAD.right);
  }

  atY(value) {
    const share = (this.log(value) - this.log(this.low)) / (this.log(this.high) - this.log(this.low));
    return HEIGHT - PAD.bottom - share * (HEIGHT - PAD.bottom - PAD.top);
  }

  axes(left, right) {
    const vertical = this.log === Math.log10 ? logTicks(this.low, this.high) : ticks(this.low, this.high, 4);
    const nodes = vertical.flatMap((value) => {
      const y = this.atY(value);
      return [
        s("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }),
        s("text", { class: "axis-text", x: left - 8, y: y + 4, "text-anchor": "end" }, short(value)),
      ];
    });
    const [unit, name] = this.view.x === "seconds" ? timeUnit(this.x1) : [1, ""];
    for (const value of ticks(this.x0 / unit, this.x1 / unit, Math.max(2, Math.floor(this.width / 75)))) {
      const x = this.atX(value * unit);
      const anchor = x > right - 14 ? "end" : "middle";
      const text = name ? `${short(value)} ${name}` : short(value);
      nodes.push(s("text", { class: "axis-text", x, y: HEIGHT - 7, "text-anchor": anchor }, text));
    }
    return nodes;
  }

  /** "M x,y L x,y ..." of the values; a gap where one is missing. */
  path(xs, ys) {
    let text = "";
    let pen = "M";
    for (let i = 0; i < xs.length; i++) {
      if (xs[i] === null || ys[i] === null || (this.log === Math.log10 && ys[i] <= 0)) {
        pen = "M";
        continue;
      }
      text += `${pen}${tenths(this.atX(xs[i]))},${tenths(this.atY(ys[i]))}`;
      pen = "L";
    }
    return text;
  }

  curve({ color, x, y, raw, low, high, experts, bad, heldOut }) {
    const group = paint(s("g"), color);
    if (experts) {
      const even = this.atY(1 / experts.length);
      group.append(s("line", { class: "even", x1: PAD.left, x2: this.width - PAD.right, y1: even, y2: even }));
      group.append(...experts.map((share) => s("path", { class: "thin", d: this.path(x, share) })));
      return [group];
    }
    if (low && high) {
      const whole = x.map((value, i) => (low[i] === null || high[i] === null ? null : value));
      const kept = whole.map((value, i) => i).filter((i) => whole[i] !== null);
      const pick = (values) => kept.map((i) => Math.max(values[i], this.log === Math.log10 ? this.low : -Infinity));
      const there = this.path(kept.map((i) => x[i]), pick(high));
      const back = this.path(kept.map((i) => x[i]).reverse(), pick(low).reverse());
      if (kept.length) group.append(s("path", { class: "band", d: `${there}${back.replace("M", "L")}Z` }));
    }
    if (raw) group.append(s("path", { class: "faint", d: this.path(x, raw) }));
    group.append(s("path", { class: heldOut ? "line held-out" : "line", d: this.path(x, y) }));
    for (const at of bad ?? []) group.append(this.badMark(this.atX(at)));
    if (x.length < FEW) group.append(...this.dots({ x, y }, x.map((_, i) => i), "point", 2.6));
    return [group];
  }

  /** A cross at the upper edge with a thin line below it: an update without a finite loss or gradient. */
  badMark(x) {
    const [top, size] = [PAD.top + 4, 4];
    const cross = `M${x - size},${top - size}L${x + size},${top + size}M${x - size},${top + size}L${x + size},${top - size}`;
    return s("path", { class: "bad", d: `${cross}M${x},${top}V${HEIGHT - PAD.bottom}` });
  }

  dots({ x, y }, indices, kind, radius) {
    const there = indices.filter((i) => x[i] !== null && y[i] !== null && (this.log !== Math.log10 || y[i] > 0));
    return there.map((i) => s("circle", { class: kind, cx: this.atX(x[i]), cy: this.atY(y[i]), r: radius }));
  }

  // --- values at a place

  place(event) {
    const box = this.svg.getBoundingClientRect();
    const share = (event.clientX - box.left - PAD.left) / (this.width - PAD.left - PAD.right);
    return this.x0 + Math.min(1, Math.max(0, share)) * (this.x1 - this.x0);
  }

  move(at) {
    this.at = at;
    this.onMove(at, this);
  }

  step(event) {
    const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!direction || !this.lines.length) return;
    event.preventDefault();
    const xs = this.lines.reduce((a, b) => (a.x.length >= b.x.length ? a : b)).x;
    const here = this.at === null || this.at === undefined ? (direction > 0 ? -1 : xs.length) : nearest(xs, this.at);
    const next = Math.min(xs.length - 1, Math.max(0, here + direction * (event.shiftKey ? 10 : 1)));
    this.move(xs[next]);
    announce(this.tip.innerText.replaceAll("\n", " "));
  }

  value(line, i) {
    if (!line.experts) return short(line.y[i], 4);
    const shares = line.experts.map((share) => share[i]).filter((share) => share !== null);
    return shares.length ? t("rangeOf", { low: short(Math.min(...shares)), high: short(Math.max(...shares)) }) : "–";
  }

  xText(at) {
    if (this.view.x === "seconds") return duration(at);
    return `${t(this.view.x)} ${this.view.x === "tokens" ? short(at, 4) : Math.round(at)}`;
  }

  /** Show the values at a place (null: none); with `tip` also as text. */
  point(at, tip) {
    this.tip.hidden = !tip || at === null;
    this.over.replaceChildren();
    if (at === null || at === undefined || !this.lines.length || !this.width) return;
    const x = this.atX(at);
    this.over.append(s("line", { class: "cross", x1: x, x2: x, y1: PAD.top, y2: HEIGHT - PAD.bottom }));
    const near = 0.015 * (this.x1 - this.x0); // beyond its ends a curve has no value
    const rows = this.lines.map((line) => {
      const there = line.x[0] - near <= at && at <= line.x.at(-1) + near;
      const i = there ? nearest(line.x, at) : -1;
      if (there && !line.experts) this.over.append(paint(s("g", {}, ...this.dots(line, [i], "dot", 4.2)), line.color));
      const value = h("b", {}, there ? this.value(line, i) : "–");
      const row = h("div", {}, h("span", { class: "swatch" }), h("span", { class: "name" }, line.name), value);
      return paint(row, line.color);
    });
    if (!tip) return;
    this.tip.replaceChildren(h("span", { class: "at" }, this.xText(at)), ...rows);
    const left = x < this.width / 2 ? x + 26 : x - this.tip.offsetWidth - 2;
    this.tip.style.left = `${Math.max(6, Math.min(left, this.width - this.tip.offsetWidth + 20))}px`;
  }
}
