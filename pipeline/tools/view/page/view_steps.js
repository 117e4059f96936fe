// The list of steps, of one run or of two beside one another.
import { byId, h } from "./dom.js";
import { described } from "./metrics.js";
import { NONE, count, inPercent, isNumber, number } from "./numbers.js";
import { ask, link, reasonName } from "./view_api.js";
import { rewardChart } from "./view_chart.js";

// What is shown of each run, and the words that explain it.
const NUMBERS = [
  ["reward", "mean reward", (line) => number(line.reward)],
  ["flat", "groups with equal rewards", (line) => inPercent(line.flat)],
  ["trained", "rows in the loss", (line) => (isNumber(line.trained) ? `${count(line.trained)} of ${count(line.rows)}` : NONE)],
];
const MORE = [
  ["groups", "groups", (line) => count(line.groups)],
  ["length", "mean length (tokens)", (line) => (isNumber(line.characters) ? `${number(line.characters)} characters` : number(line.length))],
  ["truncated", "truncated rollouts", (line) => inPercent(line.truncated)],
  ["left", "rows not in the loss, by reason", (line) => reasons(line.left)],
];

const reasons = (left) =>
  Object.entries(left)
    .sort((a, b) => b[1] - a[1])
    .map(([reason, rows]) => `${count(rows)} ${reasonName(reason)}`)
    .join("; ") || "none";

// The lines of a run by step.
export function linesOf({ steps }) {
  const names = Object.keys(steps);
  return new Map((steps.step ?? []).map((step, i) => [step, Object.fromEntries(names.map((name) => [name, steps[name][i]]))]));
}

export function drawSteps(runs, lines) {
  const two = runs.length > 1;
  const isKnown = ([name]) => name === "reward" || lines.some((of) => [...of.values()].some((line) => line[name] !== null));
  const shown = (two ? NUMBERS : [...NUMBERS, ...MORE]).filter(isKnown);
  const failed = runs.map((run) => new Map(run.failed));
  const known = [...lines, ...failed].flatMap((of) => [...of.keys()]);
  // A failed step may have no number: it comes last.
  const all = [...new Set(known)].sort((a, b) => (a ?? Infinity) - (b ?? Infinity));
  const stepName = (step) => {
    if (step === null) return "no number";
    return lines.some((of) => of.has(step)) ? h("a", { href: link({ view: "steps", step }) }, count(step)) : count(step);
  };
  const cell = (step, [name, , value], i, first) => {
    const of = { class: `of-run${i} ${name}` };
    if (lines[i].has(step) && !failed[i].has(step)) return h("td", of, value(lines[i].get(step)));
    if (!failed[i].has(step)) return h("td", of, "not in this run");
    if (!first) return two ? h("td", of, NONE) : null;
    return h("td", { class: `of-run${i} failed`, colspan: two ? 1 : shown.length }, `failed: ${failed[i].get(step)}`);
  };
  const nameOf = ({ name }) => h("span", { class: "run" }, name);
  const heads = shown.flatMap(([name, words]) =>
    runs.map((run, i) =>
      h("th", { scope: "col", class: `of-run${i} ${name}` }, two ? [`${words}, `, nameOf(run)] : words),
    ),
  );
  const body = all.map((step) =>
    h(
      "tr",
      { "data-step": step },
      h("th", { scope: "row" }, stepName(step)),
      shown.flatMap((column, at) => runs.map((_, i) => cell(step, column, i, at === 0))),
      two ? h("td", { class: "difference" }, difference(lines, step)) : null,
    ),
  );
  const last = two ? h("th", { scope: "col" }, ["mean reward, ", nameOf(runs[1]), " − ", nameOf(runs[0])]) : null;
  const head = h("tr", {}, h("th", { scope: "col" }, "step"), heads, last);
  const table = h("table", { class: two ? "plain two" : "plain" }, h("thead", {}, head), h("tbody", {}, body));
  const box = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "List of steps" }, table);
  box.addEventListener("scroll", () => box.classList.toggle("above", box.scrollTop > 0));
  byId("steps").querySelector(".body").replaceChildren(box);
}

function difference(lines, step) {
  const [a, b] = lines.map((of) => of.get(step)?.reward);
  return isNumber(a) && isNumber(b) ? `${b > a ? "+" : ""}${number(b - a)}` : NONE;
}

const asked = new Map(); // by name, the values of a number that the list does not have

// A number of all steps, for each run [step, value] pairs.
async function valuesOf(lines, metric) {
  if (metric === REWARD) return lines.map((of) => [...of.values()].map((line) => [line.step, line.reward]));
  if (!asked.has(metric)) asked.set(metric, (await ask("metric", { name: metric })).runs);
  return asked.get(metric);
}

export const REWARD = "reward/all/mean";
let latest = 0; // a number that comes late does not replace a later one

async function drawChart(chart, runs, lines, { number: step, metric }, choose) {
  const mine = (latest += 1);
  const { unit, title } = described(metric);
  const by = unit === "%" ? 100 : 1;
  let drawn;
  try {
    drawn = rewardChart({
      names: runs.map((run) => run.name),
      lines: (await valuesOf(lines, metric)).map((of) => of.map(([at, value]) => [at, isNumber(value) ? by * value : null])),
      chosen: step,
      width: Math.max(chart.clientWidth, 260),
      choose,
      what: unit ? `${title} (${unit})` : title,
    });
  } catch (error) {
    drawn = h("p", { class: "empty", role: "alert" }, error.message);
  }
  if (mine === latest) chart.replaceChildren(...(drawn ? [drawn] : []));
}

// The step that is chosen, in the list and in the chart.
export function markStep(runs, lines, state, choose) {
  const step = state.number;
  const section = byId("steps");
  for (const row of section.querySelectorAll("tbody tr")) {
    const here = row.dataset.step === String(step);
    row.classList.toggle("chosen", here);
    if (here) row.setAttribute("aria-current", "true");
    else row.removeAttribute("aria-current");
    if (here) scrollTo(section.querySelector(".scroll"), row);
  }
  drawChart(section.querySelector(".chart"), runs, lines, state, choose);
}

// Scroll the box only, not the page.
function scrollTo(box, row) {
  const [outer, inner] = [box.getBoundingClientRect(), row.getBoundingClientRect()];
  if (inner.top < outer.top + 40 || inner.bottom > outer.bottom)
    box.scrollTop += inner.top - outer.top - (outer.height - inner.height) / 2;
}
