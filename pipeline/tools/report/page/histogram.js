// Bars of counts over bins of whole numbers, kinds on top of one another.
import { s } from "./dom.js";
import { count, extent, isNumber, scale, ticks } from "./numbers.js";
import { tip } from "./tip.js";

const MOST_BINS = 24;
const ASIDE = 54; // left of the bars
const TALL = 210;
const BELOW = 40;

// 1, 2, 5, 10, 20, … : bins whose ends are round.
function roundSize(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, least)));
  return [1, 2, 5, 10].map((k) => k * power).find((size) => size >= least);
}

// Items by their value and kind, in at most so many bins, none of which is left out.
export function binsOf(items) {
  const [low, high] = extent(items.map((item) => item.value));
  const size = roundSize((high - low + 1) / MOST_BINS);
  const start = Math.floor(low / size) * size;
  const bins = Array.from({ length: Math.floor((high - start) / size) + 1 }, (_, k) => ({
    from: start + k * size,
    to: start + (k + 1) * size - 1,
    counts: {},
  }));
  for (const item of items) {
    const { counts } = bins[Math.floor((item.value - start) / size)];
    counts[item.kind] = (counts[item.kind] || 0) + 1;
  }
  return bins;
}

export const binName = ({ from, to }) => (from === to ? count(from) : `${count(from)}–${count(to)}`);

// kinds: by class, from the axis upwards; tipOf: the lines of a bin's tip; marks: lines across, by class.
export function drawHistogram({ bins, kinds, width, across, up, label, tipOf, marks = [] }) {
  const bottom = TALL - BELOW;
  const totals = bins.map(({ counts }) => kinds.reduce((total, kind) => total + (counts[kind] || 0), 0));
  const most = Math.max(...totals);
  const y = scale([0, most], [bottom, 10]);
  const size = bins[0].to - bins[0].from + 1;
  const one = size === 1; // a bin is a number, which stands below its middle; else its end, below its edge
  const ends = [...bins.map(({ from }) => from), ...(one ? [] : [bins.at(-1).to + 1])];
  const widest = 7.5 * Math.max(...ends.map((end) => count(end).length));
  const slot = Math.min((width - ASIDE - 8 - widest / 2) / bins.length, 64);
  const x = (value) => ASIDE + ((value - bins[0].from) / size) * slot;
  const every = Math.ceil((widest + 10) / slot);
  return s(
    "svg",
    { class: "histogram", width, height: TALL, role: "img", "aria-label": label },
    ticks([0, most], 4)
      .filter(Number.isInteger)
      .map((tick) => [
        s("line", { class: "grid", x1: ASIDE, x2: width, y1: y(tick), y2: y(tick) }),
        s("text", { class: "end", x: ASIDE - 6, y: y(tick) + 4 }, count(tick)),
      ])
      .flat(),
    bins.map((bin, k) => {
      let from = 0;
      const pieces = kinds.map((kind) => {
        const number = bin.counts[kind] || 0;
        from += number;
        if (!number) return null;
        const height = y(from - number) - y(from);
        return s("rect", { class: `left ${kind}`, x: x(bin.from) + slot * 0.08, width: slot * 0.84, y: y(from), height });
      });
      return tip(s("g", { class: "bin" }, pieces), () => tipOf(bin, totals[k]));
    }),
    ends.map((end, k) =>
      k % every ? null : s("text", { x: x(end) + (one ? slot / 2 : 0), y: bottom + 16 }, count(end)),
    ),
    marks
      .filter(([at]) => isNumber(at))
      .map(([at, kind]) => {
        const place = x(at) + (one ? slot / 2 : 0);
        return s("line", { class: kind, x1: place, x2: place, y1: 4, y2: bottom });
      }),
    s("text", { class: "title", x: (ASIDE + width) / 2, y: TALL - 4 }, across),
    s("text", { class: "title", transform: `translate(12 ${bottom / 2}) rotate(-90)` }, up),
  );
}
