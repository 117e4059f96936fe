// The units of metrics, by name: of those that reports have, and of what a stage measured, by the last word.
import { isNumber, number } from "./numbers.js";

// What a level of the funnel counts.
export const UNITS = ["rows", "rollouts", "groups", "tokens"];

const PER_CENT = "%";
const SECONDS = "s";
// The first that matches counts; "" is a number without a unit, such as a reward.
const UNIT_BY_NAME = [
  [/^(rows|rollouts|groups)\/(in|trained)$/, (found) => found[1]],
  [/^(rollouts|groups)\/out\//, (found) => found[1]],
  [/^out\//, () => "rows"],
  [/^(time|seconds)\//, () => SECONDS],
  [/^optimiser\/steps$/, () => "optimiser steps"],
  [/^optimiser\/(clipped|clip_fraction|ESS)$/, () => PER_CENT],
  [/^optimiser\/tokens_per_second$/, () => "tokens/s"],
  [/^optimiser\/(kl_\w+|entropy)$/, () => "nats"],
  [/^optimiser\//, () => ""],
  [/^versus\/gradient_moved$/, () => PER_CENT],
  [/^versus\//, () => ""],
  [/^(staleness|behind_newest)\//, () => "versions"],
  [/^survivors\/(\w+\/\w+_)?trained$/, () => PER_CENT],
  [/^survivors\/(lost\/.*|early|outstanding)$/, () => "groups"],
  [/^survivors\/latency\/slow$/, () => SECONDS],
  [/^survivors\/length\/slow$/, () => "tokens"],
  [/^survivors\//, () => ""],
  [/^fan_out\//, () => "rows"],
  [/^tokens\//, () => "tokens"],
  [/^group_size\//, () => "rollouts"],
  [/^response_length\//, () => "tokens"],
  [/^groups\/(?!in$|trained$|out\/)|^rollouts\/(truncated|failed|empty|unrewarded)/, () => PER_CENT],
  [/^(frac_reward_zero_std|solve_(none|all|partial)|advantages\/fraction_zero)$/, () => PER_CENT],
  [/^tree\/tokens\//, () => "tokens"],
  [/^tree\/flops\//, () => PER_CENT], // of what they are row by row
  [/^tree\/pflops\//, () => "PFLOPs"],
  [/^(reward|reward\/.*|advantages\/.*)$/, () => ""],
  [/token\w*\/kept$/, () => "tokens"], // of a filter of tokens
  [/\/(fraction_kept|zero|ess_\w+|out_of_bounds_\w+)$/, () => PER_CENT],
  [/\/(incomplete_rows|kept|merged|broken|padded|left|carried_in|oversized|samples)$/, () => "rows"],
  [/\/(rollouts|unscorable|no_reward)$/, () => "rollouts"],
  [/\/missing_groups$/, () => "groups"],
  [/\/(tokens|max_tokens|shared_tokens|unpunished)$/, () => "tokens"],
  [/\/(minibatches|microbatches)$/, (found) => found[1].replace("micro", "micro-")],
  [/\/kl_\w+$/, () => "nats"],
  [/\/(reward_mean|abs_mean|mean|changed|reward_changed|keys|chi2_\w+|weight_\w+|rank_imbalance)$/, () => ""],
];

// The unit of a metric; null where the name is not known.
function unitOfMetric(name) {
  for (const [pattern, unit] of UNIT_BY_NAME) {
    const found = pattern.exec(name);
    if (found) return unit(found);
  }
  return null;
}

// A value as it is read: a share in per cent, a short time in milliseconds.
function inUnit(name, value) {
  const unit = unitOfMetric(name) || "";
  if (!isNumber(value)) return [number(value), ""];
  if (unit === PER_CENT) return [number(100 * value), unit];
  if (unit === SECONDS && Math.abs(value) < 0.1) return [number(1000 * value), "ms"];
  return [number(value), Math.abs(value) === 1 ? unit.replace(/(?<=ch)es$|s$/, unit === SECONDS ? "s" : "") : unit];
}

export function measured(name, value) {
  return inUnit(name, value).filter(Boolean).join(" ");
}

// "2 to 7 rows"
export function measuredRange(name, low, high) {
  const [from, to] = [inUnit(name, low), inUnit(name, high)];
  const first = from[1] === to[1] || from[0] === "1" ? from[0] : from.filter(Boolean).join(" ");
  return `${first} to ${to.filter(Boolean).join(" ")}`;
}
