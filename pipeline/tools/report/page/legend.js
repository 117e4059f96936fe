// A legend, and the small drawings in it.
import { h, s } from "./dom.js";

// Marks by name and what they mean; entries that are null are left out.
export function legend(entries) {
  const items = entries
    .filter(Boolean)
    .map(([mark, text, kind]) => h("li", kind ? { "data-legend": kind } : {}, mark, h("span", {}, text)));
  return h("ul", { class: "legend", "aria-label": "Legend" }, items);
}

export function swatch(children, width = 18, height = 14) {
  return s("svg", { class: "swatch", width, height, "aria-hidden": "true" }, children);
}

// As rows look that are in the loss, or that left in this way.
export const rowSwatch = (kind) =>
  swatch(s("rect", { class: `left ${kind}`, x: 1, y: 1, width: 16, height: 12 }));
