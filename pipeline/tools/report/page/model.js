// Groups of rollouts of rows, made once per step. Ids are labels: compared, never counted with.
import { common, count, extent, isNumber, number, shortId } from "./numbers.js";
import { matches } from "./search.js";

const models = new WeakMap();

export function modelOf(step) {
  if (!models.has(step)) models.set(step, makeModel(step));
  return models.get(step);
}

// The lines of a table, which the data has as columns of one length.
const linesOf = (table) =>
  Object.values(table)[0].map((_, i) => Object.fromEntries(Object.entries(table).map(([name, column]) => [name, column[i]])));

function makeModel(step) {
  const groups = new Map();
  for (const group of linesOf(step.groups)) groups.set(String(group.id), { ...group, members: new Map() });
  const rows = linesOf(step.rows);
  for (const row of rows) placeRow(groups, row);
  const all = [...groups.values()];
  for (const group of all) {
    group.members = [...group.members.values()].map(withSummary);
    group.spread = spreadOf(group);
  }
  const texts = rows.some((row) => row.response || row.by_token?.texts);
  return { rows, groups: all, texts };
}

function placeRow(groups, row) {
  const key = String(row.group);
  if (!groups.has(key)) groups.set(key, { id: row.group, complete: true, members: new Map() });
  const group = groups.get(key);
  const name = String(row.rollout);
  if (!group.members.has(name)) group.members.set(name, { id: row.rollout, group, rows: [] });
  group.members.get(name).rows.push(row);
}

// The rollout, with the reward, advantage and reasons of its rows.
function withSummary(rollout) {
  rollout.trained = rollout.rows.some((row) => !row.reason);
  const rewards = new Set(rollout.rows.map((row) => row.reward).filter(isNumber));
  // A rollout that left before its rows had one common reward has none: that of a draft is not the rollout's.
  rollout.reward = rewards.size > 1 && !rollout.trained ? null : common(rollout.rows.map((row) => row.reward));
  rollout.advantage = common(rollout.rows.map((row) => row.advantage));
  rollout.compared = extent(rollout.rows.map((row) => row.compared))?.[1] ?? null; // excluded rows have 0
  rollout.reasons = [...new Set(rollout.rows.map((row) => row.reason).filter(Boolean))];
  return rollout;
}

// Ids may be longer than a double holds; those come as strings of digits. Others are labels.
export function compareIds(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  const numbers = [a, b].every((id) => /^-?\d+$/.test(id ?? -1));
  if (!numbers) return String(a).localeCompare(String(b), "en", { numeric: true });
  const [x, y] = [BigInt(a ?? -1), BigInt(b ?? -1)];
  return x < y ? -1 : x > y ? 1 : 0;
}

// The range of the rewards in the loss, by which groups that teach come first; -1: no row is in the loss. The
// viewer has the same rule, by_teaching in view/stored_run.py.
function spreadOf(group) {
  const trained = group.members.flatMap((rollout) => rollout.rows.filter((row) => !row.reason));
  const [low, high] = extent(trained.map((row) => row.reward)) ?? [1, 0];
  return high - low;
}

const orders = {
  id: () => 0,
  mean: (a, b) => (a.reward_mean ?? Infinity) - (b.reward_mean ?? Infinity),
  std: (a, b) => b.spread - a.spread,
  lag: (a, b) => (b.staleness ?? -1) - (a.staleness ?? -1),
};

const plainWords = (text) => String(text).replace(/\s+/g, " ").trim();

// What a group is called: its prompt, where it has one, and its id. An id that is the prompt again is left out.
export function calledBy({ id, label }) {
  const [prompt, name] = [label ? plainWords(label) : "", plainWords(id)];
  const start = prompt.replace(/…$/, "");
  const same = start && (name.startsWith(start) || prompt.startsWith(name) || name.includes(prompt));
  if (same && !/^\d+$/.test(name)) return { prompt, group: "" };
  // A sentence needs no word before it.
  return { prompt, group: prompt ? `group ${shortId(name)}` : /\s/.test(name) ? name : `group ${name}` };
}

// Groups that match, in the order chosen, each with the rollouts that the filter lets through.
export function chosen(model, { sort, filter, search = "" }) {
  const passes = { all: () => true, trained: (r) => r.trained, left: (r) => !r.trained }[filter];
  return model.groups
    .filter((group) => matches(group, search))
    .map((group) => ({ group, rollouts: group.members.filter(passes) }))
    .filter(({ rollouts }) => filter === "all" || rollouts.length)
    .sort((a, b) => orders[sort](a.group, b.group) || compareIds(a.group.id, b.group.id));
}

// Why there is nothing to draw.
export function whyNone({ filter, search }) {
  if (search.trim()) return `No group has “${search.trim()}” in its ids, texts or reasons.`;
  return filter === "trained"
    ? "No rollout of this step is in the loss."
    : "All rollouts of this step are in the loss.";
}

export function fate(rollout) {
  if (!rollout.reasons.length) return "in the loss";
  const left = rollout.reasons.join(", ");
  return rollout.trained ? `partly in the loss; not in the loss: ${left}` : `not in the loss: ${left}`;
}

export function advantageWords(rollout) {
  const alone = rollout.compared === 1 ? ": alone in its comparison" : "";
  return `advantage ${number(rollout.advantage)}${alone}`;
}

// How many rollouts were compared, with which baseline, and why others were not.
export function comparisonOf(group) {
  const { baseline, compared, members } = group;
  const left = members.filter((rollout) => rollout.compared === 0);
  const reasons = [...new Set(left.flatMap((rollout) => rollout.reasons))].map(reasonWords);
  const why = reasons.length ? ` (${reasons.join(", ")})` : "";
  return [
    compared > 0 && left.length ? `${count(compared)} of ${count(members.length)} compared` : null,
    isNumber(baseline) ? `baseline ${number(baseline)}` : null,
    left.length ? `${count(left.length)} not counted${why}` : null,
  ];
}

const reasonWords = (reason) => reason.split("/").at(-1).replaceAll("_", " ");

export function ofExpected(group) {
  const counted = count(group.rollouts ?? group.members.length);
  return isNumber(group.expected) ? `${counted} of ${count(group.expected)}` : counted;
}
