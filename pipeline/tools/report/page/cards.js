// What a group holds: its prompt, and its rollouts side by side, the lowest reward first.
import { h, lazily, message, moreButton, plainTable } from "./dom.js";
import { advantageWords, fate } from "./model.js";
import { NONE, count, isNumber, number, plural, sum } from "./numbers.js";
import { drawTokens, shadeLegend, shadePicker, shadesOf } from "./spans.js";

const FOLDED = 700; // characters, or so many lines, of a text that is folded at first
const LINES = 12;
let shade = null; // by which number tokens are coloured, of all groups

const ROW_COLUMNS = [
  ["row", (row) => String(row.row)],
  ["reward", (row) => number(row.reward)],
  ["rewards", (row) => (row.rewards ? row.rewards.map(number).join(", ") : NONE)],
  ["advantage", (row) => number(row.advantage)],
  ["tokens", (row) => count(row.tokens)],
  ["weight", (row) => number(row.weight)],
  ["status", (row) => row.status ?? NONE],
  ["in the loss", (row) => (row.reason ? `no: ${row.reason}` : "yes")],
  ["staleness", (row) => count(row.staleness)],
  ["minibatch", (row) => count(row.minibatch)],
  ["micro-batch", (row) => count(row.microbatch)],
  ["rank", (row) => count(row.rank)],
];

function rowTable(rollout) {
  const several = rollout.rows.some((row) => row.rewards);
  const columns = ROW_COLUMNS.filter(([name]) => several || name !== "rewards");
  return plainTable(
    `Rows of rollout ${rollout.id}`,
    columns.map(([name]) => name),
    rollout.rows.map((row) => columns.map(([, cell]) => cell(row))),
  );
}

const isLong = (text) => text.length > FOLDED || text.split("\n").length > LINES;

// A long text shows its beginning, and all of it when asked.
function foldable(element) {
  if (!isLong(element.textContent)) return [element];
  element.classList.add("folded");
  const button = moreButton("show all", () => {
    const folded = element.classList.toggle("folded");
    button.textContent = folded ? "show all" : "show less";
    button.setAttribute("aria-expanded", String(!folded));
  });
  button.setAttribute("aria-expanded", "false");
  return [element, button];
}

function excerptText(excerpt) {
  const gap = h("span", { class: "gap" }, ` … ${count(excerpt.missing)} characters left out … `);
  return [excerpt.start, excerpt.missing ? gap : null, excerpt.end];
}

// The prompt below a heading that has all of it is left out.
const isInHeading = ({ asked, label }) => !asked || (!asked.missing && asked.start.replace(/\s+/g, " ").trim() === label);

function drawPrompt(group) {
  const inHeading = isInHeading(group);
  if (!group.prompt && inHeading) return [];
  const asked = group.asked ? excerptText(group.asked) : [group.label];
  const line = h("p", { class: "prompt", hidden: inHeading }, asked);
  if (!group.prompt) return foldable(line);
  const button = moreButton("show the whole prompt", () => {
    const full = button.getAttribute("aria-expanded") !== "true";
    line.replaceChildren(...(full ? excerptText(group.prompt) : asked).filter(Boolean));
    line.hidden = !full && inHeading;
    button.setAttribute("aria-expanded", String(full));
    button.textContent = full ? "show the last turn alone" : "show the whole prompt";
  });
  button.setAttribute("aria-expanded", "false");
  return [line, button];
}

function drawResponse(row, shades, texts) {
  if (row.by_token) {
    const tokens = drawTokens(row.by_token, shade, shades.get(shade) ?? 0);
    const text = row.response ? h("p", { class: "text" }, excerptText(row.response)) : null;
    return [...(text ? foldable(text) : []), ...foldable(tokens)];
  }
  if (row.response) {
    if (!row.response.start) return [h("p", { class: "note" }, "An empty response.")];
    return foldable(h("p", { class: "text" }, excerptText(row.response)));
  }
  return texts ? [h("p", { class: "note" }, "This page has no room for the text: headrace view shows every row of the run.")] : [];
}

const advantagesDiffer = ({ rows }) => new Set(rows.map((row) => row.advantage).filter(isNumber)).size > 1;

// The ground truth, and what else the dump says of the row.
function drawBeside(row) {
  if (!row.beside) return null;
  const lines = Object.entries(row.beside).map(([name, value]) =>
    h("div", {}, h("dt", {}, name), h("dd", {}, typeof value === "boolean" ? String(value) : number(value))),
  );
  return h("dl", { class: "columns" }, lines);
}

function drawRollout(rollout, shades, texts) {
  const tokens = rollout.rows.map((row) => row.tokens);
  const statuses = [...new Set(rollout.rows.map((row) => row.status).filter(Boolean))];
  const facts = [
    `reward ${number(rollout.reward)}`,
    `${advantageWords(rollout)}${advantagesDiffer(rollout) ? " (mean of its rows)" : ""}`,
    tokens.some(isNumber) ? plural(sum(tokens), "token") : null,
    ...statuses,
  ];
  const several = rollout.rows.length > 1;
  const heading = (i) => h("h4", {}, `segment ${i + 1} of ${count(rollout.rows.length)}`);
  return h(
    "article",
    { class: rollout.trained ? "rollout" : "rollout gone", "aria-label": `rollout ${rollout.id}` },
    h("h3", { class: "name" }, `rollout ${rollout.id}`),
    h("p", { class: "facts" }, facts.filter(Boolean).join(" · ")),
    h("p", { class: rollout.trained ? "fate" : "fate gone" }, fate(rollout)),
    rollout.rows.map((row, i) => {
      const response = [...drawResponse(row, shades, texts), drawBeside(row)].filter(Boolean);
      return several && response.length ? [heading(i), ...response] : response;
    }).flat(),
    lazily(plural(rollout.rows.length, "row"), "rows", () => [rowTable(rollout)]),
  );
}

export function drawGroup(group, rollouts, texts) {
  if (!rollouts.length) return message("No row of this group is recorded.");
  const shades = shadesOf(rollouts);
  if (!shades.has(shade)) shade = [...shades.keys()][0] ?? null;
  const lowest = rollouts.toSorted((a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity));
  const box = h("div", { class: "rollouts" });
  const change = (name) => {
    shade = name;
    box.replaceChildren(...drawGroup(group, rollouts, texts));
    box.querySelector(".shade select").focus();
  };
  box.append(
    ...[
      ...(group.asked || group.label ? drawPrompt(group) : []),
      texts ? null : h("p", { class: "note" }, "The batch has tokens and no text, and no tokenizer to decode them."),
      shade === null ? null : shadeLegend(shade, shades.get(shade), rollouts),
      shadePicker([...shades.keys()], shade, change),
      h("div", { class: "cards" }, lowest.map((rollout) => drawRollout(rollout, shades, texts))),
    ].filter(Boolean),
  );
  return [box];
}
