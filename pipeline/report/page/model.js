// Columns become groups of rollouts of rows, once per step. Ids are labels: compared, never counted with.
const models = new WeakMap();

function modelOf(step) {
  if (!models.has(step)) models.set(step, readStep(step));
  return models.get(step);
}

function readStep(step) {
  const groups = new Map();
  column(step.groups, "id").forEach((id, i) => {
    const at = (name) => column(step.groups, name)[i] ?? null;
    groups.set(String(id), {
      id,
      label: at("label"),
      counted: at("rollouts"),
      expected: at("expected"),
      segments: at("segments"),
      mean: at("reward_mean"),
      std: at("reward_std"),
      low: at("reward_min"),
      high: at("reward_max"),
      flat: at("zero_variance") === true,
      complete: at("complete") !== false,
      lag: at("staleness"),
      rollouts: new Map(),
    });
  });
  const rows = column(step.rows, "row").map((row, i) => {
    const at = (name) => column(step.rows, name)[i] ?? null;
    return {
      row,
      group: at("group"),
      rollout: at("rollout"),
      reward: at("reward"),
      advantage: at("advantage"),
      byRow: at("advantage_by_row"),
      tokens: at("tokens"),
      weight: at("weight"),
      status: at("status"),
      reason: at("reason") || "",
      lag: at("staleness"),
      minibatch: at("minibatch"),
      microbatch: at("microbatch"),
      rank: at("rank"),
    };
  });
  for (const row of rows) placeRow(groups, row);
  const found = [...groups.values()];
  for (const group of found) group.rollouts = [...group.rollouts.values()].map(readRollout);
  return { rows, groups: found };
}

function placeRow(groups, row) {
  const key = String(row.group);
  if (!groups.has(key)) {
    groups.set(key, {
      id: row.group,
      label: null,
      counted: null,
      expected: null,
      segments: null,
      mean: null,
      std: null,
      low: null,
      high: null,
      flat: false,
      complete: true,
      lag: null,
      rollouts: new Map(),
    });
  }
  const group = groups.get(key);
  const name = String(row.rollout);
  if (!group.rollouts.has(name)) group.rollouts.set(name, { id: row.rollout, group, rows: [] });
  group.rollouts.get(name).rows.push(row);
}

function readRollout(rollout) {
  rollout.reward = common(rollout.rows.map((row) => row.reward));
  rollout.advantage = common(rollout.rows.map((row) => row.advantage));
  rollout.reasons = [...new Set(rollout.rows.map((row) => row.reason).filter(Boolean))];
  rollout.trained = rollout.rows.some((row) => !row.reason);
  return rollout;
}

// Ids may be longer than a double holds; those come as strings of digits.
function compareIds(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  const [x, y] = [BigInt(a ?? -1), BigInt(b ?? -1)];
  return x < y ? -1 : x > y ? 1 : 0;
}

const orders = {
  id: () => 0,
  mean: (a, b) => (a.mean ?? Infinity) - (b.mean ?? Infinity),
  std: (a, b) => (b.std ?? -1) - (a.std ?? -1),
  lag: (a, b) => (b.lag ?? -1) - (a.lag ?? -1),
};

// Groups in the order chosen, each with the rollouts that the filter lets through.
function chosen(model, sort, filter) {
  const passes = { all: () => true, trained: (r) => r.trained, left: (r) => !r.trained }[filter];
  return model.groups
    .map((group) => ({ group, rollouts: group.rollouts.filter(passes) }))
    .filter(({ rollouts }) => filter === "all" || rollouts.length)
    .sort((a, b) => orders[sort](a.group, b.group) || compareIds(a.group.id, b.group.id));
}

function fate(rollout) {
  if (!rollout.reasons.length) return "in the loss";
  const left = rollout.reasons.join(", ");
  return rollout.trained ? `partly in the loss; rows left: ${left}` : `left: ${left}`;
}

function ofExpected(group) {
  const counted = count(group.counted ?? group.rollouts.length);
  return isNumber(group.expected) ? `${counted} of ${count(group.expected)}` : counted;
}
