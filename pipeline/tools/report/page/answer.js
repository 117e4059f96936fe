// The answer first: a verdict in words, the numbers by which one sees it, and what to look at.
import { curveOf, curvesOf, metricsOf, stepsDrawn } from "./curves.js";
import { byId, h, s } from "./dom.js";
import { described } from "./metrics.js";
import { andList, count, extent, inPercent, isNumber, plural, short } from "./numbers.js";

const TILES = [
  { metric: /^reward\/all\/mean$/, unit: "over all rollouts", text: short },
  { metric: /^groups\/informative$/, unit: "rewards differ", text: inPercent },
  { metric: /^response_length\/mean$/, unit: "tokens per rollout", text: short },
  { metric: /^response_characters\/mean$/, unit: "characters per rollout", text: short },
  { metric: /^rollouts\/truncated$/, unit: "of all rollouts", text: inPercent },
  { metric: /\/ess_token$/, unit: "of the tokens", text: inPercent },
  { metric: /^staleness\/mean$/, unit: "policy versions behind", text: short },
];
const GAP = 12;
const TILE = 176; // as narrow as a tile is, where several fit
const PADDING = 10;
const GUTTER = 46;

// The ends of the scale of values, on the right of a curve.
function valueAxis(low, high, text, width, height) {
  const each = (value, y) => s("text", { class: "end", x: width - 1, y }, text(value));
  return low === high ? [each(low, height / 2 + 4)] : [each(high, 12), each(low, height - 3)];
}

function drawTile({ unit, text }, name, page, step, width) {
  const [lines, steps] = [curvesOf(page, name), page.curve_steps];
  const range = extent(lines.flat());
  const head = [
    h("h2", {}, described(name).title, h("span", { class: "of-step" }, `step ${count(step.step)}${page.versus ? ` under ${page.versus[0]}` : ""}`)),
    h("p", { class: "big" }, text(step.numbers[name]), " ", h("span", { class: "note" }, unit)),
  ];
  if (!range || steps.length < 2) return h("div", { class: "tile" }, head);
  const height = 46;
  const gutter = Math.max(GUTTER, 7 * Math.max(...range.map((end) => text(end).length)) + 12);
  const drawing = curveOf(name, lines, steps, step.step, { width: width - 2 * PADDING - 2, height, gutter });
  drawing.append(...valueAxis(...range, text, width - 2 * PADDING - 2, height));
  return h("div", { class: "tile" }, head, drawing, h("p", { class: "range" }, `curve: ${stepsDrawn(page)}${lines.length > 1 ? `; dashed: ${page.versus[1]}` : ""}`));
}

// Of two recipes, what differs: the rollouts are the same, and so are most numbers.
const APART = [
  { metric: /^versus\/gradient_moved$/, unit: "to other groups", text: inPercent },
  { metric: /^versus\/gradient_cosine$/, unit: "1: equal", text: short },
];

export function drawAnswer(view) {
  const { page } = view;
  return drawTiles(page.versus ? [...APART, ...TILES] : TILES, view);
}

// A tile for each number that the page has, at the step shown, with its curve over the steps.
export function drawTiles(kinds, { page, step, width }) {
  const names = [...new Set([...metricsOf(page.curves), ...metricsOf(step.numbers), ...(page.unsaid ?? [])])];
  const tiles = kinds.map((tile) => [tile, names.find((name) => tile.metric.test(name))]);
  const isAbsent = ([, name]) => page.unsaid?.includes(name) && !isNumber(step.numbers[name]);
  const absent = tiles.filter(isAbsent).map(([, name]) => described(name).title);
  const known = tiles.filter((tile) => tile[1] !== undefined && !isAbsent(tile));
  const fit = Math.max(1, Math.floor((width + GAP) / (TILE + GAP)));
  const most = width < 2 * TILE ? 2 : fit;
  const columns = Math.ceil(known.length / Math.ceil(known.length / most)); // as many in each line, or nearly
  const each = (width - GAP * (columns - 1)) / columns;
  const style = { "grid-template-columns": `repeat(${columns}, minmax(0, 1fr))` };
  return [
    known.length ? h("div", { class: "tiles", style }, known.map(([tile, name]) => drawTile(tile, name, page, step, each))) : null,
    absent.length ? h("p", { class: "note" }, `Not in this dump: ${andList(absent)}.`) : null,
  ];
}

// Text in which `words between these` are code.
const withCode = (text) => text.split("`").map((part, i) => (i % 2 ? h("code", {}, part) : part));

function adviceLine(page, verdict, advisory, first) {
  const symptom = (page.symptoms ?? []).find((each) => each.name === advisory.name);
  if (!symptom) return h("li", {}, advisory.text);
  // What the verdict has said already is not said again.
  const said = verdict.startsWith(advisory.text.replace(/\.$/, ""));
  return h(
    "li",
    {},
    h(
      "details",
      { id: `symptom-${symptom.name}` },
      h("summary", {}, said ? `${symptom.title}.` : advisory.text, " ", h("span", { class: "note" }, `what to do${first}`)),
      said ? null : h("h3", {}, symptom.title),
      h("p", {}, withCode(symptom.means)),
      symptom.remedies.length
        ? h("ul", {}, symptom.remedies.map((remedy) => h("li", {}, withCode(remedy.text), remedy.overrides && [": ", h("code", {}, remedy.overrides)])))
        : null,
      h("p", { class: "note" }, "The rule: ", withCode(symptom.shows)),
    ),
  );
}

// Above all else: which steps failed, which opens to the reasons, and how two recipes differ. What else is to be
// known of a dump is below the answer.
export function sayNotices(page) {
  const failed = page.failed;
  const lines = page.difference ? [h("li", {}, withCode(page.difference))] : [];
  if (failed) {
    const summary = h("summary", {}, withCode(failed.said), " ", h("span", { class: "note" }, "why"));
    const reasons = failed.reasons.map((each) => h("p", {}, withCode(each)));
    lines.unshift(h("li", { class: "failed" }, h("details", { open: reasons.length === 1 }, summary, reasons)));
  }
  byId("notices").replaceChildren(...lines);
  byId("notes").replaceChildren(...(page.notices ?? []).map((text) => h("li", {}, withCode(text))));
  for (const name of ["notices", "notes"]) byId(name).hidden = !byId(name).childElementCount;
}

export function sayAdvice(page, step) {
  byId("verdict").textContent = step.verdict;
  byId("verdict").hidden = !step.verdict;
  const first = (at) => (at === 0 && step.advisories.length > 1 ? " first" : "");
  const lines = step.advisories.map((advisory, at) => adviceLine(page, step.verdict, advisory, first(at)));
  byId("advisories").hidden = !lines.length;
  byId("advisories").replaceChildren(...lines);
  byId("unchecked").hidden = !step.unchecked.length;
  byId("unchecked").querySelector("summary").textContent =
    `Not checked, for lack of data: ${plural(step.unchecked.length, "symptom")}`;
  byId("unchecked")
    .querySelector("ul")
    .replaceChildren(...step.unchecked.map((text) => h("li", {}, withCode(text))));
}
