// Each row's advantage, against what it would be if each row of a fan-out were a rollout, or under another
// recipe.
import { byId, h, s } from "./dom.js";
import { legend, swatch } from "./legend.js";
import { modelOf } from "./model.js";
import { beginning, count, extent, isNumber, number, plural, scale, shortId, ticks } from "./numbers.js";
import { drawShares } from "./shares.js";
import { tip } from "./tip.js";

const CLOSE = 1e-5; // a few float32 roundings

// A group is called by its prompt, else by its id.
function pairsOf({ rows, groups }) {
  const labels = new Map(groups.map(({ id, label }) => [String(id), label]));
  const called = (id) => (labels.get(String(id)) ? beginning(labels.get(String(id)), 32) : shortId(id));
  return rows
    .filter((row) => isNumber(row.advantage) && isNumber(row.advantage_by_row))
    .map((row) => {
      const [a, b] = [row.advantage, row.advantage_by_row];
      const differs = Math.abs(a - b) > CLOSE * Math.max(1, Math.abs(a), Math.abs(b));
      return { row, called: called(row.group), a, b, kind: differs && a * b < 0 ? "flips" : differs ? "differs" : "same" };
    });
}

// The step at which the most rows differ between two recipes; of several, the last.
export function mostDifferent({ steps }) {
  const differing = steps.map((step) => pairsOf(modelOf(step)).filter(({ kind }) => kind !== "same").length);
  return differing.lastIndexOf(Math.max(...differing));
}

function mark(kind, x, y) {
  if (kind === "flips") return s("path", { class: "point flips", d: `M${x} ${y - 6}l6 6l-6 6l-6 -6z` });
  return s("circle", { class: `point ${kind}`, cx: x, cy: y, r: kind === "same" ? 3 : 4.5 });
}

// The names of the two axes; the advantage by row may be that of another recipe instead.
function namesOf(page) {
  const [x, y] = page.versus || ["by rollout", "by row"];
  return { x, y, other: Boolean(page.versus) };
}

function scatter(pairs, width, named) {
  const size = Math.min(width, 460);
  const [low, high] = extent(pairs.flatMap(({ a, b }) => [a, b]));
  const room = (high - low || 1) * 0.06;
  const x = scale([low - room, high + room], [46, size - 18]); // the last tick's text needs room
  const y = scale(x.domain, [size - 42, 10]);
  const marks = ticks(x.domain, size < 380 ? 4 : 6);
  const [from, to] = x.domain;
  const order = { same: 0, differs: 1, flips: 2 };
  const points = [...pairs]
    .sort((p, q) => order[p.kind] - order[q.kind])
    .map(({ row, called, a, b, kind }) => {
      const point = mark(kind, x(a), y(b));
      return tip(point, () => [
        `row ${row.row}`,
        `group ${called}, rollout ${shortId(row.rollout)}`,
        `${named.x} ${number(a)}`,
        `${named.y} ${number(b)}`,
      ]);
    });
  return s(
    "svg",
    {
      class: "scatter",
      width: size,
      height: size,
      role: "img",
      "aria-label": `Scatter of ${plural(pairs.length, "row")}: advantage ${named.y} against advantage ${named.x}`,
    },
    marks
      .map((tick) => [
        s("line", { class: "grid", x1: x(tick), x2: x(tick), y1: y(from), y2: y(to) }),
        s("line", { class: "grid", y1: y(tick), y2: y(tick), x1: x(from), x2: x(to) }),
        s("text", { x: x(tick), y: size - 26 }, number(tick)),
        s("text", { class: "end", x: 40, y: y(tick) + 4 }, number(tick)),
      ])
      .flat(),
    s("line", { class: "diagonal", x1: x(from), y1: y(from), x2: x(to), y2: y(to) }),
    s("text", { class: "title", x: (46 + size - 18) / 2, y: size - 6 }, `advantage ${named.x}`),
    s(
      "text",
      { class: "title", transform: `translate(11 ${(size - 32) / 2}) rotate(-90)` },
      `advantage ${named.y}`,
    ),
    points,
  );
}

// How many rows differ, and how many flip.
function sentence(pairs, named) {
  const differ = pairs.filter(({ kind }) => kind !== "same").length;
  const flips = pairs.filter(({ kind }) => kind === "flips").length;
  const rows = plural(pairs.length, "row");
  const flipped = flips ? count(flips) : "none";
  if (named.other && !differ) return `Each of ${rows} has the same advantage under ${named.x} and ${named.y}.`;
  if (named.other)
    return (
      `Under ${named.y} instead of ${named.x} the advantage of ${count(differ)} of ${rows} differs, ` +
      `and ${flipped} flips its sign.`
    );
  if (!differ) return `Counting rows instead of rollouts would change none of ${rows}.`;
  return (
    `Counting rows instead of rollouts would change ${count(differ)} of ${rows}, ` +
    `and flip the sign of ${flipped}.`
  );
}

export function drawCompare({ page, step, model, width }) {
  const named = namesOf(page);
  const pairs = pairsOf(model);
  const alone = new Set(model.rows.map((row) => String(row.rollout))).size === model.rows.length;
  if (!pairs.length || (alone && !named.other)) return null; // nothing could differ
  const marks = [
    ["same", "the same either way"],
    ["differs", "differs"],
    ["flips", "flips its sign"],
  ].map(([kind, text]) => [swatch(mark(kind, 9, 7)), text, kind]);
  const side = h(
    "div",
    {},
    h("p", { class: "sentence" }, sentence(pairs, named)),
    legend([
      ...marks,
      [swatch(s("line", { class: "diagonal", x1: 0, y1: 14, x2: 18, y2: 0 })), "equal", "diagonal"],
    ]),
  );
  const drawn = h("div", { class: "beside" }, scatter(pairs, width, named), side);
  return [drawn, ...(named.other ? drawShares(page, model, step) : [])];
}

// A page of two recipes begins with how they differ. Its other panels name the recipe that they show (`.of-step`).
export function nameRecipes(page) {
  if (!page.versus) return;
  const [first, second] = page.versus;
  byId("compare").parentElement.prepend(byId("compare"));
  byId("recipe-title").textContent = `Recipe ${first}`;
  byId("compare-title").textContent = `${first} against ${second}`;
  byId("compare").querySelector(".about").textContent =
    `Horizontal: the advantage of each row under ${first}. Vertical: the advantage of the same row under ` +
    `${second}. The curves are of both recipes, the other panels of ${first}.`;
}
