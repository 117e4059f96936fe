// What the expectation of each recipe's gradient is, a table for each task and size of groups.
import { h, message, plainTable } from "./dom.js";
import { NONE, isNumber, number, plural } from "./numbers.js";

const NAMES = ["ratio by parameter", "bias", "cosine", "variance", "scale"];

const decimals = (value) => (isNumber(value) ? value.toFixed(4).replace(/^-/, "−") : NONE);
const percent = (value) => (isNumber(value) ? `${(100 * value).toFixed(1)} %` : NONE);

const cells = (judgement) => [
  judgement.ratio.map(decimals).join(" "),
  percent(judgement.relative_bias),
  decimals(judgement.cosine),
  number(judgement.variance),
  number(judgement.scale),
];

// A table of the advantage alone, or one of the loss.
function tableOf(certificates, part, judgementOf) {
  const lines = certificates.map((certificate) => [certificate.recipe, ...cells(judgementOf(certificate))]);
  return plainTable(part, ["recipe", ...NAMES], lines, h("caption", {}, part));
}

function drawPlace(certificates) {
  const [first] = certificates;
  const held = certificates.filter((certificate) => !certificate.refused);
  const refused = certificates.filter((certificate) => certificate.refused);
  const outcomes = held.slice(0, 1).map((certificate) => `, ${plural(certificate.outcomes, "outcome")}`);
  return h(
    "div",
    {},
    h("h3", {}, `${first.task}, groups of ${first.group_size}${outcomes.join("")}`),
    held.length ? tableOf(held, "the advantage alone", (certificate) => certificate.advantage) : null,
    held.length ? tableOf(held, "the loss with its weights", (certificate) => certificate.loss) : null,
    refused.map((certificate) =>
      h("p", { class: "note" }, `without ${certificate.recipe}: ${certificate.refused}`),
    ),
  );
}

export function drawCertificates(page) {
  const places = new Map();
  for (const certificate of page.certificates) {
    const place = JSON.stringify([certificate.task, certificate.group_size]);
    places.set(place, [...(places.get(place) || []), certificate]);
  }
  return places.size ? [...places.values()].map(drawPlace) : message("No recipe was certified.");
}
