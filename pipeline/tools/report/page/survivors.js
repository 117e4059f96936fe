// Which groups were trained and lost, by how long they took, their length and their reward.
import { h, plainTable } from "./dom.js";

export function drawSurvivors({ step }) {
  if (!step.survivors.length) return null;
  return step.survivors.flatMap((tenths) => [
    plainTable(`Groups by ${tenths.name}`, tenths.head, tenths.lines),
    tenths.note ? h("p", { class: "note" }, tenths.note) : null,
  ]);
}
