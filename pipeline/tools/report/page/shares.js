// Which groups the gradient comes from, under either of two recipes.
import { h, plainTable } from "./dom.js";
import { beginning, count, isNumber, number, sum } from "./numbers.js";

const MOST_GROUPS = 10;
const SEEN = 0.0005; // a share that moves by less is shown as +0.0

const perCent = (share) => `${(100 * share).toFixed(1)} %`;
const inOneLine = (share) => perCent(share).replace(" ", "\u00a0");
const points = (gap) => `${gap < 0 ? "−" : "+"}${Math.abs(100 * gap).toFixed(1)}`;

function sharesByGroup(model) {
  return model.groups
    .map((group) => {
      const rows = group.members.flatMap((rollout) => rollout.rows);
      const [one, other] = [sum(rows.map((row) => row.share)), sum(rows.map((row) => row.other_share))];
      return { group, one, other };
    })
    .sort((a, b) => Math.abs(b.one - b.other) - Math.abs(a.one - a.other));
}

export function drawShares(page, model, step) {
  const [first, second] = page.versus;
  if (!model.rows.some((row) => isNumber(row.share)))
    return [h("p", { class: "note" }, "Shares of the gradient are not known: the dump has no tokens. Set source.tokenizer.")];
  const groups = sharesByGroup(model);
  const [moved, cosine] = ["moved", "cosine"].map((name) => step.numbers[`versus/gradient_${name}`]);
  const some = groups.slice(0, MOST_GROUPS).filter(({ one, other }) => Math.abs(other - one) >= SEEN);
  const less = groups.length - some.length;
  return [
    h("h3", {}, "Which groups the gradient comes from"),
    h(
      "p",
      { class: "sentence" },
      isNumber(moved) ? `At this step ${perCent(moved)} of the gradient goes to other groups under ${second}` : "",
      isNumber(cosine) ? `; the cosine of what rows weigh is ${number(cosine)}.` : ".",
    ),
    h(
      "p",
      { class: "about" },
      "A row's share of the gradient is |advantage| × loss weight × tokens in the loss, divided by the sum over " +
        "all rows of the step. Where the advantage is per token, |advantage| is summed over the tokens. The cosine " +
        "compares the same numbers with their signs, row by row: at 1 both recipes weigh all rows alike.",
    ),
    some.length
      ? plainTable(
          "Shares of the gradient by group",
          ["group", first, second, "difference, in points"],
          some.map(({ group, one, other }) => [
            beginning(group.label?.replace(/\s+/g, " ") ?? String(group.id), 48),
            inOneLine(one),
            inOneLine(other),
            points(other - one),
          ]),
          h("caption", {}, less > 0 ? `the ${count(some.length)} of ${count(groups.length)} groups whose share moves most` : "groups by how much their share moves"),
        )
      : null,
  ];
}
