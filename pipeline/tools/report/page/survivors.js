// Which groups a stream has trained and lost, by how long they took.
import { h, plainTable } from "./dom.js";

export function drawSurvivors({ step }) {
  if (!step.survivors.length) return null;
  return step.survivors.flatMap(({ name, head, lines, note }) => [
    plainTable(`Groups by ${name}`, head, lines),
    note ? h("p", { class: "note" }, note) : null,
  ]);
}
