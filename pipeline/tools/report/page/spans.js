// A response token by token, coloured by a number that each token has: as text where that is known, else as
// a strip of cells.
import { diverging } from "./colour.js";
import { h, s } from "./dom.js";
import { legend, swatch } from "./legend.js";
import { count, isNumber, number } from "./numbers.js";
import { tip } from "./tip.js";

const CENTRES = { importance_weight: 1 }; // what leaves a token as it is
const STRONGEST = 45; // percent of the palette's end behind text, which is to be read
const centreOf = (name) => CENTRES[name] ?? 0;
const worded = (name) => name.replaceAll("_", " ");

// The names of the numbers that tokens of these rollouts have, and how far each goes from its centre.
export function shadesOf(rollouts) {
  const most = new Map();
  for (const rollout of rollouts)
    for (const row of rollout.rows)
      for (const [name, values] of Object.entries(row.by_token?.values ?? {}))
        for (const value of values)
          if (isNumber(value))
            most.set(name, Math.max(most.get(name) ?? 0, Math.abs(value - centreOf(name))));
  return most;
}

export function shadeLegend(name, most, rollouts) {
  const strands = rollouts.flatMap((rollout) => rollout.rows.map((row) => row.by_token).filter(Boolean));
  const silent = strands.some((strand) => strand.values[name]?.includes(null));
  const ramp = swatch(s("rect", { class: "ramp", x: 0.5, y: 0.5, width: 95, height: 11, rx: 3 }), 96, 12);
  const [low, high] = [centreOf(name) - most, centreOf(name) + most].map(number);
  return legend([
    [ramp, `tokens by ${worded(name)}, ${low} to ${high}`, "shade"],
    silent ? [h("span", { class: "token out" }, "–"), "not in the loss", "out"] : null,
  ]);
}

export function shadePicker(names, chosenName, change) {
  if (names.length < 2) return null;
  const options = names.map((name) =>
    h("option", { value: name, selected: name === chosenName }, worded(name)),
  );
  return h(
    "label",
    { class: "shade" },
    "tokens by ",
    h("select", { on: { change: (e) => change(e.target.value) } }, options),
  );
}

function drawToken(strand, i, name, most) {
  const value = strand.values[name]?.[i] ?? null;
  const known = isNumber(value);
  const colour = diverging((value ?? 0) - centreOf(name), most, {
    strongest: strand.texts ? STRONGEST : 100,
    middle: strand.texts ? "var(--panel)" : "var(--middle)",
  });
  const span = h(
    "span",
    { class: known ? "token" : "token out", tabindex: -1, style: known ? { "background-color": colour } : {} },
    strand.texts ? strand.texts[i] : null,
  );
  const place = i < strand.at ? i : i + strand.missing;
  return tip(span, () => [
    strand.texts ? `token ${count(place)}: ${JSON.stringify(strand.texts[i])}` : `token ${count(place)}`,
    ...Object.entries(strand.values).map(([each, values]) => `${worded(each)} ${number(values[i])}`),
  ]);
}

// One stop for the tab key; the arrow keys go from token to token.
function listenForArrows(line) {
  line.addEventListener("keydown", (e) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
    if (!by) return;
    e.preventDefault();
    const tokens = [...line.querySelectorAll(".token")];
    const at = tokens.indexOf(document.activeElement);
    tokens[Math.min(Math.max(at + by, 0), tokens.length - 1)]?.focus();
  });
}

export function drawTokens(strand, name, most) {
  const size = Object.values(strand.values)[0].length;
  const drawn = Array.from({ length: size }, (_, i) => drawToken(strand, i, name, most));
  const gap = h("span", { class: "gap" }, ` … ${count(strand.missing)} tokens left out … `);
  const line = h(
    "p",
    {
      class: strand.texts ? "text" : "text cells",
      tabindex: 0,
      role: "group",
      "aria-label": "Tokens by number; the arrow keys go from one to the next",
    },
    drawn.slice(0, strand.at),
    strand.missing ? gap : null,
    drawn.slice(strand.at),
  );
  listenForArrows(line);
  return line;
}
