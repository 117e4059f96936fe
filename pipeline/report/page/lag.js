// Rows by staleness, those in the loss on top of the axis, those that left on top of them.
import { h, message, s } from "./dom.js";
import { legend, rowSwatch } from "./legend.js";
import { count, extent, isNumber, plural, scale, ticks } from "./numbers.js";
import { tip } from "./tip.js";

const BINS = 24;

function binsOf(rows) {
  const [low, high] = extent(rows.map((row) => row.staleness));
  const size = Math.max(1, Math.ceil((high - low + 1) / BINS));
  const bins = Array.from({ length: Math.floor((high - low) / size) + 1 }, (_, k) => ({
    from: low + k * size,
    to: low + (k + 1) * size - 1,
    trained: 0,
    left: 0,
  }));
  for (const row of rows)
    bins[Math.floor((row.staleness - low) / size)][row.reason ? "left" : "trained"] += 1;
  return bins;
}

function drawBars(bins, width) {
  const height = 200;
  const [left, bottom] = [46, height - 36];
  const most = Math.max(...bins.map((bin) => bin.trained + bin.left));
  const y = scale([0, most], [bottom, 8]);
  const slot = Math.min((width - left - 6) / bins.length, 64);
  const every = Math.ceil(44 / slot);
  const labels = bins.map((bin) => `${bin.from}: ${bin.trained} in the loss, ${bin.left} left`);
  return s(
    "svg",
    {
      width,
      height,
      role: "img",
      "aria-label": `Rows by staleness: ${labels.join("; ")}`,
    },
    ticks([0, most], 4)
      .filter(Number.isInteger)
      .map((tick) => [
        s("line", { class: "grid", x1: left, x2: width, y1: y(tick), y2: y(tick) }),
        s("text", { class: "end", x: left - 6, y: y(tick) + 4 }, count(tick)),
      ])
      .flat(),
    bins.map((bin, k) => {
      const x = left + 4 + k * slot;
      const name = bin.from === bin.to ? String(bin.from) : `${bin.from}–${bin.to}`;
      const piece = (kind, from, size) =>
        size
          ? s("rect", {
              class: kind,
              x: x + slot * 0.12,
              width: slot * 0.76,
              y: y(from + size),
              height: y(from) - y(from + size),
            })
          : null;
      const node = s(
        "g",
        { class: "bin" },
        piece("left kept", 0, bin.trained),
        piece("left masked", bin.trained, bin.left),
        k % every ? null : s("text", { x: x + slot / 2, y: bottom + 16 }, name),
      );
      return tip(node, () => [
        `staleness ${name}`,
        `${plural(bin.trained, "row")} in the loss`,
        `${plural(bin.left, "row")} left`,
      ]);
    }),
    s("text", { class: "title", x: left + (slot * bins.length) / 2 + 4, y: height - 4 }, "policy versions"),
  );
}

export function drawLag({ model, width }) {
  if (!model.rows.length) return message("There are no rows at this step.");
  const known = model.rows.filter((row) => isNumber(row.staleness));
  if (!known.length)
    return message("No row has a policy version, so the staleness is not known.");
  const unknown = model.rows.length - known.length;
  return [
    legend([
      [rowSwatch("kept"), "in the loss", "trained"],
      [rowSwatch("masked"), "left", "left"],
    ]),
    drawBars(binsOf(known), width),
    unknown
      ? h(
          "p",
          { class: "note" },
          `${plural(unknown, "row")} without a policy version ${unknown === 1 ? "is" : "are"} not drawn.`,
        )
      : null,
  ];
}
