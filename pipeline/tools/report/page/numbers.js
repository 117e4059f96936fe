// Numbers: as text, and as places on a scale.
export const NONE = "–";
const ROUNDING = 1e-15; // what is left of a sum that is 0

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
export const sum = (values) => values.reduce((total, value) => total + (value || 0), 0);
export const plural = (n, word, many = `${word}s`) => `${count(n)} ${n === 1 ? word : many}`;

// "a, b and c"
export const andList = (words) =>
  words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`;

export function extent(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (!isNumber(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : null;
}

export function count(n) {
  if (!isNumber(n)) return n === null || n === undefined ? NONE : String(n);
  return (n || 0).toLocaleString("en-US").replace("-", "−"); // −0 is 0
}

// Four significant digits, without trailing zeros.
export function number(n) {
  if (!isNumber(n)) return n === null || n === undefined ? NONE : String(n);
  const size = Math.abs(n);
  if (size < ROUNDING || (Number.isInteger(n) && size < 1e9)) return count(Math.round(n));
  const text = size >= 1e6 || size < 1e-4 ? n.toExponential(2) : String(Number(n.toPrecision(4)));
  return text.replaceAll("-", "−");
}

// Three significant digits, for a glance.
export const short = (value) => number(isNumber(value) ? Number(value.toPrecision(3)) : value);

// The beginning of a text: a hash is told by 16 characters.
export const beginning = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
export const shortId = (id) => beginning(String(id), 16);

// A share, likewise.
export const inPercent = (share) => (isNumber(share) ? `${short(100 * share)} %` : NONE);

// A share without digits, where it is not next to none or all: as sentences have it.
export function shareInWords(share) {
  const digits = (share >= 0.01 && share <= 0.99) || share === 0 || share === 1 ? 0 : 1;
  const rounded = Math.floor(100 * share * 10 ** digits + 0.5) / 10 ** digits; // as reports in a terminal
  return `${rounded.toFixed(digits)} %`;
}

// The common value where all agree, else their mean: the rows of a rollout mostly share a reward.
export function common(values) {
  const known = values.filter(isNumber);
  if (!known.length) return null;
  return known.every((value) => value === known[0]) ? known[0] : sum(known) / known.length;
}

// Whether a range is of one value, up to rounding.
export const isOne = ([low, high]) => high - low <= Math.max(1e-9 * Math.abs(low), 1e-9 * Math.abs(high), ROUNDING);

// A linear scale; a domain of one value, up to rounding, gets room on both sides.
export function scale([low, high], [from, to]) {
  const size = Math.max(Math.abs(low), Math.abs(high));
  if (isOne([low, high])) [low, high] = [low - (size / 2 || 0.5), high + (size / 2 || 0.5)];
  const map = (value) => from + ((value - low) / (high - low)) * (to - from);
  map.domain = [low, high];
  return map;
}

// Round numbers within the domain, about as many as asked for.
export function ticks([low, high], wanted) {
  const rough = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * power).find((size) => size >= rough * 0.999) || rough;
  const result = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k += 1) {
    result.push(Number((k * step).toPrecision(12)));
  }
  return result;
}
