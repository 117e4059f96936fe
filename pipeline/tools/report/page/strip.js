// A line per group, with the dots of its rollouts at their rewards.
import { h, message, s } from "./dom.js";
import { drawDot, radius, stack } from "./dots.js";
import { legend, swatch } from "./legend.js";
import { calledBy, chosen, ofExpected, whyNone } from "./model.js";
import { beginning, extent, isNumber, number, plural, scale, sum, ticks } from "./numbers.js";
import { walk } from "./walk.js";

const NONE_ROOM = 44; // for rollouts without a reward

// "prompt · group 7": the prompt is cut where there is no room for both.
function groupName(group, room) {
  const letters = Math.max(2, Math.floor(room / 7.6));
  const { prompt, group: named } = calledBy(group);
  if (!prompt || !named) return beginning(prompt || named, letters);
  const left = letters - named.length - 3;
  return left < 8 ? beginning(prompt, letters) : `${beginning(prompt, left)} · ${named}`;
}

function drawLine({ group, rollouts }, frame, y) {
  const bar = isNumber(group.baseline) ? frame.x(group.baseline) : null;
  const { dots, above, height: tall } = stack(rollouts, frame.x, bar);
  const [middle, height] = [y + frame.head + above, frame.head + tall];
  const room = frame.head ? frame.width : frame.left - (frame.none ? NONE_ROOM + 8 : 12);
  const ends = extent(dots.filter((dot) => dot.rollout.reward !== null).map((dot) => dot.x));
  const drawn = dots.map((dot) => drawDot(dot, middle, frame.most));
  const line = s(
    "g",
    { class: "line", "data-group": group.id },
    group.complete
      ? null
      : s("rect", {
          class: "incomplete",
          x: frame.left - (frame.none ? NONE_ROOM : 0),
          y: y + 1,
          height: height - 2,
          width: frame.right - frame.left + (frame.none ? NONE_ROOM : 0),
        }),
    s(
      "svg",
      { x: 0, y: frame.head ? y : middle - 10, width: room, height: 20 },
      s("text", { class: "name", x: 4, y: 14 }, groupName(group, room - 4)),
    ),
    s("line", { class: "guide", x1: frame.left, x2: frame.right, y1: middle, y2: middle }),
    ends ? s("line", { class: "span", x1: ends[0], x2: ends[1], y1: middle, y2: middle }) : null,
    bar === null ? null : s("line", { class: "mean", x1: bar, x2: bar, y1: middle - 9, y2: middle + 9 }),
    drawn.flat(),
    frame.right < frame.width - 40
      ? s("text", { class: "count", x: frame.width - 4, y: middle + 4 }, ofExpected(group))
      : null,
  );
  return { line, height, marks: drawn.map(([dot]) => dot) };
}

function stripAxis(frame) {
  return s(
    "svg",
    { class: "axis", width: frame.width, height: 34, "aria-hidden": "true" },
    frame.none ? s("text", { x: frame.left - 34, y: 28 }, "none") : null,
    s("text", { class: "title", x: (frame.left + frame.right) / 2, y: 11 }, "reward"),
    frame.width > 560 ? s("text", { class: "count", x: frame.width - 4, y: 28 }, "rollouts") : null,
    frame.ticks.map((tick) => s("text", { x: frame.x(tick), y: 28 }, number(tick))),
  );
}

function stripFrame(lines, width) {
  const rollouts = lines.flatMap(({ rollouts: some }) => some);
  const none = rollouts.some((rollout) => rollout.reward === null);
  const wide = width > 560;
  const frame = {
    width,
    none,
    head: wide ? 0 : 14, // on a narrow page a group is named above its line
    left: (width > 900 ? 260 : wide ? 190 : 4) + (none ? NONE_ROOM : 0),
    right: width - (wide ? 80 : 34),
  };
  const domain = extent(
    rollouts.map((rollout) => rollout.reward).concat(lines.map(({ group }) => group.baseline)),
  ) || [0, 1];
  const along = scale(domain, [frame.left + 12, frame.right - 12]);
  frame.x = (reward) => (reward === null ? frame.left - 34 : along(reward));
  frame.ticks = ticks(along.domain, frame.right - frame.left < 260 ? 3 : 7);
  frame.most = Math.max(0, ...rollouts.map((rollout) => Math.abs(rollout.advantage ?? 0)));
  return frame;
}

