// A dot per rollout: its area by its segments, its colour by its advantage; dots that would overlap are
// stacked.
import { diverging } from "./colour.js";
import { s } from "./dom.js";
import { advantageWords, compareIds, fate } from "./model.js";
import { extent, number, plural } from "./numbers.js";
import { tip } from "./tip.js";

const DOT = 4.8;

export const radius = (segments) => Math.min(DOT * Math.sqrt(Math.max(1, segments)), 11);

// Levels 0, 1, −1, 2, … : each dot takes the one nearest to the line on which it touches no other.
export function stack(rollouts, x) {
  const dots = rollouts
    .map((rollout) => ({ rollout, x: x(rollout.reward), r: radius(rollout.rows.length) }))
    .sort((a, b) => a.x - b.x || compareIds(a.rollout.id, b.rollout.id));
  const ends = new Map();
  for (const dot of dots) {
    let k = 0;
    const level = () => (k % 2 ? (k + 1) / 2 : -k / 2);
    while ((ends.get(level()) ?? -Infinity) > dot.x - dot.r) k += 1;
    dot.level = level();
    ends.set(dot.level, dot.x + dot.r + 0.5);
  }
  const levels = extent(dots.map((dot) => dot.level)) || [0, 0];
  const largest = Math.max(DOT, ...dots.map((dot) => dot.r));
  const pitch = Math.min(largest * 2.1, 60 / Math.max(1, levels[1] - levels[0]));
  for (const dot of dots) dot.dy = -dot.level * pitch;
  const above = Math.max(12, levels[1] * pitch + largest + 3);
  return { dots, above, height: above + Math.max(12, -levels[0] * pitch + largest + 3) };
}

function dotTip(rollout) {
  return [
    `group ${rollout.group.id}, rollout ${rollout.id}`,
    `reward ${number(rollout.reward)}, ${advantageWords(rollout)}`,
    `${plural(rollout.rows.length, "segment")}, ${fate(rollout)}`,
  ];
}

export function drawDot({ rollout, x, dy, r }, y, most) {
  const group = rollout.group;
  const kind = group.zero_variance ? "flat" : rollout.advantage === null ? "none" : "scaled";
  const dot = s("circle", {
    class: `dot ${kind} ${rollout.trained ? "trained" : "gone"}`,
    cx: x,
    cy: y + dy,
    r,
    role: "img",
    tabindex: -1,
    "aria-label": dotTip(rollout).join("; "),
    "data-rollout": rollout.id,
    "data-group": group.id,
    style: kind === "scaled" ? { fill: diverging(rollout.advantage, most) } : {},
  });
  return tip(dot, () => dotTip(rollout));
}
