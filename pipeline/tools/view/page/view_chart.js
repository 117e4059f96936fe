// A number by step, the mean reward say: a line for each run, and a mark at the step that is chosen.
import { h, s } from "./dom.js";
import { count, extent, isNumber, isOne, number, scale, ticks } from "./numbers.js";

const HEIGHT = 150;
const MARGIN = { left: 46, right: 12, top: 10, bottom: 22 };

// The points of a line, cut where a value is missing.
function paths(points, x, y) {
  const pieces = [[]];
  for (const [step, value] of points) {
    if (isNumber(value)) pieces.at(-1).push(`${x(step).toFixed(1)},${y(value).toFixed(1)}`);
    else pieces.push([]);
  }
  return pieces.filter((piece) => piece.length);
}

// `lines`: for each run its [step, value] pairs. `choose`: what a click on a step does. `what`: name of the value. `dots`: mark
// each value, where steps are missing in between.
export function rewardChart({ names, lines, chosen, width, choose, what = "mean reward", dots = false }) {
  const rewards = extent(lines.flat().map(([, value]) => value));
  const steps = extent(lines.flat().map(([step]) => step));
  if (!rewards || steps[0] === steps[1]) return null;
  const x = scale(steps, [MARGIN.left, width - MARGIN.right]);
  const y = scale(rewards, [HEIGHT - MARGIN.bottom, MARGIN.top]);
  const wide = Math.max(2, Math.floor(width / 80));
  const svg = s(
    "svg",
    { class: "rewards", width, height: HEIGHT, role: "img", "aria-label": `${what[0].toUpperCase()}${what.slice(1)} by step: ${spoken(names, lines)}` },
    (isOne(rewards) ? [rewards[0]] : ticks(y.domain, 5)).flatMap((value) => [
      s("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) }),
      s("text", { class: "end", x: MARGIN.left - 7, y: y(value) + 4 }, number(value)),
    ]),
    ticks(steps, wide)
      .filter(Number.isInteger)
      .map((step) => s("text", { x: Math.min(x(step), width - 24), y: HEIGHT - 5 }, count(step))),
    lines.flatMap((points, run) =>
      paths(points, x, y).flatMap((piece) => [
        piece.length > 1 ? s("polyline", { class: `curve run${run}`, points: piece.join(" ") }) : null,
        ...(dots || piece.length === 1 ? piece : []).map((point) =>
          s("circle", { class: `run${run}`, cx: point.split(",")[0], cy: point.split(",")[1], r: dots ? 3 : 2.5 }),
        ),
      ]),
    ),
    isNumber(chosen) ? s("line", { class: "now", x1: x(chosen), x2: x(chosen), y1: 0, y2: HEIGHT - MARGIN.bottom }) : null,
  );
  if (choose) {
    svg.classList.add("clickable");
    svg.addEventListener("click", (e) => choose(nearest(lines, x, e.clientX - svg.getBoundingClientRect().left)));
  }
  const swatch = (run) =>
    s("svg", { width: 22, height: 10, "aria-hidden": "true" }, s("line", { class: `curve run${run}`, x1: 0, x2: 22, y1: 5, y2: 5 }));
  const legend = names.map((name, run) => h("li", {}, swatch(run), names.length > 1 ? `${what}, ${name}` : what));
  return h("figure", {}, h("ul", { class: "legend" }, legend), svg);
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