function stripLegend(lines, most) {
  const has = (test) => lines.some(({ group, rollouts }) => rollouts.some((rollout) => test(rollout, group)));
  const circle = (kind, r = 5, style = {}) =>
    swatch(s("circle", { class: `dot ${kind}`, cx: 12, cy: 10, r, style }), 24, 20);
  const sizes = [
    ...new Set(lines.flatMap(({ rollouts }) => rollouts.map((rollout) => rollout.rows.length))),
  ].sort((a, b) => a - b);
  const some = sizes.length > 3 ? [sizes[0], sizes[Math.floor(sizes.length / 2)], sizes.at(-1)] : sizes;
  const ramp = s(
    "svg",
    { class: "swatch", width: 96, height: 12, "aria-hidden": "true" },
    s("rect", { class: "ramp", x: 0.5, y: 0.5, width: 95, height: 11, rx: 3 }),
  );
  return legend([
    has((rollout, group) => rollout.advantage !== null && !group.zero_variance)
      ? [ramp, `advantage, −${number(most)} to ${number(most)}`, "advantage"]
      : null,
    has((rollout, group) => group.zero_variance)
      ? [circle("flat"), "all rewards of the group are equal: nothing to learn", "flat"]
      : null,
    has((rollout, group) => rollout.advantage === null && !group.zero_variance)
      ? [circle("none"), "without an advantage: it left the loss before that stage", "none"]
      : null,
    has((rollout) => !rollout.trained) ? [circle("plain gone"), "dashed: not in the loss", "gone"] : null,
    lines.some(({ group }) => !group.complete)
      ? [
          swatch(s("rect", { class: "incomplete", width: 24, height: 14 }), 24),
          "incomplete group",
          "incomplete",
        ]
      : null,
    lines.some(({ group }) => isNumber(group.baseline))
      ? [swatch(s("line", { class: "mean", x1: 7, x2: 7, y1: 0, y2: 18 }), 14, 18), "baseline: the advantage is 0 here", "mean"]
      : null,
    ...(some.at(-1) > 1 ? some : []).map((size) => [circle("plain", radius(size)), plural(size, "segment"), "size"]),
  ]);
}

export function drawStrip(view) {
  const { model, width } = view;
  if (!model.groups.length) return message("There are no rows at this step, so there is no rollout to draw.");
  const lines = chosen(model, view);
  if (!lines.length) return message(whyNone(view));
  const frame = stripFrame(lines, width - 18); // room for the scroll bar
  let y = 0;
  const drawn = lines.map((line) => {
    const done = drawLine(line, frame, y);
    y += done.height;
    return done;
  });
  const grid = frame.ticks.map((tick) =>
    s("line", { class: "grid", x1: frame.x(tick), x2: frame.x(tick), y1: 0, y2: y }),
  );
  const dots = sum(lines.map(({ rollouts }) => rollouts.length));
  const svg = s(
    "svg",
    {
      width: frame.width,
      height: y,
      role: "group",
      "aria-label": `${plural(dots, "rollout")} of ${plural(lines.length, "group")} at their rewards`,
    },
    grid,
    drawn.map(({ line }) => line),
  );
  walk(
    svg,
    drawn.map(({ marks }) => marks),
  );
  return [
    stripLegend(lines, frame.most),
    h("div", { class: "scroll", role: "region", "aria-label": "Strip plot" }, stripAxis(frame), svg),
  ];
}
