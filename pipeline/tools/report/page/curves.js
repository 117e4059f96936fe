// Small multiples: one metric each, with the step that the page shows marked.
import { byId, h, message, moreButton, s } from "./dom.js";
import { legend, swatch } from "./legend.js";
import { count, extent, isNumber, isOne, plural, scale } from "./numbers.js";
import { described, measured, measuredRange } from "./metrics.js";

// Which steps curves have: of a long run, some.
export function stepsDrawn({ curve_steps: steps, recorded }) {
  const ends = `steps ${count(steps[0])} to ${count(steps.at(-1))}`;
  return recorded > steps.length ? `${count(steps.length)} of ${count(recorded)} steps, ${ends}` : ends;
}

const FIRST = 12;
let allCurves = false;

function path(xs, ys) {
  let open = false;
  return xs
    .map((x, i) => {
      const known = ys[i] !== null;
      const word = known ? `${open ? "L" : "M"}${x.toFixed(1)} ${ys[i].toFixed(1)}` : "";
      open = known;
      return word;
    })
    .join("");
}

// A long name may be broken after a slash or an underscore, and not within a word.
const breakable = (name) => name.split(/(?<=[/_])/).flatMap((word, i) => (i ? [h("wbr"), word] : [word]));

// The values of a metric; of two recipes those of both.
export const curvesOf = (page, name) =>
  [page.curves[name] ?? page.curve_steps.map(() => null), page.curves[`second/${name}`]].filter(Boolean);
// Names of metrics, without those of the second of two recipes.
export const metricsOf = (numbers) => [...new Set(Object.keys(numbers).map((name) => name.replace(/^second\//, "")))];

// In the order of metrics.js; what never changes says less, and comes last.
function inOrder(page) {
  const flat = (name) => {
    const range = extent(curvesOf(page, name).flat());
    return !range || isOne(range);
  };
  const place = (name) => (flat(name) ? 1000 : 0) + described(name).place;
  return metricsOf(page.curves).sort((a, b) => place(a) - place(b));
}

// A metric over the steps, a line or two, as wide as there is room, less `gutter` for text on its right.
export function curveOf(name, lines, steps, current, { width, height, gutter = 0, restarts = [] }) {
  const [values] = lines;
  const range = extent(lines.flat());
  const at = steps.indexOf(current);
  const x = scale(extent(steps), [7, width - 7 - gutter]);
  const y = scale(range, [height - 7, 7]);
  const xs = steps.map(x);
  const [ys, others] = lines.map((of) => of.map((value) => (isNumber(value) ? y(value) : null)));
  // A number between two gaps has no line to be seen by.
  const alone = xs
    .map((_, i) => i)
    .filter((i) => ys[i] !== null && (ys[i - 1] ?? null) === null && (ys[i + 1] ?? null) === null);
  const { title } = described(name);
  const label =
    `${title} over ${plural(steps.length, "step")}, from ${measuredRange(name, ...range)}; ` +
    `at step ${current}: ${measured(name, at < 0 ? null : values[at])}`;
  return s(
    "svg",
    { width, height, role: "img", "aria-label": label },
    restarts.map((step) => s("line", { class: "restart", x1: x(step), x2: x(step), y1: 0, y2: height })),
    at < 0 ? null : s("line", { class: "now", x1: xs[at], x2: xs[at], y1: 0, y2: height }),
    s("path", { class: "curve", d: path(xs, ys) }),
    others ? s("path", { class: "curve run1", d: path(xs, others) }) : null,
    alone.map((i) => s("circle", { class: "alone", cx: xs[i], cy: ys[i], r: 2 })),
    at < 0 || ys[at] === null ? null : s("circle", { class: "here", cx: xs[at], cy: ys[at], r: 4 }),
  );
}

// The first step after each restart of the run.
const restartsOf = ({ run }) => (run ? run.restarts : []);

function drawCurve(name, page, current, width) {
  const [lines, steps] = [curvesOf(page, name), page.curve_steps];
  const range = extent(lines.flat());
  const at = steps.indexOf(current);
  const { title, tells } = described(name);
  const head = h(
    "figcaption",
    {},
    h("span", { class: "name" }, breakable(title)),
    h("span", { class: "number" }, lines.map((values) => measured(name, values[at] ?? null)).join(" · ")),
  );
  const drawing = range
    ? curveOf(name, lines, steps, current, { width, height: 64, restarts: restartsOf(page) })
    : h("div", {}, message("no number at any step"));
  const ends = !range ? "" : isOne(range) ? `always ${measured(name, range[0])}` : measuredRange(name, ...range);
  const raw = title === name ? null : h("code", {}, breakable(name));
  return h("figure", {}, head, h("p", { class: "note" }, tells), drawing, h("p", { class: "range" }, h("span", {}, ends), raw));
}

export function drawCurves({ page, step, width, redraw }) {
  const names = inOrder(page);
  if (page.curve_steps.length < 2) return null;
  const columns = Math.max(1, Math.floor((width + 20) / 260));
  const each = (width - 20 * (columns - 1)) / columns;
  const some = allCurves ? names : names.slice(0, FIRST);
  const showAll = () => {
    allCurves = true;
    redraw();
  };
  return [
    legend([
      [
        swatch(s("line", { class: "curve", x1: 0, x2: 18, y1: 7, y2: 7 })),
        `${page.versus ? `under ${page.versus[0]}: ` : ""}the number at each step drawn: ${stepsDrawn(page)}`,
        "curve",
      ],
      page.versus
        ? [swatch(s("line", { class: "curve run1", x1: 0, x2: 18, y1: 7, y2: 7 })), `under ${page.versus[1]}`, "second"]
        : null,
      [
        swatch([
          s("line", { class: "now", x1: 9, x2: 9, y1: 0, y2: 14 }),
          s("circle", { class: "here", cx: 9, cy: 7, r: 4 }),
        ]),
        `step ${count(step.step)}`,
        "now",
      ],
      restartsOf(page).length
        ? [
            swatch(s("line", { class: "restart", x1: 9, x2: 9, y1: 0, y2: 14 })),
            "the run was restarted before this step",
            "restart",
          ]
        : null,
    ]),
    h(
      "div",
      { class: "multiples", style: { "grid-template-columns": `repeat(${columns}, minmax(0, 1fr))` } },
      some.map((name) => drawCurve(name, page, step.step, each)),
    ),
    some.length < names.length ? moreButton(`show all ${count(names.length)} metrics`, showAll) : null,
  ];
}

export function drawNumbers({ step }) {
  const numbers = metricsOf(step.numbers);
  const both = (name) =>
    (`second/${name}` in step.numbers ? [name, `second/${name}`] : [name]).map((each) => measured(name, step.numbers[each])).join(" · ");
  if (!numbers.length) return message("No number was recorded at this step.");
  const open = byId("all-numbers")?.open; // it stays so when another step is drawn
  return [
    h(
      "details",
      { id: "all-numbers", class: "numbers", open },
      h("summary", {}, plural(numbers.length, "number")),
      h(
        "dl",
        {},
        numbers.map((name) => h("div", {}, h("dt", {}, breakable(described(name).title), described(name).title === name ? null : h("code", {}, breakable(name))), h("dd", {}, both(name)))),
      ),
    ),
  ];
}
