// Groups, one below the other; what a group holds is drawn when it is opened.
import { drawGroup } from "./cards.js";
import { byId, h, lazily, message, moreButton, reducedMotion } from "./dom.js";
import { calledBy, chosen, comparisonOf, ofExpected, whyNone } from "./model.js";
import { count, isNumber, number } from "./numbers.js";

const PAGE = 25;
let treeShown = PAGE;
let treeView = null;

function groupNode({ group, rollouts }) {
  const some = group.compared > 0 && group.compared < group.members.length;
  const facts = [
    some && group.complete ? null : `${ofExpected(group)} rollouts`,
    ...comparisonOf(group),
    isNumber(group.baseline) ? null : `reward mean ${number(group.reward_mean)}`,
    some ? null : `std ${number(group.reward_std)}`,
    group.complete ? null : "incomplete",
    group.zero_variance ? "all rewards equal" : null,
    isNumber(group.staleness) && group.staleness ? `staleness ${count(group.staleness)}` : null,
  ]
    .filter(Boolean)
    .join(" · ");
  const { prompt, group: named } = calledBy(group);
  const name = [
    h("span", { class: prompt ? "name prompt" : "name", title: group.id }, prompt || named),
    h("span", { class: "facts" }, [prompt ? named : "", facts].filter(Boolean).join(" · ")),
  ];
  const node = lazily(name, "group", () => drawGroup(group, rollouts, treeView.model.texts));
  node.dataset.group = group.id;
  node.firstChild.addEventListener("click", () => treeView.choose(node.open ? null : group.id));
  return node;
}

export function drawTree(view) {
  treeView = view;
  const lines = chosen(view.model, view);
  if (!view.model.groups.length) return message("There are no groups at this step.");
  if (!lines.length) return message(whyNone(view));
  const rest = lines.length - treeShown;
  const showMore = () => {
    treeShown += PAGE;
    growTree(lines);
  };
  const more = `show ${count(Math.min(rest, PAGE))} more of ${count(rest)}`;
  const nodes = lines.slice(0, treeShown).map(groupNode);
  if (view.group === null) unfold(nodes[0]);
  return [...nodes, ...(rest > 0 ? [moreButton(more, showMore)] : [])];
}

function unfold(node) {
  node.fill();
  node.open = true;
}

// Those that are open stay open, and those that were closed stay closed.
function growTree(lines) {
  const body = byId("tree").querySelector(".body");
  const known = new Map([...body.querySelectorAll("details.group")].map((node) => [node.dataset.group, node]));
  const fresh = drawTree(treeView);
  body.replaceChildren(...fresh.map((node) => known.get(node.dataset.group) || node));
  const first = lines[treeShown - PAGE];
  if (first) body.querySelectorAll("details.group")[treeShown - PAGE].firstChild.focus();
}

export function openGroup(id) {
  const lines = chosen(treeView.model, treeView);
  const at = lines.findIndex(({ group }) => String(group.id) === String(id));
  if (at < 0) return;
  while (at >= treeShown) {
    treeShown += PAGE;
    growTree(lines);
  }
  const node = byId("tree").querySelectorAll("details.group")[at];
  unfold(node);
  treeView.choose(lines[at].group.id);
  node.scrollIntoView({ block: "start", behavior: reducedMotion() ? "auto" : "smooth" });
  node.firstChild.focus({ preventScroll: true });
}
