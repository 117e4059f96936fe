// A number by step, the mean reward say: a line for each run, and a mark at the step that is chosen. Of one prompt also a
// dot for each rollout.
import { diverging } from "./colour.js";
import { h, s } from "./dom.js";
import { count, extent, isNumber, isOne, number, scale, ticks } from "./numbers.js";

const HEIGHT = 150;
const TALL = 230; // with dots and the names of the axes
const MARGIN = { left: 46, right: 12, top: 10, bottom: 22 };
const DOT = 4.2;

// The points of a line, cut where a value is missing.
function paths(points, x, y) {
  const pieces = [[]];
  for (const [step, value] of points) {
    if (isNumber(value)) pieces.at(-1).push(`${x(step).toFixed(1)},${y(value).toFixed(1)}`);
    else pieces.push([]);
  }
  return pieces.filter((piece) => piece.length);
}

// `lines`: for each run its [step, value] pairs. `choose`: what a click on a step does. `what`: name of the value. `marks`: for
// each run [step, reward, advantage] of single rollouts.
export function rewardChart({ names, lines, chosen, width, choose, what = "mean reward", marks = null }) {
  const known = lines.flat().map(([, value]) => value).concat((marks ?? []).flat().map(([, reward]) => reward));
  const rewards = extent(known);
  const steps = extent(lines.flat().map(([step]) => step));
  if (!rewards || (steps[0] === steps[1] && !marks)) return null;
  const height = marks ? TALL : HEIGHT;
  const margin = marks ? { ...MARGIN, left: 60, right: 24, top: 22, bottom: 40 } : MARGIN;
  const inner = marks ? 34 : 0; // room for the dots beside the first and the last step
  const x = scale(steps, [margin.left + inner, width - margin.right - inner]);
  const y = scale(rewards, [height - margin.bottom, margin.top]);
  const wide = Math.max(2, Math.floor(width / 80));
  const most = Math.max(0, ...(marks ?? []).flat().map(([, , advantage]) => Math.abs(advantage ?? 0)));
  const svg = s(
    "svg",
    { class: "rewards", width, height, role: "img", "aria-label": `${what[0].toUpperCase()}${what.slice(1)} by step: ${spoken(names, lines)}` },
    (isOne(rewards) ? [rewards[0]] : ticks(y.domain, 5)).flatMap((value) => [
      s("line", { class: "grid", x1: margin.left, x2: width - margin.right, y1: y(value), y2: y(value) }),
      s("text", { class: "end", x: margin.left - 7, y: y(value) + 4 }, number(value)),
    ]),
    (steps[0] === steps[1] ? [steps[0]] : ticks(steps, wide).filter(Number.isInteger)).map((step) =>
      s("text", { x: Math.min(x(step), width - 24), y: height - margin.bottom + 17 }, count(step)),
    ),
    marks
      ? [
          s("line", { class: "axis", x1: margin.left, x2: width - margin.right, y1: height - margin.bottom + 4, y2: height - margin.bottom + 4 }),
          s("line", { class: "axis", x1: margin.left, x2: margin.left, y1: margin.top - 6, y2: height - margin.bottom + 4 }),
          s("text", { class: "title", x: (margin.left + width) / 2, y: height - 4 }, "step"),
          s("text", { class: "title start", x: 4, y: 11 }, "reward"),
        ]
      : null,
    lines.flatMap((points, run) =>
      paths(points, x, y).flatMap((piece) => [
        piece.length > 1 ? s("polyline", { class: `curve run${run}`, points: piece.join(" ") }) : null,
        piece.length === 1 && !marks
          ? s("circle", { class: `run${run}`, cx: piece[0].split(",")[0], cy: piece[0].split(",")[1], r: 2.5 })
          : null,
      ]),
    ),
    (marks ?? []).flatMap((of) => drawMarks(of, x, y, most, pitchOf(lines, x))),
    isNumber(chosen) ? s("line", { class: "now", x1: x(chosen), x2: x(chosen), y1: 0, y2: height - margin.bottom }) : null,
  );
  if (choose) {
    svg.classList.add("clickable");
    svg.addEventListener("click", (e) => choose(nearest(lines, x, e.clientX - svg.getBoundingClientRect().left)));
  }
  const swatch = (run) =>
    s("svg", { width: 22, height: 10, "aria-hidden": "true" }, s("line", { class: `curve run${run}`, x1: 0, x2: 22, y1: 5, y2: 5 }));
  const legend = names.map((name, run) => h("li", {}, swatch(run), names.length > 1 ? `${what}, ${name}` : what));
  if (marks && most)
    legend.push(
      h(
        "li",
        {},
        s("svg", { width: 96, height: 12, "aria-hidden": "true" }, s("rect", { class: "ramp", x: 0.5, y: 0.5, width: 95, height: 11, rx: 3 })),
        `a dot is a rollout, its colour the advantage: −${number(most)} to ${number(most)}`,
      ),
    );
  return h("figure", {}, h("ul", { class: "legend" }, legend), svg);
}

// The least distance between two steps.
function pitchOf(lines, x) {
  const places = [...new Set(lines.flat().map(([step]) => x(step)))].sort((a, b) => a - b);
  return Math.min(60, ...places.slice(1).map((place, i) => place - places[i]));
}

// A dot for each rollout at its reward, coloured by its advantage; rollouts of equal reward are beside one another.
function drawMarks(marks, x, y, most, pitch) {
  const equal = new Map();
  for (const mark of marks.filter(([, reward]) => isNumber(reward))) {
    const place = `${mark[0]} ${mark[1]}`;
    equal.set(place, [...(equal.get(place) ?? []), mark]);
  }
  return [...equal.values()].flatMap((same) => {
    const gap = Math.min(2 * DOT + 1.5, (0.8 * pitch) / same.length);
    return same.map(([step, reward, advantage], i) =>
      s(
        "circle",
        {
          class: isNumber(advantage) ? "dot scaled" : "dot none",
          cx: x(step) + (i - (same.length - 1) / 2) * gap,
          cy: y(reward),
          r: DOT,
          style: isNumber(advantage) ? { fill: diverging(advantage, most) } : {},
        },
        s("title", {}, `step ${count(step)}: reward ${number(reward)}, advantage ${number(advantage)}`),
      ),
    );
  });
}

function nearest(lines, x, at) {
  const steps = lines.flat().map(([step]) => step);
  return steps.reduce((best, step) => (Math.abs(x(step) - at) < Math.abs(x(best) - at) ? step : best), steps[0]);
}

const spoken = (names, lines) =>
  lines
    .map((points, run) => {
      const known = points.filter(([, value]) => isNumber(value));
      if (!known.length) return `${names[run]} has none`;
      const [first, last] = [known[0], known.at(-1)];
      return `${names[run]} from ${number(first[1])} at step ${first[0]} to ${number(last[1])} at step ${last[0]}`;
    })
    .join("; ");
