// A waterfall: what is still in the loss after each stage, and the pieces that left, where they were.
import { UNITS } from "./data.js";
import { h, message, s } from "./dom.js";
import { legend, rowSwatch } from "./legend.js";
import { count, isNumber, sum } from "./numbers.js";

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
const unitOf = (unit, text) => ` ${/^−?1$/.test(text) ? unit.slice(0, -1) : unit}`;

function funnelRow(name, cells, kind) {
  const head = h("th", { scope: "row", role: "rowheader" }, name);
  return h(
    "tr",
    { class: kind, role: "row" },
    head,
    cells.map(([unit, text, drawing]) =>
      h(
        "td",
        { role: "cell", "data-unit": unit },
        h("span", { class: "number" }, text),
        h("span", { class: "unit" }, unitOf(unit, text)),
        drawing,
      ),
    ),
  );
}

function stageRows(stage, before, whole) {
  const cells = UNITS.map((unit) => [
    unit,
    count(stage[unit]),
    bar(unit, whole[unit], 0, stage[unit], "kept"),
  ]);
  const rows = [funnelRow(stage.name, cells, "stage")];
  const gone = Object.fromEntries(UNITS.map((unit) => [unit, stage[unit] || 0]));
  // Rows that leave take their rollout and group along only where none of its rows stays.
  const wholly = (unit) => sum(stage.out.map((out) => out[unit])) <= (before[unit] || 0) - (stage[unit] || 0);
  for (const out of stage.out) {
    const action = actionOf(out);
    const pieces = UNITS.map((unit) => {
      const left = wholly(unit);
      const piece = left && out[unit] ? bar(unit, whole[unit], gone[unit], out[unit], action) : null;
      gone[unit] += out[unit] || 0;
      return [unit, `${left && out[unit] ? "−" : ""}${count(out[unit])}`, piece];
    });
    const why = [h("span", { class: "why" }, String(out.reason).replaceAll("_", " ")), `, ${out.action}`];
    rows.push(funnelRow(why, pieces, "out"));
  }
  return rows;
}

export function drawFunnel({ step }) {
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
  const body = h(
    "tbody",
    { role: "rowgroup" },
    stages.flatMap((stage, k) => stageRows(stage, stages[k - 1] || whole, whole)),
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
  ].flat();
}
