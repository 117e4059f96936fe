// Elements to build the page with. Text becomes text nodes only; nothing here parses markup.
const SVG = "http://www.w3.org/2000/svg";

function dress(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style")
      for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else if (name === "on")
      for (const [event, f] of Object.entries(value)) element.addEventListener(event, f);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export const h = (tag, attributes = {}, ...children) =>
  dress(document.createElement(tag), attributes, children);
export const s = (tag, attributes = {}, ...children) =>
  dress(document.createElementNS(SVG, tag), attributes, children);
export const byId = (id) => document.getElementById(id);
export const message = (text) => [h("p", { class: "empty" }, text)];
export const reducedMotion = () => window.matchMedia("(prefers-reduced-motion: reduce)").matches;

// A button below a list of which not all is shown yet.
export function moreButton(text, click) {
  return h("button", { type: "button", class: "more", on: { click } }, text);
}

// Content is made at the first opening, and kept.
export function lazily(name, kind, content) {
  const details = h("details", { class: kind }, h("summary", {}, name));
  const fill = () => {
    if (details.childElementCount === 1) details.append(...content());
  };
  details.addEventListener("toggle", () => {
    if (details.open) fill();
  });
  details.fill = fill;
  return details;
}

// A table that scrolls by itself where the page is narrow.
export function plainTable(label, names, lines, caption = null) {
  const head = h(
    "tr",
    {},
    names.map((name) => h("th", { scope: "col" }, name)),
  );
  const body = lines.map((cells) =>
    h(
      "tr",
      {},
      cells.map((cell) => h("td", {}, cell)),
    ),
  );
  return h(
    "div",
    { class: "across", tabindex: 0, role: "region", "aria-label": label },
    h("table", { class: "plain" }, caption, h("thead", {}, head), h("tbody", {}, body)),
  );
}
