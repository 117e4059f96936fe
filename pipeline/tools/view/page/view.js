// The address holds the state of the viewer. Other modules draw it.
import { byId, h } from "./dom.js";
import { described } from "./metrics.js";
import { count } from "./numbers.js";
import { ask, columnName, link, reasonName } from "./view_api.js";
import { drawPrompt, drawPrompts, resizePrompt } from "./view_prompts.js";
import { rowsPanel } from "./view_rows.js";
import { REWARD, drawSteps, linesOf, markStep } from "./view_steps.js";

const NAMES = ["view", "step", "metric", "order", "reason", "group", "text", "prompt", "search", "by"];
const CONTROLS = { steps: ["metric", "order", "reason", "group", "text"], prompts: ["search", "by"] };
const DEFAULTS = { view: "steps", by: "lowest" };
const WAIT = 250; // milliseconds after the last letter that is typed
let runs = [];
let lines = []; // of each run, by step
let steps = []; // of all runs
let same = ""; // the column by which a prompt is known again

function readState() {
  const given = new URLSearchParams(window.location.hash.slice(1));
  const state = Object.fromEntries(NAMES.map((name) => [name, given.get(name) ?? DEFAULTS[name] ?? ""]));
  const wanted = state.step.trim() ? Number(state.step) : NaN;
  const last = steps.findLast((step) => lines.every((of) => of.has(step))) ?? Infinity; // that all runs have
  state.number = steps.includes(wanted) ? wanted : nearest(Number.isFinite(wanted) ? wanted : last);
  return state;
}

const nearest = (wanted) =>
  steps.reduce((best, step) => (Math.abs(step - wanted) <= Math.abs(best - wanted) ? step : best), steps[0]);

// Go to a state. Default values are not in the address.
function go(changes) {
  const state = { ...readState(), ...changes };
  delete state.number;
  for (const [name, value] of Object.entries(DEFAULTS)) if (name !== "view" && state[name] === value) state[name] = "";
  window.location.hash = link(state);
}

function options(select, pairs, value) {
  select.replaceChildren(...pairs.map(([name, words]) => h("option", { value: name }, words)));
  select.value = pairs.some(([name]) => name === value) ? value : pairs[0]?.[0];
}

async function draw() {
  const state = readState();
  for (const [name, views] of Object.entries({ steps: ["steps"], rows: ["steps"], prompts: ["prompts"], prompt: ["prompt"] }))
    byId(name).hidden = !views.includes(state.view);
  for (const name of ["steps", "prompts"]) {
    const here = state.view === name || (name === "prompts" && state.view === "prompt");
    if (here) byId(`to-${name}`).setAttribute("aria-current", "page");
    else byId(`to-${name}`).removeAttribute("aria-current");
  }
  for (const name of CONTROLS[state.view] ?? [])
    if (byId(name).tagName === "INPUT" && byId(name) !== document.activeElement) byId(name).value = state[name];
  if (state.view === "prompts") {
    byId("by").value = state.by;
    drawPrompts(runs, state, same);
  } else if (state.view === "prompt") {
    drawPrompt(runs, state, same);
  } else drawRows(state);
}

let drawn = null; // the rows that are shown, so that a control without a change asks for nothing

function drawRows(state) {
  const step = state.number;
  options(byId("metric"), metrics().map((name) => [name, described(name).title]), state.metric);
  const metric = byId("metric").value;
  byId("tells").replaceChildren(described(metric).tells, " ", h("code", {}, metric));
  markStep(runs, lines, { ...state, metric }, (chosen) => go({ step: String(chosen) }));
  byId("rows-title").textContent = `Rows of step ${count(step)}`;
  byId("number").value = step;
  const asked = state.step.trim();
  byId("no-step").textContent =
    asked && Number(asked) !== step ? `There is no step ${asked}: step ${count(step)} is the nearest.` : "";
  byId("clear-group").hidden = !state.group;
  byId("previous").disabled = step === steps[0];
  byId("next").disabled = step === steps.at(-1);
  const left = [...new Set(lines.flatMap((of) => Object.keys(of.get(step)?.left ?? {})))];
  options(
    byId("reason"),
    [["", "all rows"], ["trained", "rows in the loss"], ["left", "rows not in the loss"], ...left.map((name) => [name, reasonName(name)])],
    state.reason,
  );
  const reason = byId("reason").value;
  options(byId("order"), ORDERS, state.order);
  const [sort, order] = byId("order").value.split(" ");
  const wanted = { sort, order, reason, group: state.group, text: state.text };
  const key = JSON.stringify([step, wanted]);
  if (key === drawn) return;
  drawn = key;
  const panels = runs.map((run, i) =>
    lines[i].has(step)
      ? rowsPanel({ run: i, name: run.name, step, wanted, state, title: runs.length > 1 ? run.name : null })
      : h("div", { class: "panel" }, h("h3", {}, run.name), h("p", { class: "empty" }, `${run.name} has no step ${count(step)}.`)),
  );
  // On a narrow page the runs are below one another.
  const jump = (i) => h("button", { type: "button", class: "link jump", on: { click: () => panels[1 - i].scrollIntoView() } }, `the rows of ${runs[1 - i].name} are ${i ? "above" : "below"}`);
  if (panels.length > 1) for (const [i, panel] of panels.entries()) panel.querySelector("h3").after(jump(i));
  byId("rows").querySelector(".runs").replaceChildren(...panels);
}

