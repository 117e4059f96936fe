// Rows of a step as a table, some at a time. The content of rows becomes text nodes only.
import { h, message } from "./dom.js";
import { NONE, count, isNumber, number, shortId } from "./numbers.js";
import { ask, columnName, link, rangeOf, reasonName } from "./view_api.js";

const COUNT = 50; // rows at a time
const AT_ONCE = 20000; // characters of a text that are fetched when its row is opened
const [LINE, END] = [180, 60]; // characters of a text in the table, and how many of them are its end
// In this order; the other columns are in an opened row.
const SHOWN = ["group_id", "rollout_id", "rollout_reward", "advantage", "loss_weight", "tokens", "reason"];
const OTHERS = "other_columns"; // a JSON object of what else the dump has that was replayed
const PARTS_OF_TEXT = "response_parts"; // the response again, in the parts that a tokenizer counts
const TEXTS = ["prompt", "response", "ground_truth"]; // first, when a row is opened

const oneLine = (cell) => {
  const [text, end] = [cell.start, cell.end ?? cell.start].map((part) => part.replace(/\s+/g, " ").trim());
  return text.length > LINE || cell.end ? `${text.slice(0, LINE - END)} … ${end.slice(-END)}` : text;
};

function shownValue(name, value) {
  if (value === null) return NONE;
  if (name === "reason") return reasonName(value.start);
  if (value?.start !== undefined) return oneLine(value);
  if (Array.isArray(value)) return value.map(number).join(", ");
  return /_id$|^row$/.test(name) ? String(value) : number(value);
}

// Groups and rollouts are named by their labels, if they have any.
const labelled = { group_id: "group_label", rollout_id: "rollout_label" };

