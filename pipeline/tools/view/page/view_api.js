// Questions to the server, links within the page, and the words for columns and reasons.
import { count } from "./numbers.js";

// An answer, or an Error with what the server says is wrong.
export async function ask(name, values = {}) {
  const given = Object.entries(values).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  let response;
  try {
    response = await fetch(`api/${name}?${new URLSearchParams(given)}`);
  } catch {
    throw new Error("The server does not answer. Start headrace view again, and open the address that it prints.");
  }
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

export const link = (values) =>
  `#${new URLSearchParams(Object.entries(values).filter(([, value]) => value !== "" && value !== null))}`;

const COLUMNS = {
  row: "row",
  group_id: "group",
  group_label: "group",
  rollout_id: "rollout",
  rollout_label: "rollout",
  reward: "reward of the row, as collected",
  rewards: "rewards, as collected",
  rollout_reward: "reward",
  advantage: "advantage",
  loss_weight: "loss weight",
  advantage_by_row: "advantage if each row were a rollout",
  logged_advantage: "advantage in the dump",
  policy_version: "policy version",
  expected_rollouts: "rollouts dispatched for the group",
  microbatch: "micro-batch",
  carried_in: "carried in from an earlier step (1: yes)",
  status: "end of the rollout",
  reason: "trained?",
  action: "what happened to the row",
  ground_truth: "ground truth",
  other_columns: "other columns of the dump",
};
export const columnName = (name) => COLUMNS[name] ?? name.replaceAll("_", " ");

export function reasonName(reason) {
  const [stage, ...why] = reason.split("/");
  return why.length ? `${stage}: ${why.join("/").replaceAll("_", " ")}` : reason;
}

// "1–50 of 1,024"
export function rangeOf(offset, shown, found, unit) {
  if (!found) return `no ${unit}`;
  return `${count(offset + 1)}–${count(offset + shown)} of ${count(found)} ${unit}`;
}
