// Metrics by name: the unit, the title and what the number tells, those first that say most about a run.
import { isNumber, number } from "./numbers.js";

// What a level of the funnel counts.
export const UNITS = ["rows", "rollouts", "groups", "tokens"];

const PER_CENT = "%";
const SECONDS = "s";
// The first that matches counts. In a text, $1 is the first part that the pattern has found, in words. "" is a number
// without a unit, such as a reward. A stage of the user may be called as it likes: its name is what is before the slash.
const METRICS = [
  [/^versus\/gradient_moved$/, PER_CENT, "gradient that moves", "The part of the gradient that the second recipe gives to other groups."],
  [/^versus\/gradient_cosine$/, "", "cosine of the gradient shares", "1: both recipes give the rows the same shares of the gradient."],
  [/^reward\/all\/mean$/, "", "mean reward", "Of all rollouts with a reward. It rises if the policy learns."],
  [/^groups\/informative$/, PER_CENT, "informative groups", "Groups whose rewards differ. Only these teach."],
  [/^solve_none$/, PER_CENT, "groups solved by none", "No rollout solves the prompt. If most: they are too hard."],
  [/^solve_all$/, PER_CENT, "groups solved by all", "Every rollout solves the prompt. If most: they are too easy."],
  [/^response_length\/mean$/, "tokens", "mean response length", "Tokens in the loss of a rollout, as collected."],
  [/^response_characters\/mean$/, "characters", "mean response text", "Of a rollout, in a dump without tokens."],
  [/^rollouts\/truncated$/, PER_CENT, "truncated rollouts", "Rollouts that were cut off, for example at the length limit."],
  [/^(rows|rollouts|groups)\/trained$/, "$1", "$1 in the loss", "What is left after all stages, and trains."],
  [/^advantages\/fraction_zero$/, PER_CENT, "trained rollouts with advantage 0", "They are in the loss and have no gradient."],
  [/^groups\/largest_gradient_share$/, PER_CENT, "largest share of a group", "Of the gradient of the step. Near 100 %, one group dominates."],
  [/^staleness\/(mean|max|token_mean)$/, "versions", "$1 staleness", "Policy versions between the sampler and the trainer."],
  [/^behind_newest\/(mean|max|token_mean)$/, "versions", "$1 staleness in the batch", "Policy versions behind the newest row of the batch."],
  [/^reward\/all\/(std|min|max)$/, "", "$1 reward", "Of all rollouts with a reward."],
  [/^reward\/effective\/(\w+)$/, "", "$1 reward in the loss", "Of the rollouts that train."],
  [/^frac_reward_zero_std$/, PER_CENT, "groups with equal rewards", "Their advantages are 0, so they teach nothing."],
  [/^solve_partial$/, PER_CENT, "groups solved in part", "Some of the rollouts solve the prompt."],
  [/^advantages\/all\/(\w+)$/, "", "$1 advantage", "Of all rollouts with an advantage."],
  [/^advantages\/effective\/(\w+)$/, "", "$1 advantage in the loss", "Of the rollouts that train."],
  [/^response_length\/max$/, "tokens", "greatest response length", "Of a rollout. See whether it reaches the length limit."],
  [/^response_characters\/max$/, "characters", "longest response text", "Of a rollout, in a dump without tokens."],
  [/^tokens\/(mean|max)$/, "tokens", "$1 length of a row", "Tokens in the loss of a row, as collected."],
  [/^tokens\/trained_again$/, "tokens", "tokens that train again", "An earlier row of the rollout trains them, too."],
  [/^rollouts\/failed$/, PER_CENT, "failed rollouts", "Rollouts that failed or were aborted."],
  [/^rollouts\/unrewarded$/, PER_CENT, "rollouts without a reward", "Rollouts that arrive without one."],
  [/^rollouts\/empty$/, PER_CENT, "rollouts without a token in the loss", "Rollouts that arrive so."],
  [/^rollouts\/no_reward$/, "rollouts", "trained without a reward", "More than 0 is a fault of the recipe or of the grader."],
  [/^groups\/incomplete$/, PER_CENT, "incomplete groups", "Groups with fewer rollouts than were dispatched."],
  [/^group_size\/(mean|min|max)$/, "rollouts", "$1 group size", "Rollouts of a group that count in its statistics."],
  [/^fan_out\/(mean|max)$/, "rows", "$1 rows of a rollout", "More than 1: rollouts have several rows."],
  [/^optimiser\/lr$/, "", "learning rate", "The greatest of the parameter groups."],
  [/^optimiser\/loss$/, "", "loss", "The mean over the optimiser steps."],
  [/^optimiser\/grad_norm$/, "", "gradient norm", "The mean over the optimiser steps, before clipping."],
  [/^optimiser\/clipped$/, PER_CENT, "clipped gradients", "Optimiser steps whose gradient was longer than its bound."],
  [/^optimiser\/entropy$/, "nats", "entropy", "As the loss gives it. Near 0, the policy always samples the same."],
  [/^optimiser\/clip_fraction$/, PER_CENT, "clipped ratios", "As the loss gives it: tokens whose probability ratio is beyond its bound."],
  [/^optimiser\/kl_approx$/, "nats", "KL to the sampler", "As the loss gives it: how far the policy is from the one that sampled."],
  [/^optimiser\/kl_to_ref$/, "nats", "KL to the reference", "As the loss gives it: how far the policy is from the reference."],
  [/^optimiser\/(kl_\w+)$/, "nats", "$1", "As the loss gives it."],
  [/^optimiser\/ESS$/, PER_CENT, "effective sample size, of the loss", "As the loss gives it."],
  [/^optimiser\/steps$/, "optimiser steps", "optimiser steps", "Optimiser steps of this step of the training."],
  [/^optimiser\/tokens_per_second$/, "tokens/s", "speed", "Tokens in the loss for each second of the optimiser steps."],
  [/^optimiser\/(.+)$/, "", "$1", "As the loss gives it."],
  [/^survivors\/trained$/, PER_CENT, "groups that the stream trained", "Of the groups that have left it so far."],
  [/^survivors\/lost\/(.+)$/, "groups", "lost groups: $1", "Groups that the stream lost so far, for this reason."],
  [/^survivors\/early$/, "groups", "groups lost early", "They left before it was known how long they take."],
  [/^survivors\/outstanding$/, "groups", "outstanding groups", "Dispatched, and neither trained nor lost yet."],
  [/^survivors\/(\w+)\/z$/, "", "loss of long groups, by $1", "Below −4: long groups are lost more often than others."],
  [/^survivors\/latency\/slow$/, SECONDS, "least latency of long groups", "From here on, groups are lost more often."],
  [/^survivors\/length\/slow$/, "tokens", "least length of long groups", "From here on, groups are lost more often."],
  [/^survivors\/(\w+)\/slow$/, "", "least $1 of long groups", "From here on, groups are lost more often."],
  [/^survivors\/(\w+)\/slow_trained$/, PER_CENT, "long groups trained, by $1", "Of the groups at or above the least $1."],
  [/^survivors\/(\w+)\/others_trained$/, PER_CENT, "other groups trained, by $1", "Of the groups below the least $1 of long ones."],
  [/^logged_advantage\/agree$/, PER_CENT, "advantages as in the dump", "Rows whose advantage is that of the dump, within 0.0001."],
  [/^logged_advantage\/rows$/, "rows", "rows with an advantage in the dump", "They are compared with the advantages of this recipe."],
  [/^logged_advantage\/(mean|max)_difference$/, "", "$1 difference to the dump", "Between the advantages of the dump and of this recipe."],
  [/^tree\/tokens\/rows$/, "tokens", "tokens, row by row", "With the prompts. Tokens that rows share count in each."],
  [/^tree\/tokens\/(\w+)$/, "tokens", "tokens, shared in a $1", "The same, if the rows of a $1 are packed, and share tokens."],
  [/^tree\/flops\/(\w+)$/, PER_CENT, "cost, shared in a $1", "The FLOPs if rows of a $1 share tokens, of those row by row."],
  [/^tree\/pflops\/rows$/, "PFLOPs", "cost, row by row", "An estimate for this step."],
  [/^tree\/pflops\/(\w+)$/, "PFLOPs", "cost in PFLOPs, shared in a $1", "An estimate for this step."],
  [/^(rows|rollouts|groups)\/in$/, "$1", "$1, collected", "What the pipeline got."],
  [/^out\/(.+)\/(\w+)$/, "rows", "rows out: $1, $2", "Rows that this stage took out for this reason."],
  [/^(rollouts|groups)\/out\/(.+)\/(\w+)$/, "$1", "$1 out: $2, $3", "Those whose last row this stage took out for this reason."],
  [/^(.+)\/ess_(token|sequence)$/, PER_CENT, "$1: effective sample size, by $2", "Small: a few importance weights dominate."],
  [/^(.+)\/(kl_\w+)_(token|sequence)$/, "nats", "$1: $2, by $3", "An estimate of how far the trainer is from the sampler."],
  [/^(.+)\/chi2_(token|sequence)$/, "", "$1: χ² distance, by $2", "Another estimate of this distance. A few tokens can dominate it."],
  [/^(.+)\/out_of_bounds_(token|sequence)$/, PER_CENT, "$1: out of bounds, by $2", "Tokens whose probability ratio is beyond the bounds."],
  [/^(.+)\/weight_(mean|max)_(token|sequence)$/, "", "$1: $2 importance weight, by $3", "1: the sampler is the policy that trains."],
  [/^(.+)\/least_(\w+)$/, "", "$1: least $2", "The bound below which the report warns."],
  [/^(.+)\/missing_groups$/, "groups", "$1: missing groups", "They were dispatched, and none of their rows came."],
  [/^(.+)\/incomplete_rows$/, "rows", "$1: rows of incomplete groups", "A rollout of their group is missing, or failed."],
  [/^(.+)\/reward_mean$/, "", "$1: mean reward", "Of the rollouts that reach the stage, before rewards are changed."],
  [/^(.+)\/reward_changed$/, PER_CENT, "$1: changed rewards", "Rollouts whose reward the stage changed."],
  [/^(.*token.*)\/kept$/, "tokens", "$1: tokens kept", "Tokens that stay in the loss."],
  [/^(.+)\/kept$/, "rows", "$1: rows kept", "Rows that stay after the criterion."],
  [/^(.+)\/fraction_kept$/, PER_CENT, "$1: share kept", "What stays after the criterion, of what came."],
  [/^(.+)\/abs_mean$/, "", "$1: mean size of the advantage", "The mean of its absolute value."],
  [/^(.+)\/zero$/, PER_CENT, "$1: advantages of 0", "Rollouts whose advantage is exactly 0."],
  [/^(.+)\/unscorable$/, "rollouts", "$1: rollouts without a reward", "They get no advantage."],
  [/^(.+)\/no_reward$/, "rollouts", "$1: rollouts without a reward", "They get no advantage."],
  [/^(.+)\/term_mean$/, "", "$1: mean of the term", "Over the tokens in the loss."],
  [/^(.+)\/changed$/, PER_CENT, "$1: changed tokens", "Tokens in the loss whose advantage the stage changed."],
  [/^(.+)\/keys$/, "", "$1: running baselines", "How many baselines the stage had before this step."],
  [/^(.+)\/mean$/, "", "$1: mean", "The mean of what the stage adds, subtracts or multiplies by."],
  [/^(.+)\/unpunished$/, "tokens", "$1: length without a punishment", "Longer responses are punished."],
  [/^(.+)\/rollouts$/, "rollouts", "$1: rollouts", "Rollouts that the stage got."],
  [/^(.+)\/scored$/, "rows", "$1: rows scored", "Rows whose log-probabilities the stage computed."],
  [/^(.+)\/merged$/, "rows", "$1: merged rows", "Rows that were joined to the row before."],
  [/^(.+)\/broken$/, "rows", "$1: rows that do not continue", "They do not begin with the row before, and stay apart."],
  [/^(.+)\/shared_tokens$/, "tokens", "$1: shared tokens", "Tokens that rows have in common."],
  [/^(.+)\/minibatches$/, "minibatches", "$1: minibatches", "Optimiser steps of one pass over the batch."],
  [/^(.+)\/microbatches$/, "micro-batches", "$1: micro-batches", "Of one rank, in one pass over the batch."],
  [/^(.+)\/padded$/, "rows", "$1: padding rows", "They fill up micro-batches, and do not train."],
  [/^(.+)\/left$/, "rows", "$1: rows left over", "They are in no minibatch."],
  [/^(.+)\/carried_in$/, "rows", "$1: rows carried in", "They were left over at an earlier step."],
  [/^(.+)\/oversized$/, "rows", "$1: rows longer than a micro-batch", "Each is a micro-batch of its own."],
  [/^(.+)\/max_tokens$/, "tokens", "$1: tokens of the largest micro-batch", "It sets the memory that the step needs."],
  [/^(.+)\/rank_imbalance$/, "", "$1: imbalance of ranks", "0: all ranks have as many tokens."],
  [/^(.+)\/samples$/, "rows", "$1: rows", "Rows with tokens in the loss."],
  [/^(.+)\/tokens_(\w+)$/, "tokens", "$1: tokens of $2", "Tokens in the loss of this component."],
  [/^(.+)\/tokens$/, "tokens", "$1: tokens", "Tokens in the loss."],
  [/^(.+)\/divisor$/, "tokens", "$1: length", "The fixed length by which the loss is divided."],
  [/^seconds\/(.+)$/, SECONDS, "time of the step: $1", "A part of the step, as the trainer names it."],
  [/^time\/(.+)$/, SECONDS, "time of the stage $1", "Time in the pipeline."],
];
const WORDS = {
  min: "least",
  max: "greatest",
  std: "standard deviation of the",
  token_mean: "mean token",
  kl_k1: "KL (k1)",
  kl_k3: "KL (k3)",
};
const inWords = (part) => WORDS[part] ?? part.replaceAll("_", " ");

// What is known of a metric: its place in the list, its unit, its title and what it tells. Of others the name is the title.
export function described(name) {
  const place = METRICS.findIndex(([pattern]) => pattern.test(name));
  if (place < 0) return { place: METRICS.length - 2.5, unit: "", title: name, tells: "" }; // before the times
  const [pattern, ...texts] = METRICS[place];
  const found = pattern.exec(name);
  const [unit, title, tells] = texts.map((text) => text.replace(/\$(\d)/g, (_, at) => inWords(found[at])));
  return { place, unit, title, tells };
}

// A value as it is read: a share in per cent, a short time in milliseconds.
function inUnit(name, value) {
  const { unit } = described(name);
  if (!isNumber(value)) return [number(value), ""];
  if (unit === PER_CENT) return [number(100 * value), unit];
  if (unit === SECONDS && Math.abs(value) < 0.1) return [number(1000 * value), "ms"];
  return [number(value), Math.abs(value) === 1 ? unit.replace(/(?<=ch)es$|(?<=\w)s$/, "") : unit];
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
