// The optimiser of a step: what it measured, and where the time went. What was not measured is not shown.
import { drawTiles } from "./answer.js";
import { h, s } from "./dom.js";
import { legend, swatch } from "./legend.js";
import { inPercent, isNumber, shareInWords, short, sum } from "./numbers.js";

const MEASURED = [
  { metric: /^optimiser\/lr$/, unit: "greatest of the parameter groups", text: short },
  { metric: /^optimiser\/loss$/, unit: "mean over optimiser steps", text: short },
  { metric: /^optimiser\/grad_norm$/, unit: "before clipping", text: short },
  { metric: /^optimiser\/clipped$/, unit: "of the optimiser steps", text: inPercent },
  { metric: /^optimiser\/entropy$/, unit: "nats, as the loss gives it", text: short },
  { metric: /^optimiser\/clip_fraction$/, unit: "as the loss gives it", text: inPercent },
  { metric: /^optimiser\/kl_approx$/, unit: "nats, as the loss gives it", text: short },
  { metric: /^optimiser\/kl_to_ref$/, unit: "nats, as the loss gives it", text: short },
  { metric: /^optimiser\/tokens_per_second$/, unit: "tokens in the loss per second", text: short },
];
const PARTS = ["collect", "reward", "headrace", "optimise"]; // in the order of a step; others come behind

const hasOptimiser = (page) => Object.keys(page.curves).some((name) => /^(optimiser|seconds)\//.test(name));

// A bar of the seconds of a step, a piece for each of its parts.
function drawSeconds(step) {
  const known = Object.entries(step.numbers)
    .filter(([name, value]) => name.startsWith("seconds/") && isNumber(value))
    .map(([name, value]) => [name.slice("seconds/".length), value]);
  const place = ([name]) => (PARTS.includes(name) ? PARTS.indexOf(name) : PARTS.length);
  const parts = known.sort((a, b) => place(a) - place(b));
  const whole = sum(parts.map(([, value]) => value));
  if (!whole) return null;
  let from = 0;
  const pieces = parts.map(([, value], k) => {
    const piece = s("rect", {
      class: `part part-${k % 4}`,
      x: `${(from / whole) * 100}%`,
      width: `${(value / whole) * 100}%`,
      height: "100%",
    });
    from += value;
    return piece;
  });
  const time = (value) => (value < 0.1 ? `${short(1000 * value)} ms` : `${short(value)} s`);
  const said = parts.map(([name, value]) => `${name} ${time(value)} (${shareInWords(value / whole)})`);
  const mark = (k) => swatch(s("rect", { class: `part part-${k % 4}`, width: 18, height: 14 }));
  return h(
    "div",
    { class: "seconds" },
    h("h3", {}, `Time of the step: ${time(whole)}`),
    s("svg", { class: "seconds", height: 16, role: "img", "aria-label": said.join(", ") }, pieces),
    legend(said.map((text, k) => [mark(k), text, parts[k][0]])),
  );
}

export function drawOptimiser(view) {
  if (!hasOptimiser(view.page)) return null;
  return [...drawTiles(MEASURED, view), drawSeconds(view.step)].filter(Boolean);
}