// The numbers of all runs in the order of metrics.js, the mean reward first. Numbers that one run lacks come last.
function metrics() {
  const inAll = (name) => name === REWARD || runs.every((run) => run.metrics.includes(name));
  const place = (name) => (inAll(name) ? 0 : 1000) + described(name).place;
  return [...new Set([REWARD, ...runs.flatMap((run) => run.metrics)])].sort((a, b) => place(a) - place(b));
}

const ORDERS = [
  ["", "groups that teach first"],
  ...["reward", "advantage", "loss_weight", "tokens", "row"].flatMap((name) =>
    ["ascending", "descending"].map((order) => [`${name} ${order}`, `${columnName(name === "reward" ? "rollout_reward" : name)}, ${order === "ascending" ? "lowest" : "highest"} first`]),
  ),
];

function listen() {
  let timer = 0;
  for (const name of [...CONTROLS.steps, ...CONTROLS.prompts]) {
    const control = byId(name);
    if (control.tagName === "SELECT") control.addEventListener("change", () => go({ [name]: control.value }));
    else
      control.addEventListener("input", () => {
        clearTimeout(timer);
        timer = setTimeout(() => go({ [name]: control.value }), WAIT);
      });
  }
  const turn = (by) => go({ step: String(steps[steps.indexOf(readState().number) + by]) });
  byId("previous").addEventListener("click", () => turn(-1));
  byId("next").addEventListener("click", () => turn(1));
  byId("number").addEventListener("change", (e) => go({ step: e.target.value }));
  byId("clear-group").addEventListener("click", () => {
    byId("group").value = "";
    go({ group: "" });
  });
  window.addEventListener("hashchange", draw);
  let wide = document.documentElement.clientWidth;
  window.addEventListener("resize", () => {
    const now = document.documentElement.clientWidth;
    // Draw only what depends on the width, so that open rows stay open and the page does not scroll.
    if (now !== wide && readState().view === "steps") draw();
    else if (now !== wide) resizePrompt();
    wide = now;
  });
}

async function start() {
  try {
    ({ runs, same } = await ask("runs"));
  } catch (error) {
    byId("title").textContent = "The run cannot be shown";
    byId("summary").textContent = error.message;
    return;
  }
  if (runs.length > 1 && runs[0].name === runs[1].name) runs = runs.map((run) => ({ ...run, name: run.folder }));
  lines = runs.map(linesOf);
  steps = [...new Set(lines.flatMap((of) => [...of.keys()]))].sort((a, b) => a - b);
  const names = runs.map((run) => (run.recipe ? `${run.recipe} · ${run.name}` : run.name)).join(" and ");
  const withRows = (i) => runs[i].failed.filter(([step]) => lines[i].has(step)).length;
  document.title = `${names} · headrace view`;
  byId("title").textContent = names;
  byId("summary").textContent = runs
    .map((run, i) => `${run.folder}: ${count(lines[i].size - withRows(i))} steps${run.failed.length ? ` (${count(run.failed.length)} more failed)` : ""}, ${count([...lines[i].values()].reduce((sum, line) => sum + line.rows, 0))} rows`)
    .join(" · ");
  const problems = runs.flatMap((run) => run.problems.map((problem) => `${run.name}: ${problem}`));
  byId("problems").replaceChildren(...problems.map((problem) => h("li", {}, problem)));
  byId("problems").hidden = !problems.length;
  byId("views").hidden = false;
  document.querySelector("main").hidden = false;
  if (!steps.length) return;
  byId("steps").hidden = false;
  drawSteps(runs, lines);
  listen();
  draw();
}

start();
