// Rollouts by the length of their response: those in the loss, those cut short, those that left.
import { h, s } from "./dom.js";
import { binName, binsOf, drawHistogram } from "./histogram.js";
import { legend, rowSwatch, swatch } from "./legend.js";
import { isNumber, plural, short, sum } from "./numbers.js";

const ENDINGS = {
  kept: "in the loss",
  "kept short": "in the loss, truncated",
  masked: "not in the loss",
  "masked short": "not in the loss, truncated",
};

function endingOf(rollout) {
  const short = rollout.rows.some((row) => row.status === "truncated");
  return `${rollout.trained ? "kept" : "masked"}${short ? " short" : ""}`;
}

const lengthOf = (rollout) =>
  rollout.rows.every((row) => isNumber(row.tokens)) ? sum(rollout.rows.map((row) => row.tokens)) : null;

export function drawLengths({ model, step, width }) {
  const rollouts = model.groups.flatMap((group) => group.members);
  const items = rollouts
    .map((rollout) => ({ value: lengthOf(rollout), kind: endingOf(rollout) }))
    .filter((item) => item.value !== null);
  if (!items.length) return null;
  // Of all rollouts of the step, also where not all are drawn.
  const [mean, most] = ["mean", "max"].map((name) => step.numbers[`response_length/${name}`] ?? null);
  const bins = binsOf(items);
  const kinds = Object.keys(ENDINGS).filter((kind) => items.some((item) => item.kind === kind));
  const said = (bin) =>
    kinds.filter((kind) => bin.counts[kind]).map((kind) => `${plural(bin.counts[kind], "rollout")} ${ENDINGS[kind]}`);
  const line = (kind) => swatch(s("line", { class: kind, x1: 9, x2: 9, y1: 0, y2: 14 }));
  const without = rollouts.length - items.length;
  return [
    legend([
      ...kinds.map((kind) => [rowSwatch(kind), ENDINGS[kind], kind]),
      mean === null ? null : [line("mean"), `mean ${short(mean)} tokens`, "mean"],
      most === null ? null : [line("most"), `longest ${plural(most, "token")}`, "most"],
    ]),
    drawHistogram({
      bins,
      kinds,
      width,
      across: "tokens of the response",
      up: "rollouts",
      label: `Rollouts by length: ${bins.map((bin) => `${binName(bin)} tokens: ${said(bin).join(", ") || "none"}`).join("; ")}`,
      tipOf: (bin) => [`${binName(bin)} tokens`, ...said(bin)],
      marks: [
        [mean, "mean"],
        [most, "most"],
      ].filter(([at]) => at !== null && at < bins.at(-1).to + 1 && at >= bins[0].from),
    }),
    without
      ? h("p", { class: "note" }, `${plural(without, "rollout")} of unknown length ${without === 1 ? "is" : "are"} not drawn.`)
      : null,
  ];
}
