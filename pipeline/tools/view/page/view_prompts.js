// Prompts: a list of all, and one of them over the steps of a run, or of two.
import { byId, h, message } from "./dom.js";
import { NONE, andList, count, extent, isNumber, number, plural } from "./numbers.js";
import { ask, columnName, link, rangeOf } from "./view_api.js";
import { rewardChart } from "./view_chart.js";
import { rowsPanel } from "./view_rows.js";

const COUNT = 50; // prompts at a time
let latest = 0; // an answer that comes late does not replace a later one

export async function drawPrompts(runs, state, same, offset = 0) {
  const body = byId("prompts").querySelector(".body");
  const mine = (latest += 1);
  if (!same) {
    body.replaceChildren(...message("These rows have no column by which a prompt is known again in another step."));
    return;
  }
  if (!body.childElementCount) body.replaceChildren(...message("Reading the prompts of all steps…"));
  let answer;
  try {
    answer = await ask("prompts", { text: state.search, order: state.by, offset, count: COUNT });
  } catch (error) {
    if (mine === latest) body.replaceChildren(h("p", { class: "empty", role: "alert" }, error.message));
    return;
  }
  if (mine !== latest) return;
  const two = runs.length > 1;
  const words = runs.map((run) => ["steps", "mean reward", "first → last step"].map((word) => (two ? `${word}, ${run.name}` : word)));
  const lines = answer.prompts.map((prompt) =>
    h(
      "tr",
      { "data-key": prompt.key },
      h(
        "th",
        { scope: "row", class: "text" },
        h("a", { href: link({ view: "prompt", prompt: prompt.key }) }, prompt.label || "(no text)"),
      ),
      prompt.runs.flatMap((of, i) =>
        of
          ? [
              h("td", { class: `of-run${i}`, "data-label": words[i][0] }, count(of.steps)),
              h("td", { class: `of-run${i} reward`, "data-label": words[i][1] }, number(of.reward)),
              h("td", { class: `of-run${i}`, "data-label": words[i][2] }, `${number(of.first[1])} → ${number(of.last[1])}`),
            ]
          : [h("td", { colspan: 3, class: `of-run${i}`, "data-label": words[i][0] }, "not in this run")],
      ),
    ),
  );
  const go = (text, to, off) =>
    h("button", { type: "button", disabled: off, on: { click: () => drawPrompts(runs, state, same, to) } }, text);
  const pager = h(
    "div",
    { class: "pager" },
    h("output", {}, rangeOf(offset, lines.length, answer.found, "prompts")),
    answer.found > COUNT
      ? [go("previous prompts", Math.max(0, offset - COUNT), offset === 0), go("next prompts", offset + COUNT, offset + COUNT >= answer.found)]
      : null,
  );
  const head = h("tr", {}, h("th", { scope: "col" }, columnName(same)), words.flat().map((word) => h("th", { scope: "col" }, word)));
  const table = h("table", { class: "plain as-cards prompts" }, h("thead", {}, head), h("tbody", {}, lines));
  const box = h("div", { class: "across", tabindex: 0, role: "region", "aria-label": "List of prompts" }, table);
  body.replaceChildren(h("div", { class: "panel" }, pager, box));
}

// Draws the chart of the shown prompt again, at the present width.
export let resizePrompt = () => {};

export async function drawPrompt(runs, state, same) {
  const body = byId("prompt").querySelector(".body");
  const mine = (latest += 1);
  body.replaceChildren(...message("Looking for this prompt in all steps…"));
  let answer;
  try {
    answer = await ask("prompt", { key: state.prompt });
  } catch (error) {
    if (mine === latest) body.replaceChildren(h("p", { class: "empty", role: "alert" }, error.message));
    return;
  }
  if (mine !== latest) return;
  const of = answer.runs.map((steps) => new Map(steps.map((line) => [line[0], line])));
  const all = [...new Set(of.flatMap((lines) => [...lines.keys()]))].sort((a, b) => a - b);
  const text = h("p", { class: "text", tabindex: answer.text.length > 1200 ? 0 : null }, answer.text || "(empty)");
  const names = runs.map((run) => run.name);
  const lines = of.map((steps) => [...steps.values()].map(([step, , , reward]) => [step, reward]));
  const draw = () => rewardChart({ names, lines, chosen: null, width: Math.max(body.clientWidth, 260), marks: answer.dots });
  let chart = draw();
  resizePrompt = () => {
    if (!chart?.isConnected || !body.clientWidth) return;
    const drawn = draw();
    chart.replaceWith(drawn);
    chart = drawn;
  };
  const told = runs.map((run, i) => `${plural(of[i].size, "step")}${runs.length > 1 ? ` of ${run.name}` : ""}`);
  const items = all.map((step) => {
    const summary = h("summary", {}, h("span", { class: "step" }, `step ${count(step)}`), runs.map((run, i) => h("span", { class: `of-run${i}` }, lineOf(runs, run, of[i].get(step), answer.dots[i]))));
    const details = h("details", { class: "one-step", "data-step": step }, summary);
    details.addEventListener("toggle", () => {
      if (!details.open || details.childElementCount > 1) return;
      const wanted = { prompt: state.prompt, sort: "reward" };
      const panels = runs.flatMap((run, i) =>
        of[i].has(step) ? [rowsPanel({ run: i, name: run.name, step, wanted, state: {}, title: runs.length > 1 ? run.name : null, without: ["prompt"] })] : [],
      );
      const there = h("p", { class: "links" }, h("a", { href: link({ view: "steps", step }) }, `all rows of step ${count(step)}`));
      details.append(there, h("div", { class: "runs" }, panels));
    });
    return details;
  });
  body.replaceChildren(
    h("p", { class: "links" }, h("a", { href: link({ view: "prompts" }) }, "all prompts")),
    h("h3", {}, columnName(same)),
    text,
    h("p", { class: "about" }, `This prompt was drawn in ${andList(told)}. Open a step to read its rollouts, the lowest reward first.`),
    ...(chart ? [chart] : []),
    ...items,
  );
  if (items.length === 1) items[0].open = true;
}

function lineOf(runs, run, line, dots) {
  const where = runs.length > 1 ? `${run.name}: ` : "";
  if (!line) return `${where}not drawn`;
  const [step, groups, rollouts, reward] = line;
  const mean = isNumber(reward) ? number(reward) : NONE;
  const ends = extent(dots.filter(([at]) => at === step).map(([, , advantage]) => advantage));
  const advantages = ends ? `, advantages ${ends[0] === ends[1] ? number(ends[0]) : ends.map(number).join(" to ")}` : "";
  return `${where}mean reward ${mean}${advantages}, ${plural(rollouts, "rollout")} in ${plural(groups, "group")}`;
}
