// The data of the page. Other modules get objects with the fields listed here and no others.
// page_schema.py has the same lists with the meaning of each field; a test compares the two.
const FIELDS = {
  PageData: ["title", "recipe", "steps", "curve_steps", "curves", "versus", "equal", "difference", "certificates", "symptoms", "failed", "notices", "unsaid", "rows_kept", "recorded", "totals", "run"],
  PageAdvisory: ["name", "text", "cause", "because", "certain"],
  PageFailed: ["said", "reasons"],
  PageRemedy: ["text", "overrides", "when", "unless"],
  PageSymptom: ["name", "title", "shows", "means", "remedies"],
  PageRun: ["began", "written", "live", "versions", "overrides", "config"],
  RecipeStage: ["name", "text"],
  PageJudgement: ["ratio", "relative_bias", "cosine", "variance", "scale"],
  PageCertificate: ["recipe", "task", "group_size", "outcomes", "refused", "advantage", "loss"],
  Step: ["step", "funnel", "shown", "groups", "rows", "numbers", "verdict", "advisories", "unchecked"],
  PageLevel: ["name", "rows", "rollouts", "groups", "tokens", "out"],
  PageLeft: [
    "reason",
    "action",
    "rows",
    "rollouts",
    "groups",
    "tokens",
    "rollouts_in_part",
    "groups_in_part",
  ],
  Shown: ["groups", "of"],
  Groups: [
    "id",
    "label",
    "asked",
    "prompt",
    "rollouts",
    "expected",
    "compared",
    "baseline",
    "reward_mean",
    "reward_std",
    "zero_variance",
    "complete",
    "staleness",
  ],
  ShownRows: [
    "row",
    "group",
    "rollout",
    "reward",
    "rewards",
    "compared",
    "advantage",
    "advantage_by_row",
    "tokens",
    "weight",
    "share",
    "other_share",
    "status",
    "reason",
    "staleness",
    "minibatch",
    "microbatch",
    "rank",
    "response",
    "by_token",
    "beside",
  ],
  PageText: ["start", "missing", "end"],
  PageTokens: ["texts", "values", "at", "missing"],
};

// The fields of a level, and of what left there, that count something.
export const UNITS = ["rows", "rollouts", "groups", "tokens"];

const objectOf = (kind, valueOf) =>
  Object.fromEntries(FIELDS[kind].map((name) => [name, valueOf(name) ?? null]));
const read = (kind, value) => objectOf(kind, (name) => value[name]);

// The lines of a table, which the data has as columns.
function readTable(kind, table) {
  return table[FIELDS[kind][0]].map((_, i) => objectOf(kind, (name) => table[name][i]));
}

const readText = (value) => value && read("PageText", value);

export const readGroups = (step) =>
  readTable("Groups", step.groups).map((group) => ({
    ...group,
    asked: readText(group.asked),
    prompt: readText(group.prompt),
  }));
export const readRows = (step) =>
  readTable("ShownRows", step.rows).map((row) => ({
    ...row,
    response: readText(row.response),
    by_token: row.by_token && read("PageTokens", row.by_token),
  }));

// A group with no known fields.
export const unknownGroup = () => objectOf("Groups", () => null);

function readLevel(value) {
  const level = read("PageLevel", value);
  return { ...level, out: level.out.map((left) => read("PageLeft", left)) };
}

function readStep(value) {
  const step = read("Step", value);
  const advisories = step.advisories.map((advisory) => read("PageAdvisory", advisory));
  return { ...step, advisories, funnel: step.funnel.map(readLevel), shown: read("Shown", step.shown) };
}

function readCertificate(value) {
  const certificate = read("PageCertificate", value);
  const judgement = (name) => read("PageJudgement", certificate[name]);
  return { ...certificate, advantage: judgement("advantage"), loss: judgement("loss") };
}

function readSymptom(value) {
  const symptom = read("PageSymptom", value);
  return { ...symptom, remedies: symptom.remedies.map((remedy) => read("PageRemedy", remedy)) };
}

// The data in the page's JSON. The tables of a step stay columns until the step is shown.
export function readPage(text) {
  const page = read("PageData", JSON.parse(text));
  return {
    ...page,
    recipe: page.recipe.map((stage) => read("RecipeStage", stage)),
    steps: page.steps.map(readStep),
    symptoms: (page.symptoms ?? []).map(readSymptom),
    run: page.run && read("PageRun", page.run),
    certificates: page.certificates && page.certificates.map(readCertificate),
  };
}
