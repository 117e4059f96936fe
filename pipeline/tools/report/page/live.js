// A page of a run that goes on loads itself anew, and what was chosen on it stays.
import { byId, h } from "./dom.js";

const DAY = 24 * 3600;
const CALM = 2000; // milliseconds without a key or a pointer, before the page may load itself anew
const FOLDS = "details[id], details[data-group]";
const nameOf = (fold) => fold.id || fold.dataset.group;
const strip = () => document.querySelector("#strip .scroll");

function foldAs(kept) {
  for (const fold of document.querySelectorAll(FOLDS)) {
    const before = kept.folds.find(([name]) => name === nameOf(fold));
    if (before) fold.open = before[1];
  }
}

// The field that had the focus gets it again.
function focusAs({ focus }) {
  const field = focus && byId(focus);
  if (!field) return;
  field.focus({ preventScroll: true });
  if (field.type === "search") field.setSelectionRange(field.value.length, field.value.length);
}

// What a reader has done on the page, but for the address, which the browser keeps.
function choices(page, state) {
  const newest = state.index >= page.steps.length - 1 && state.group === null;
  const { sort, filter } = state;
  return {
    step: newest ? null : page.steps[state.index].step, // null: the newest
    sort,
    filter,
    scroll: window.scrollY,
    strip: strip()?.scrollTop ?? 0,
    folds: [...document.querySelectorAll(FOLDS)].map((fold) => [nameOf(fold), fold.open]),
    focus: document.activeElement?.id || null,
  };
}

function restoreAs(kept) {
  foldAs(kept);
  focusAs(kept);
  if (strip()) strip().scrollTop = kept.strip;
  window.scrollTo(0, kept.scroll);
}

// Whether the reader types, draws the slider, or has marked text: a reload would undo it.
function listenForReader() {
  let last = -Infinity;
  for (const event of ["keydown", "pointerdown", "pointerup", "input", "wheel"])
    window.addEventListener(event, () => (last = performance.now()), { capture: true, passive: true });
  return () => performance.now() - last < CALM || !(getSelection()?.isCollapsed ?? true);
}

// Calls `restore` with the choices that the page had before it loaded itself anew, and does so again in time.
export function followRun(page, state, restore) {
  const run = page.run;
  if (!run) return;
  const kept = history.state?.kept; // it outlives the loading
  if (kept) {
    history.replaceState(null, "");
    restore(kept);
    restoreAs(kept);
  }
  if (run.live === null) return;
  const age = Math.max(0, (Date.now() - Date.parse(run.written)) / 1000);
  // A page that is written rarely is asked for rarely: what is shown is at most a tenth older than it need be.
  const wait = 1000 * Math.max(1, run.live, age / 10);
  const silent = age > Math.max(60, 20 * run.live);
  const isBusy = listenForReader();
  let timer = null;
  const reload = () => {
    if (document.hidden) {
      document.addEventListener("visibilitychange", reload, { once: true });
    } else if (isBusy()) {
      timer = setTimeout(reload, CALM / 4);
    } else {
      history.replaceState({ kept: choices(page, state) }, "");
      location.reload();
    }
  };
  const pause = h("button", { type: "button", id: "pause", on: { click: () => turn() } }, "pause");
  const turn = () => {
    const paused = timer === null;
    clearTimeout(timer);
    timer = paused ? setTimeout(reload, CALM) : null;
    pause.textContent = paused ? "pause" : "follow";
  };
  if (age < DAY) timer = setTimeout(reload, wait);
  const words = silent ? "The run is slow, or was stopped" : "The run goes on";
  byId("live").hidden = false;
  byId("live").replaceChildren(`${words}: last written ${run.written}. `, silent ? "" : pause);
}
