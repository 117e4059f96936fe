// When the run began, what it ran on, and how it was configured.
import { byId, h } from "./dom.js";

export function drawRun(run) {
  byId("run").hidden = !run;
  if (!run) return;
  const versions = Object.entries(run.versions).map(([name, version]) => `${name} ${version}`);
  byId("run").replaceChildren(
    h("summary", {}, `This run: began ${run.began}`),
    h("p", {}, `Written ${run.written}. ${versions.join(", ")}.`),
    run.config === null ? "" : h("p", {}, h("code", {}, `headrace ${run.overrides.join(" ")}`.trim())),
    run.config === null ? "" : h("pre", { tabindex: 0 }, h("code", {}, run.config)),
  );
}
