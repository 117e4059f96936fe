// A dot per rollout: its area by its segments, its colour by its advantage. Equal rollouts are one dot with their
// number; other dots that would overlap are stacked.
import { diverging } from "./colour.js";
import { s } from "./dom.js";
import { advantageWords, compareIds, fate } from "./model.js";
import { count, extent, number, plural, shortId } from "./numbers.js";
import { tip } from "./tip.js";

const DOT = 4.8;

export const radius = (segments) => Math.min(DOT * Math.sqrt(Math.max(1, segments)), 11);

const sameDot = (rollout) => [rollout.reward, rollout.rows.length, rollout.advantage, fate(rollout)].join();
const times = ({ same }) => (same.length > 1 ? `${count(same.length)} ×` : "");

// Levels 0, 1, −1, 2, … : each dot takes the one nearest to the line on which it touches no other. A number that the bar of the
// baseline would cross is behind the bar.
export function stack(rollouts, x, bar) {
  const equal = new Map();
  for (const rollout of [...rollouts].sort((a, b) => compareIds(a.id, b.id)))
    equal.set(sameDot(rollout), [...(equal.get(sameDot(rollout)) ?? []), rollout]);
  const dots = [...equal.values()]
    .map((same) => ({ rollout: same[0], same, x: x(same[0].reward), r: radius(same[0].rows.length) }))
    .sort((a, b) => a.x - b.x || compareIds(a.rollout.id, b.rollout.id));
  const ends = new Map();
  for (const dot of dots) {
    let k = 0;
    const level = () => (k % 2 ? (k + 1) / 2 : -k / 2);
    while ((ends.get(level()) ?? -Infinity) > dot.x - dot.r) k += 1;
    dot.level = level();
    const [from, room] = [dot.x + dot.r + 3, 8 * times(dot).length];
    dot.label = bar > from - 2 && bar < from + room ? bar + 4 : from;
    ends.set(dot.level, dot.label - 2.5 + room);
  }
  const levels = extent(dots.map((dot) => dot.level)) || [0, 0];
  const largest = Math.max(DOT, ...dots.map((dot) => dot.r));
  const pitch = Math.min(largest * 2.1, 60 / Math.max(1, levels[1] - levels[0]));
  for (const dot of dots) dot.dy = -dot.level * pitch;
  const above = Math.max(12, levels[1] * pitch + largest + 3);
  return { dots, above, height: above + Math.max(12, -levels[0] * pitch + largest + 3) };
}

function dotTip(rollout, same) {
  const ids = same.slice(0, 8).map(({ id }) => shortId(id)).join(", ");
  const named = same.length > 1 ? `${count(same.length)} rollouts: ${ids}${same.length > 8 ? ", …" : ""}` : `rollout ${rollout.id}`;
  return [
    `group ${rollout.group.id}, ${named}`,
    `reward ${number(rollout.reward)}, ${advantageWords(rollout)}`,
    `${plural(rollout.rows.length, "segment")}${same.length > 1 ? " each" : ""}, ${fate(rollout)}`,
  ];
}

// The dot, and the number beside it where it is of several rollouts.
export function drawDot(at, y, most) {
  const { rollout, same, x, dy, r, label } = at;
  const group = rollout.group;
  const kind = group.zero_variance ? "flat" : rollout.advantage === null ? "none" : "scaled";
  const dot = s("circle", {
    class: `dot ${kind} ${rollout.trained ? "trained" : "gone"}`,
    cx: x,
    cy: y + dy,
    r,
    role: "img",
    tabindex: -1,
    "aria-label": dotTip(rollout, same).join("; "),
    "data-rollout": same.map(({ id }) => id).join(" "),
    "data-group": group.id,
    style: kind === "scaled" ? { fill: diverging(rollout.advantage, most) } : {},
  });
  tip(dot, () => dotTip(rollout, same));
  return [dot, s("text", { class: "times", x: label, y: y + dy + 4, "aria-hidden": "true" }, times(at))];
}
