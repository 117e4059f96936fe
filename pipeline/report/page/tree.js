// Groups, their rollouts and their rows, each built when it is opened.
import { byId, h, message, moreButton, plainTable, reducedMotion } from "./dom.js";
import { chosen, fate, ofExpected } from "./model.js";
import { NONE, count, isNumber, number, plural } from "./numbers.js";

const PAGE = 25;
let treeShown = PAGE;
let treeView = null;

// Content is made at the first opening, and kept.
function lazily(name, kind, content) {
  const details = h("details", { class: kind }, h("summary", {}, name));
  const fill = () => {
    if (details.childElementCount === 1) details.append(...content());
  };
  details.addEventListener("toggle", () => {
    if (details.open) fill();
  });
  details.fill = fill;
  return details;
}

const ROW_COLUMNS = [
  ["row", (row) => String(row.row)],
  ["reward", (row) => number(row.reward)],
  ["rewards", (row) => (row.rewards ? row.rewards.map(number).join(", ") : NONE)],
  ["advantage", (row) => number(row.advantage)],
  ["tokens", (row) => count(row.tokens)],
  ["weight", (row) => number(row.weight)],
  ["status", (row) => row.status ?? NONE],
  ["where it went", (row) => (row.reason ? `left: ${row.reason}` : "in the loss")],
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

function rolloutNode(rollout) {
  const name = [
    h("span", { class: "name" }, `rollout ${rollout.id}`),
    h(
      "span",
      { class: "facts" },
      `reward ${number(rollout.reward)} · advantage ${number(rollout.advantage)}`,
      ` · ${plural(rollout.rows.length, "row")}`,
    ),
    h("span", { class: rollout.trained ? "fate" : "fate gone" }, fate(rollout)),
  ];
  return lazily(name, "rollout", () => [rowTable(rollout)]);
}

function groupNode({ group, rollouts }) {
  const facts = [
    `${ofExpected(group)} rollouts`,
    `reward mean ${number(group.reward_mean)}, std ${number(group.reward_std)}`,
    group.complete ? null : "incomplete",
    group.zero_variance ? "rewards all equal" : null,
    isNumber(group.staleness) && group.staleness ? `staleness ${count(group.staleness)}` : null,
  ]
    .filter(Boolean)
    .join(" · ");
  const name = [
    h("span", { class: "name" }, `group ${group.id}`),
    group.label ? h("span", { class: "prompt" }, group.label) : null,
    h("span", { class: "facts" }, facts),
  ];
  const node = lazily(name, "group", () =>
    [
      group.label ? h("p", { class: "prompt" }, group.label) : null,
      ...(rollouts.length ? rollouts.map(rolloutNode) : message("No row of this group is recorded.")),
    ].filter(Boolean),
  );
  node.dataset.group = group.id;
  return node;
}

export function drawTree(view) {
  treeView = view;
  const lines = chosen(view.model, view.sort, view.filter);
  if (!view.model.groups.length) return message("There are no groups at this step.");
  if (!lines.length) return message("No rollout passes the filter chosen above.");
  const rest = lines.length - treeShown;
  const showMore = () => {
    treeShown += PAGE;
    growTree(lines);
  };
  const more = `show ${count(Math.min(rest, PAGE))} more of ${count(rest)}`;
  return [...lines.slice(0, treeShown).map(groupNode), ...(rest > 0 ? [moreButton(more, showMore)] : [])];
}

// Those that are open stay open.
function growTree(lines) {
  const body = byId("tree").querySelector(".body");
  const open = new Map([...body.querySelectorAll("details.group")].map((node) => [node.dataset.group, node]));
  const fresh = drawTree(treeView);
  body.replaceChildren(...fresh.map((node) => open.get(node.dataset.group) || node));
  const first = lines[treeShown - PAGE];
  if (first) body.querySelectorAll("details.group")[treeShown - PAGE].firstChild.focus();
}

export function openGroup(id) {
  const lines = chosen(treeView.model, treeView.sort, treeView.filter);
  const at = lines.findIndex(({ group }) => String(group.id) === String(id));
  while (at >= treeShown) {
    treeShown += PAGE;
    growTree(lines);
  }
  const node = byId("tree").querySelectorAll("details.group")[at];
  if (!node) return;
  node.fill();
  node.open = true;
  node.scrollIntoView({ block: "start", behavior: reducedMotion() ? "auto" : "smooth" });
  node.firstChild.focus({ preventScroll: true });
}