// In a replay of groups without ids, a label is the prompt and a hash. Beside the prompt, the hash is enough.
const labelText = (label, besidePrompt) => (besidePrompt && / (#[0-9a-f]{8})[0-9a-f]{8}$/.exec(label)?.[1]) || shortId(label);

// `run`: its place; `wanted`: what is asked of the rows; `state`: for links; `without`: columns that are left out.
export function rowsPanel({ run, name, step, wanted, state, title = null, without = [] }) {
  const body = h("div", { class: "body" });
  const pager = h("div", { class: "pager" });
  const panel = h("div", { class: "panel", role: "group", "aria-label": `Rows of ${name}, step ${step}` });
  panel.append(...[title ? h("h3", {}, title) : null, pager, body].filter(Boolean));
  const load = async (offset) => {
    body.setAttribute("aria-busy", "true");
    let answer;
    try {
      answer = await ask("rows", { run, step, ...wanted, offset, count: COUNT });
    } catch (error) {
      pager.replaceChildren();
      body.replaceChildren(h("p", { class: "empty", role: "alert" }, error.message));
      return;
    } finally {
      body.removeAttribute("aria-busy");
    }
    const go = (text, to, off) =>
      h("button", { type: "button", disabled: off, on: { click: () => load(to) } }, text);
    const said = rangeOf(offset, answer.rows.length, answer.found, "rows");
    const of = answer.found < answer.of ? `, out of ${count(answer.of)} in the step` : "";
    pager.replaceChildren(
      h("output", {}, said + of),
      ...(answer.found > COUNT
        ? [
            go("previous rows", Math.max(0, offset - COUNT), offset === 0),
            go("next rows", offset + COUNT, offset + COUNT >= answer.found),
          ]
        : []),
    );
    if (!answer.rows.length) {
      body.replaceChildren(...message(answer.of ? "No row of this step matches." : "This step has no rows."));
      return;
    }
    body.replaceChildren(rowsTable({ run, step, answer, state, without, sort: wanted.sort, label: `Rows of ${name}, step ${step}` }));
  };
  load(0);
  return panel;
}

function rowsTable({ run, step, answer, state, without, sort, label }) {
  const names = answer.columns.map(([column]) => column);
  const has = (column) => names.includes(column);
  const value = (cells, column) => cells[names.indexOf(column) + 1]; // in front is the row's place in the file
  const texts = ["prompt", "response"].filter((column) => has(column) && !without.includes(column));
  // The label of a group that is its prompt is not said twice.
  const flat = (cell) => (cell?.start ?? "").replace(/\s+/g, " ").trim();
  const isPrompt = (cells) => flat(value(cells, "group_label")) && flat(value(cells, "prompt")).includes(flat(value(cells, "group_label")));
  const once = has("group_label") && has("prompt") && answer.rows.every(isPrompt);
  const shown = SHOWN.filter((column) => has(column) && !(once && column === "group_id"));
  if (!has("rollout_reward") && has("reward")) shown.splice(shown.indexOf("rollout_id") + 1, 0, "reward");
  if (has(sort) && !shown.includes(sort)) shown.splice(shown.indexOf("reason"), 0, sort);
  const width = shown.length + texts.length + 1;
  const head = h(
    "tr",
    {},
    h("th", { scope: "col" }, h("span", { class: "unseen" }, "open")),
    [...shown, ...texts].map((column) => h("th", { scope: "col", class: column }, columnName(column))),
  );
  const body = answer.rows.flatMap((cells) => {
    const id = value(cells, "row") ?? cells[0];
    const detail = h("tr", { class: "detail", hidden: true }, h("td", { colspan: width }));
    const button = h("button", { type: "button", class: "open", "aria-expanded": "false", "aria-label": `Open row ${id}` }, "▸");
    const toggle = () => {
      detail.hidden = !detail.hidden;
      button.setAttribute("aria-expanded", String(!detail.hidden));
      button.textContent = detail.hidden ? "▸" : "▾";
      if (!detail.firstChild.childElementCount)
        detail.firstChild.append(...opened({ run, step, cells, key: answer.keys[answer.rows.indexOf(cells)], columns: answer.columns, value, has, state }));
    };
    button.addEventListener("click", toggle);
    const line = h(
      "tr",
      { class: "line", "data-row": id },
      h("td", { class: "opens" }, button),
      shown.map((column) => {
        const label = has(labelled[column]) ? value(cells, labelled[column]) : null;
        const text = label ? labelText(oneLine(label), has("prompt")) : shownValue(column, value(cells, column));
        const full = label ? oneLine(label) : isNumber(value(cells, column)) ? String(value(cells, column)) : null;
        const trained = column === "reason" && value(cells, column)?.start === "trained";
        return h("td", { class: `${column}${column === "reason" && !trained ? " gone" : ""}`, "data-label": columnName(column), title: full }, text);
      }),
      texts.map((column) => h("td", { class: `text ${column}`, "data-label": columnName(column) }, h("div", {}, shownValue(column, value(cells, column))))),
    );
    line.addEventListener("click", (e) => {
      if (e.target !== button && !window.getSelection().toString()) toggle();
    });
    return [line, detail];
  });
  const table = h("table", { class: "plain as-cards row-table" }, h("thead", {}, head), h("tbody", {}, body));
  return h("div", { class: "across", tabindex: 0, role: "region", "aria-label": label }, table);
}

// All that is known of a row: its texts, and its other columns.
function opened({ run, step, cells, key, columns, value, has, state }) {
  const kinds = new Map(columns);
  const isText = (column) => kinds.get(column) === "text" && !["reason", "action", "status", PARTS_OF_TEXT].includes(column);
  const texts = [...TEXTS.filter(has), ...[...kinds.keys()].filter((column) => isText(column) && !TEXTS.includes(column))];
  const others = [...kinds.keys()].filter((column) => !texts.includes(column) && column !== PARTS_OF_TEXT);
  const links = [
    has("group_id")
      ? h("a", { href: link({ ...state, view: "steps", step, group: String(value(cells, "group_id")), reason: "", text: "" }) }, "all rows of this group")
      : null,
    key ? h("a", { href: link({ view: "prompt", prompt: key }) }, "this prompt in all steps") : null,
  ];
  return [
    h("p", { class: "links" }, links),
    texts
      .filter((column) => value(cells, column) !== null && (column !== OTHERS || value(cells, column).characters))
      .map((column) => [h("h4", {}, columnName(column)), (column === OTHERS ? otherColumns : wholeText)({ run, step, place: cells[0], column, cell: value(cells, column) })]),
    h(
      "dl",
      {},
      others.map((column) =>
        h("div", {}, h("dt", {}, columnName(column)), h("dd", {}, shownValue(column, value(cells, column)))),
      ),
    ),
  ].flat(3).filter(Boolean);
}

// The other columns of a dump by name; values that are not text as JSON.
function otherColumns(where) {
  const list = h("dl", { class: "others" });
  const fill = (text) => {
    let found;
    try {
      found = Object.entries(JSON.parse(text));
    } catch {
      found = [["other columns", text]];
    }
    const shown = (value) => (typeof value === "string" ? value : JSON.stringify(value));
    list.replaceChildren(...found.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, shown(value)))));
  };
  if (where.cell.start.length >= where.cell.characters) fill(where.cell.start);
  else
    ask("text", { run: where.run, step: where.step, place: where.place, column: where.column })
      .then(({ text }) => fill(text))
      .catch((error) => list.replaceWith(h("p", { class: "empty", role: "alert" }, error.message)));
  return list;
}

// Whole lines, 8,000 characters or more: a browser lays out the parts in sight alone (1 MB with emoji: 1 s, as one text 12 s).
const PARTS = /[^]{8000}[^\n]*\n?|[^]+/g;

// The known part of a text. The rest is fetched at once if it is short, else when it is asked for.
export function wholeText({ run, step, place, column, cell }) {
  const box = h("p", { class: "text", tabindex: cell.characters > 1200 ? 0 : null }, cell.start || "(empty)");
  const part = h("div", { class: "whole" }, box);
  if (cell.start.length >= cell.characters) return part;
  const load = async () => {
    try {
      const { text } = await ask("text", { run, step, place, column });
      part.replaceChildren(box);
      box.replaceChildren(...text.match(PARTS).map((lines) => h("span", { class: "lines" }, lines)));
    } catch (error) {
      part.append(h("p", { class: "empty", role: "alert" }, error.message));
    }
  };
  if (cell.characters <= AT_ONCE) load();
  else part.append(h("button", { type: "button", class: "more", on: { click: load } }, `show all ${count(cell.characters)} characters`));
  return part;
}
