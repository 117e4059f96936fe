// For each minibatch a tape per rank; pieces are micro-batches, as wide as their tokens.
import { h, s } from "./dom.js";
import { legend, swatch } from "./legend.js";
import { NONE, count, isNumber, plural, sum } from "./numbers.js";
import { tip } from "./tip.js";

function tapesOf(rows, weigh) {
  const minibatches = new Map();
  for (const row of rows) {
    const name = row.minibatch ?? null;
    if (!minibatches.has(name)) minibatches.set(name, new Map());
    const ranks = minibatches.get(name);
    const rank = row.rank ?? 0;
    if (!ranks.has(rank)) ranks.set(rank, new Map());
    const pieces = ranks.get(rank);
    const piece = row.microbatch ?? 0;
    const before = pieces.get(piece) || { size: 0, rows: 0 };
    pieces.set(piece, { size: before.size + weigh(row), rows: before.rows + 1 });
  }
  const ordered = (map) => [...map].sort(([a], [b]) => (a === null) - (b === null) || a - b);
  return ordered(minibatches).map(([name, ranks]) => ({
    name,
    ranks: ordered(ranks).map(([rank, pieces]) => ({
      rank,
      pieces: ordered(pieces),
      size: sum([...pieces.values()].map((piece) => piece.size)),
    })),
  }));
}

function imbalance(sizes) {
  const mean = sum(sizes) / sizes.length;
  return mean ? (Math.max(...sizes) / mean).toFixed(2) : NONE;
}

function drawPiece([name, piece], from, whole, width, unit) {
  const percent = whole ? (piece.size / whole) * 100 : 0;
  const text = count(name);
  const node = s(
    "svg",
    { class: "piece", x: `${from}%`, width: `${percent}%`, height: 22 },
    s("rect", { class: name % 2 ? "odd" : "even", width: "100%", height: "100%" }),
    s("rect", { class: "cut", width: 1, height: "100%" }),
    (percent / 100) * width > 8 * text.length + 8 ? s("text", { x: 5, y: 15.5 }, text) : null,
  );
  return tip(node, () => [
    `micro-batch ${text}`,
    `${count(piece.size)} ${unit}`,
    `${plural(piece.rows, "row")}`,
  ]);
}

function drawTapes({ name, ranks }, width, unit) {
  const whole = Math.max(...ranks.map((rank) => rank.size));
  const room = width - 174;
  const title = name === null ? "not split into minibatches" : `minibatch ${count(name)}`;
  const all = ranks.flatMap((rank) => rank.pieces.map(([, piece]) => piece.size));
  const overRanks = `${imbalance(ranks.map((rank) => rank.size))} over ${plural(ranks.length, "rank")}`;
  const overPieces = `${imbalance(all)} over ${plural(all.length, "micro-batch", "micro-batches")}`;
  const facts = all.length > 1 ? `max / mean: ${overRanks}, ${overPieces}` : "";
  return h(
    "div",
    { class: "minibatch" },
    h("h3", {}, title, h("span", { class: "facts" }, facts)),
    ranks.map(({ rank, pieces, size }) => {
      let from = 0;
      const drawn = pieces.map((piece) => {
        const node = drawPiece(piece, from, whole, room, unit);
        from += whole ? (piece[1].size / whole) * 100 : 0;
        return node;
      });
      const idle =
        100 - from > 0.05
          ? s("rect", { class: "idle", x: `${from}%`, width: `${100 - from}%`, height: 22 })
          : null;
      return h(
        "div",
        { class: "rank" },
        h("span", { class: "who" }, `rank ${count(rank)}`),
        s(
          "svg",
          {
            class: "tape",
            height: 22,
            role: "img",
            "aria-label":
              `${title}, rank ${count(rank)}: ` +
              `${plural(pieces.length, "micro-batch", "micro-batches")}, ${count(size)} ${unit}`,
          },
          idle,
          drawn,
        ),
        h("span", { class: "size" }, `${count(size)} ${unit}`),
      );
    }),
  );
}

export function drawTape({ model, width }) {
  // A row that was masked later still takes its place in its minibatch.
  const rows = model.rows.filter((row) => row.minibatch !== null || !row.reason);
  if (!rows.length) return null;
  const known = rows.some((row) => isNumber(row.tokens) && row.tokens > 0);
  const unit = known ? "tokens" : "rows";
  const minibatches = tapesOf(rows, (row) => (known ? row.tokens || 0 : 1));
  // Without ranks and micro-batches each bar would be one piece.
  if (minibatches.every(({ ranks }) => ranks.length === 1 && ranks[0].pieces.length === 1)) return null;
  const waits = minibatches.some(({ ranks }) =>
    ranks.some(({ size }) => size < Math.max(...ranks.map((rank) => rank.size))),
  );
  const masked = rows.some((row) => row.reason);
  return [
    known ? null : h("p", { class: "note" }, "The rows have no tokens here, so the widths are numbers of rows."),
    masked
      ? h("p", { class: "note" }, `Masked rows go through the model too: their ${unit} are counted here, and are not in the loss.`)
      : null,
    waits
      ? legend([[swatch(s("rect", { class: "idle", x: 0.5, y: 0.5, width: 17, height: 13 })), "idle until the longest rank is done", "idle"]])
      : null,
    h(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": "Tapes by minibatch" },
      minibatches.map((minibatch) => drawTapes(minibatch, width, unit)),
    ),
  ];
}
