// A page of a run that goes on loads itself anew, and what was chosen on it stays.
import { byId } from "./dom.js";

const DAY = 24 * 3600;
const FOLDS = "details[id], details[data-group]";
const nameOf = (fold) => fold.id || fold.dataset.group;

function openFolds(names) {
  for (const fold of document.querySelectorAll(FOLDS)) if (names.includes(nameOf(fold))) fold.open = true;
}

// Calls `restore` with the choices that the page had before it loaded itself anew, and does so again in time.
export function followRun(page, state, restore) {
  const run = page.run;
  if (!run) return;
  const kept = history.state?.kept; // it outlives the loading
  if (kept) {
    history.replaceState(null, "");
    restore(kept);
    openFolds(kept.open);
    window.scrollTo(0, kept.scroll);
  }
  if (run.live === null) return;
  const age = Math.max(0, (Date.now() - Date.parse(run.written)) / 1000);
  // Who writes rarely, or no more, is asked rarely: what is shown is at most a tenth older than it need be.
  const wait = Math.max(1, run.live, age / 10);
  const silent = age > Math.max(60, 20 * run.live);
  byId("live").hidden = false;
  byId("live").textContent =
    `${silent ? "The run goes on, or was stopped" : "The run goes on"}: last written ${run.written}.`;
  const reload = () => {
    if (document.hidden) {
      document.addEventListener("visibilitychange", reload, { once: true });
      return;
    }
    const last = state.index >= page.steps.length - 1;
    const open = [...document.querySelectorAll(FOLDS)].filter((fold) => fold.open).map(nameOf);
    const step = last ? null : page.steps[state.index].step; // null: the newest
    const { sort, filter } = state;
    history.replaceState({ kept: { step, sort, filter, scroll: window.scrollY, open } }, "");
    location.reload();
  };
  if (age < DAY) setTimeout(reload, 1000 * wait);
}
