// The state of the page, and the panels that draw it.
import { drawRun } from "./about.js";
import { readAddress, writeAddress } from "./address.js";
import { drawAnswer, sayAdvice, sayNotices } from "./answer.js";
import { drawCertificates } from "./certificates.js";
import { drawCompare, mostDifferent, nameRecipes } from "./compare.js";
import { drawCurves, drawNumbers } from "./curves.js";
import { byId, h } from "./dom.js";
import { drawFunnel } from "./funnel.js";
import { drawLag } from "./lag.js";
import { drawLengths } from "./lengths.js";
import { followRun } from "./live.js";
import { chosen, modelOf } from "./model.js";
import { andList, count, plural, shareInWords } from "./numbers.js";
import { drawOptimiser } from "./optimiser.js";
import { drawStrip } from "./strip.js";
import { drawSurvivors } from "./survivors.js";
import { drawTape } from "./tape.js";
import { hideTip, listenForTips } from "./tip.js";
import { drawTree, openGroup } from "./tree.js";
import { UNITS } from "./metrics.js";

const page = JSON.parse(byId("page-data").textContent); // page_schema.py describes it
const NARROWEST = 260; // a page that is laid out later, in a hidden tab, has no width yet
const state = { index: 0, sort: "std", filter: "all", search: "", group: null };
const PANELS = {
  answer: drawAnswer,
  funnel: drawFunnel,
  strip: drawStrip,
  compare: drawCompare,
  tree: drawTree,
  tape: drawTape,
  lengths: drawLengths,
  lag: drawLag,
  survivors: drawSurvivors,
  optimiser: drawOptimiser,
  curves: drawCurves,
  numbers: drawNumbers,
};

function draw(names = Object.keys(PANELS)) {
  const step = page.steps[state.index];
  for (const name of names) {
    const body = byId(name).querySelector(".body");
    byId(name).hidden = false;
    const content = PANELS[name]({
      page,
      step,
      model: modelOf(step),
      width: Math.max(body.clientWidth, NARROWEST),
      sort: state.sort,
      filter: state.filter,
      search: state.search,
      group: state.group,
      choose: chooseGroup,
      redraw: () => draw([name]),
    });
    // Built away from the page and put in at once, so that the page does not jump. A panel without content is away.
    byId(name).hidden = !content;
    body.replaceChildren(...(content ?? []).filter(Boolean));
  }
}

function summarise(step) {
  const [first, last] = [step.funnel[0], step.funnel.at(-1)];
  if (!first || !first.rows) return `Step ${count(step.step)}${underFirst()}: no rows were collected.`;
  const [rows, ...others] = UNITS.slice(0, 3)
    .filter((unit) => first[unit] !== null)
    .map((unit) => `${count(last[unit])} of ${count(first[unit])} ${unit}`);
  const from = others.length ? ` They come from ${andList(others)}.` : "";
  return `Step ${count(step.step)}${underFirst()}: ${rows} (${shareInWords(last.rows / first.rows)}) are in the loss.${from}`;
}

// Of two recipes that are compared, whose numbers these are.
const underFirst = () => (page.versus ? ` under ${page.versus[0]}` : "");

// The same over all steps of the run, whichever is shown.
function summariseAll() {
  const [rows, trained] = [page.totals?.["rows/in"], page.totals?.["rows/trained"]];
  if (!rows || page.recorded < 2) return "";
  const steps = page.curve_steps;
  const which = `All ${count(page.recorded)} steps, ${count(steps[0])} to ${count(steps.at(-1))}`;
  return `${which}${underFirst()}: ${count(trained)} of ${count(rows)} rows (${shareInWords(trained / rows)}) were in the loss.`;
}

function show(index) {
  state.index = Math.min(Math.max(index, 0), page.steps.length - 1);
  const step = page.steps[state.index];
  hideTip();
  byId("summary").textContent = summarise(step);
  for (const label of document.querySelectorAll(".of-step")) {
    const both = label.closest("#compare-title, #numbers-title"); // these panels have both recipes
    label.textContent = `step ${count(step.step)}${both ? "" : underFirst()}`;
  }
  sayAdvice(page, step);
  const shown = step.shown;
  byId("sampled").hidden = !(shown.groups < shown.of);
  byId("sampled").textContent =
    `The funnel and the numbers are of all ${count(shown.of)} groups of this step. The drawings below the funnel ` +
    `show ${count(shown.groups)} of them.`;
  byId("slider").value = state.index;
  byId("slider").setAttribute("aria-valuetext", `step ${step.step}`);
  byId("number").value = step.step;
  byId("previous").disabled = state.index === 0;
  byId("next").disabled = state.index === page.steps.length - 1;
  byId("elsewhere").hidden = true;
  draw(Object.keys(PANELS).filter((name) => !["strip", "tree"].includes(name)));
  drawGroups();
}

function chooseGroup(id) {
  state.group = id;
  remember();
}

const remember = () =>
  writeAddress({ step: page.steps[state.index].step, group: state.group, search: state.search });

function drawGroups() {
  const { groups } = modelOf(page.steps[state.index]);
  const found = chosen(modelOf(page.steps[state.index]), state).length;
  byId("found").textContent = state.search.trim()
    ? `${count(found)} of ${plural(groups.length, "group")} ${found === 1 ? "matches" : "match"}`
    : "";
  draw(["strip", "tree"]);
}

