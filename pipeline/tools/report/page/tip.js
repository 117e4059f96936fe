// One box that describes the mark under the pointer or with the focus.
import { byId, h } from "./dom.js";

const tips = new WeakMap();

export function tip(element, lines) {
  element.setAttribute("data-tip", "");
  tips.set(element, lines);
  return element;
}

export const hasTip = (element) => tips.has(element);

export function showTip(element) {
  const box = byId("tip");
  const lines = tips.get(element)();
  box.replaceChildren(...lines.map((line, i) => h(i ? "div" : "strong", {}, line)));
  box.hidden = false;
  const at = element.getBoundingClientRect();
  const size = box.getBoundingClientRect();
  const room = document.documentElement.clientWidth;
  const left = Math.min(Math.max(8, at.left + at.width / 2 - size.width / 2), room - size.width - 8);
  const above = at.top - size.height - 8;
  box.style.left = `${Math.max(4, left)}px`;
  box.style.top = `${above > 4 ? above : at.bottom + 8}px`;
}

export const hideTip = () => {
  byId("tip").hidden = true;
};

export function listenForTips() {
  for (const event of ["pointerover", "focusin"]) {
    document.addEventListener(event, (e) => {
      const element = e.target.closest && e.target.closest("[data-tip]");
      if (element && tips.has(element)) showTip(element);
      else hideTip();
    });
  }
  for (const event of ["pointerleave", "focusout"]) document.documentElement.addEventListener(event, hideTip);
  document.addEventListener("scroll", hideTip, { capture: true, passive: true });
  document.addEventListener("keydown", (e) => {
    if (e.key === "Escape") hideTip();
  });
}
