// Rows by staleness, those in the loss on top of the axis, those that left on top of them.
import { h } from "./dom.js";
import { binName, binsOf, drawHistogram } from "./histogram.js";
import { legend, rowSwatch } from "./legend.js";
import { isNumber, plural } from "./numbers.js";

export function drawLag({ model, width }) {
  const known = model.rows.filter((row) => isNumber(row.staleness));
  if (!known.length) return null;
  const unknown = model.rows.length - known.length;
  const bins = binsOf(known.map((row) => ({ value: row.staleness, kind: row.reason ? "masked" : "kept" })));
  const trained = (bin) => bin.counts.kept || 0;
  const gone = (bin) => bin.counts.masked || 0;
  return [
    legend([
      [rowSwatch("kept"), "in the loss", "trained"],
      [rowSwatch("masked"), "not in the loss", "left"],
    ]),
    drawHistogram({
      bins,
      kinds: ["kept", "masked"],
      width,
      across: "policy versions behind the newest",
      up: "rows",
      label: `Rows by staleness: ${bins.map((bin) => `${binName(bin)}: ${trained(bin)} in the loss, ${gone(bin)} not in the loss`).join("; ")}`,
      tipOf: (bin) => [
        `staleness ${binName(bin)}`,
        `${plural(trained(bin), "row")} in the loss`,
        `${plural(gone(bin), "row")} not in the loss`,
      ],
    }),
    unknown
      ? h(
          "p",
          { class: "note" },
          `${plural(unknown, "row")} without a policy version ${unknown === 1 ? "is" : "are"} not drawn.`,
        )
      : null,
  ];
}