// A reader has chosen another step.
function turnTo(index) {
  state.group = null;
  show(index);
  remember();
}

// Go where the address says, and say so where there is no such place.
function follow(address) {
  const wanted = address.step?.trim() ? Number(address.step) : NaN;
  const found = placeOf(wanted);
  const index = found < 0 ? state.index : found;
  state.search = byId("search").value = address.search ?? "";
  const there = chosen(modelOf(page.steps[index]), state).some(({ group }) => String(group.id) === address.group);
  state.group = there ? address.group : null;
  show(index);
  if (there) openGroup(address.group);
  const now = page.steps[index].step;
  const lost = [];
  if (address.step !== null && found < 0) lost.push(sayAbsent(address.step));
  if (address.group !== null && !there)
    lost.push(`There is no group ${address.group} to show at step ${count(now)}.`);
  sayElsewhere(lost.join(" "));
}

function sayElsewhere(text) {
  byId("elsewhere").textContent = text;
  byId("elsewhere").hidden = !text;
}

const sayAbsent = (step) =>
  `Step ${step} is not on this page: ${stepsOf(page)}. This is step ${count(page.steps[state.index].step)}.`;

function listenForSearch() {
  byId("search").addEventListener("input", (e) => {
    state.search = e.target.value;
    drawGroups();
    remember();
  });
  document.addEventListener("keydown", (e) => {
    if (e.key !== "/" || e.ctrlKey || e.metaKey || e.altKey || e.target.matches("input, select, textarea")) return;
    e.preventDefault();
    byId("search").focus();
  });
}

// Of a long run one can choose some steps.
function stepsOf({ steps, curve_steps, recorded }) {
  const ends = `${count(steps[0].step)} to ${count(steps.at(-1).step)}`;
  const all = recorded ?? curve_steps.length;
  if (steps.length >= all) return `${plural(steps.length, "step")}, ${ends}`;
  const view = page.rows_kept ? "; headrace view FOLDER has all" : "";
  return `${count(steps.length)} of ${count(all)} steps are on this page${view}`;
}

const placeOf = (wanted) => page.steps.findIndex(({ step }) => step === wanted);

// A reader has typed the number of a step.
function turnToStep(typed) {
  const index = placeOf(Number(typed));
  if (index >= 0) return turnTo(index);
  byId("number").value = page.steps[state.index].step;
  sayElsewhere(sayAbsent(typed));
}

function start() {
  listenForTips();
  nameRecipes(page);
  document.title = `${page.title} · headrace`;
  sayNotices(page);
  byId("title").textContent = page.title;
  byId("recipe").append(
    ...page.recipe.map((stage) => h("li", {}, h("b", {}, stage.name), h("code", {}, stage.text))),
  );
  byId("recipe-box").hidden = !page.recipe.length;
  byId("totals").textContent = summariseAll();
  byId("totals").hidden = !byId("totals").textContent;
  drawRun(page.run);
  byId("certificates").hidden = !page.certificates;
  if (page.certificates) byId("certificates").querySelector(".body").replaceChildren(...drawCertificates(page));
  if (!page.steps.length) {
    byId("summary").textContent = page.certificates ? "" : "No step was recorded.";
    byId("stepper").hidden = true;
    document.querySelector("main").hidden = !page.certificates;
    for (const name of ["groups", ...Object.keys(PANELS)]) byId(name).hidden = true;
    followRun(page, state, () => {});
    return;
  }
  const last = page.steps.length - 1;
  byId("stepper").hidden = last === 0;
  byId("slider").max = last;
  byId("number").min = page.steps[0].step;
  byId("number").max = page.steps[last].step;
  byId("of").textContent = stepsOf(page);
  byId("slider").addEventListener("input", (e) => turnTo(Number(e.target.value)));
  byId("number").addEventListener("change", (e) => turnToStep(e.target.value));
  byId("previous").addEventListener("click", () => turnTo(state.index - 1));
  byId("next").addEventListener("click", () => turnTo(state.index + 1));
  for (const name of ["sort", "filter"]) {
    byId(name).value = state[name]; // browsers keep what was chosen before a reload
    byId(name).addEventListener("change", (e) => {
      state[name] = e.target.value;
      drawGroups();
    });
  }
  listenForSearch();
  let wide = document.documentElement.clientWidth;
  window.addEventListener("resize", () =>
    requestAnimationFrame(() => {
      const now = document.documentElement.clientWidth;
      if (now !== wide) draw(Object.keys(PANELS).filter((name) => name !== "tree"));
      wide = now;
    }),
  );
  state.index = page.versus ? mostDifferent(page) : last;
  window.addEventListener("hashchange", () => follow(readAddress()));
  follow(readAddress());
  followRun(page, state, (kept) => {
    for (const name of ["sort", "filter"]) byId(name).value = state[name] = kept[name];
    // A reader at the newest step stays at the newest one, whatever its number is.
    const address = readAddress();
    if (kept.step !== null) return follow({ ...address, step: String(kept.step) });
    state.index = last;
    follow({ ...address, step: null, group: null });
    if (address.step !== null) remember();
  });
}

start();
