// A waterfall: what is still in the loss after each stage that took something out, and what left, and where.
import { h, message, s } from "./dom.js";
import { legend, rowSwatch } from "./legend.js";
import { count, isNumber, andList } from "./numbers.js";
import { UNITS } from "./metrics.js";

const ACTIONS = {
  dropped: "dropped: gone from the batch",
  masked: "masked: in the batch, not in the loss",
  excluded: "excluded: out of the statistics too",
  carried: "carried over to a later step",
};

// Whatever else took a row away, the row is gone.
const actionOf = (out) => (Object.hasOwn(ACTIONS, out.action) ? out.action : "dropped");

function bar(unit, whole, from, size, kind) {
  if (!whole || !isNumber(size)) return null;
  const start = Math.min(Math.max(from / whole, 0), 1);
  const width = Math.min(size / whole, 1 - start);
  return s(
    "svg",
    { class: "bar", "aria-hidden": "true" },
    s("rect", { class: "track", width: "100%", height: "100%" }),
    size
      ? s("rect", {
          class: `left ${kind}`,
          x: `${start * 100}%`,
          width: `${Math.max(width * 100, 0.4)}%`,
          height: "100%",
        })
      : null,
  );
}

// On a narrow page the unit stands after its number.
const unitOf = (unit, n) => ` ${n === 1 ? unit.replace(/(?<=ch)es$|s$/, "") : unit}`;

// A number, or "parts of" one where only some of its rows left.
const withUnit = (unit, n, before = "") => [
  h("span", { class: "number" }, `${before}${count(n)}`),
  h("span", { class: "unit" }, unitOf(unit, n)),
];

function funnelRow(name, cells, kind) {
  const head = h("th", { scope: "row", role: "rowheader" }, name);
  return h(
    "tr",
    { class: kind, role: "row" },
    head,
    cells.map(([unit, said, drawing]) => h("td", { role: "cell", "data-unit": unit }, said, drawing)),
  );
}

function leftCell(unit, out, whole, before) {
  const parts = { rollouts: out.rollouts_in_part, groups: out.groups_in_part }[unit] || 0;
  const some = parts ? h("span", { class: "parts" }, withUnit(unit, parts, "parts of ")) : null;
  const size = out[unit];
  const said = size || !parts ? withUnit(unit, size, size ? "−" : "") : [];
  return [unit, [...said, some], size ? bar(unit, whole, before - size, size, actionOf(out)) : null];
}

function stageRows(stage, before, whole) {
  const rows = [];
  const inside = Object.fromEntries(UNITS.map((unit) => [unit, before[unit] || 0]));
  for (const out of stage.out) {
    const cells = UNITS.map((unit) => leftCell(unit, out, whole[unit], inside[unit]));
    for (const unit of UNITS) inside[unit] -= out[unit] || 0;
    const why = [h("span", { class: "why" }, String(out.reason).replaceAll("_", " ")), `, ${out.action}`];
    rows.push(funnelRow(why, cells, "out"));
  }
  const kept = (unit) => [
    unit,
    withUnit(unit, stage[unit]),
    bar(unit, whole[unit], 0, stage[unit], "kept"),
  ];
  return [funnelRow(stage.name, UNITS.map(kept), "stage"), ...rows];
}

// A stage that took rows out, or changed what is counted of those that stay.
const didSomething = (stage, before) =>
  stage.out.length > 0 || UNITS.some((unit) => stage[unit] !== before[unit]);

export function drawFunnel({ page, step }) {
  const stages = step.funnel;
  if (!stages.length) return message("No stage was recorded at this step, so there is nothing to count.");
  const whole = Object.fromEntries(
    UNITS.map((unit) => [unit, Math.max(0, ...stages.map((stage) => stage[unit] || 0))]),
  );
  const head = h(
    "thead",
    { role: "rowgroup" },
    h(
      "tr",
      { role: "row" },
      h("th", { scope: "col", role: "columnheader" }, "stage"),
      UNITS.map((unit) => h("th", { scope: "col", role: "columnheader" }, unit)),
    ),
  );
  const busy = stages.filter((stage, k) => !k || didSomething(stage, stages[k - 1]));
  const idle = page.recipe.map((stage) => stage.name).filter((name) => !busy.some((stage) => stage.name === name));
  const body = h(
    "tbody",
    { role: "rowgroup" },
    busy.flatMap((stage, k) => stageRows(stage, busy[k - 1] || stage, whole)),
  );
  const used = new Set(stages.flatMap((stage) => stage.out.map(actionOf)));
  const marks = ["kept", ...Object.keys(ACTIONS).filter((action) => used.has(action))].map((kind) => [
    rowSwatch(kind),
    kind === "kept" ? "in the loss" : ACTIONS[kind],
    kind,
  ]);
  const table = h(
    "table",
    { class: "funnel", role: "table", "aria-label": "Rows, rollouts, groups and tokens by stage" },
    head,
    body,
  );
  return [
    whole.rows ? null : message("No rows were collected at this step."),
    whole.rows && !stages.at(-1).rows
      ? message("Every row left before the loss: nothing trains at this step.")
      : null,
    legend(marks),
    table,
    idle.length ? h("p", { class: "note idle-stages" }, `${andList(idle)} took nothing out.`) : null,
  ].flat();
}
