// Numbers of the curves: smoothing, ticks, and how values are written.
import { t } from "./text.js";

/** Exponential moving average without the pull of its start; gaps (null) stay gaps. */
export function smooth(values, weight) {
  let [sum, norm] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

/** About `count` round numbers within limits. */
export function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= 0.8 * raw) ?? 10 * power;
  const values = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) values.push(i * step);
  return values;
}

/** Ticks of a logarithmic axis: powers of ten, with 2 and 5 between them where there is room. */
export function logTicks(low, high) {
  const decades = Math.log10(high / low);
  if (decades < 0.5) return ticks(low, high, 4).filter((value) => value > 0);
  const factors = decades < 3 ? [1, 2, 5] : [1];
  const skip = Math.max(1, Math.ceil(decades / 6));
  const values = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    if (power % skip) continue;
    values.push(...factors.map((factor) => factor * 10 ** power).filter((value) => value >= low && value <= high));
  }
  return values;
}

/** A value with few digits: 0.0003 as 3e-4, 12345 as 12.3k. */
export function short(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size < 0.001) return value.toExponential(Math.max(0, digits - 2)).replace(/\.?0*e/, "e");
  for (const [unit, sign] of [[1e9, "B"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= unit) return `${trimmed(value / (sign === "k" ? 1e3 : unit), digits)}${sign}`;
  }
  return trimmed(value, Math.max(digits, size >= 1000 ? 4 : 0));
}

const trimmed = (value, digits) => String(Number(value.toPrecision(digits)));

/** Seconds as people say them. */
export function duration(seconds) {
  if (seconds < 100) return `${Math.round(seconds)} ${t("unit_s")}`;
  if (seconds < 5400) return `${trimmed(seconds / 60, 2)} ${t("unit_min")}`;
  return `${trimmed(seconds / 3600, seconds < 36000 ? 2 : 3)} ${t("unit_h")}`;
}

/** Seconds on an axis that reaches to `high`: [value per unit, name of the unit]. */
export function timeUnit(high) {
  if (high < 180) return [1, t("unit_s")];
  return high < 10800 ? [60, t("unit_min")] : [3600, t("unit_h")];
}

/** Index of the value that is nearest to `at`; the values rise, gaps (null) do not count. */
export function nearest(values, at) {
  let [low, high] = [0, values.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((values[middle] ?? -Infinity) < at) low = middle + 1;
    else high = middle;
  }
  return low > 0 && at - values[low - 1] < values[low] - at ? low - 1 : low;
}
