"""Judge whether an answer is right, refused, wrong, or differs by design, and give the evidence."""

from __future__ import annotations

from typing import Any, Literal

from cases import Answer, Case

NEAR = 0.002  # relative tolerance; the ε that peers add to the std changes an advantage by up to 2e-4
CUT = 200  # characters of an error message that are kept, after the name of its class
Verdict = Literal["right", "refused", "by design", "wrong", "not seen"]

POSITIONS = "{} that it takes `{}` rows of each prompt, one prompt after the other. It takes no ids. "
POSITIONS += "So the first four rows become one group, and the next four another."
LONE = "{} gives a group of one the mean 0 and the std 1. So the advantage is the reward."
TOKEN_MEAN = (
    "It documents that {}. But the code counts only the tokens of one micro-batch on one rank. "
    "The trainer {}."
)
# Cases in which a peer documents another choice, so that its answer differs by design.
DESIGN = {
    ("openrlhf", "uneven-groups"): POSITIONS.format("It documents", "--rollout.n_samples_per_prompt"),
    ("openrlhf", "fan-out"): POSITIONS.format("It documents", "--rollout.n_samples_per_prompt"),
    ("rlinf", "uneven-groups"): POSITIONS.format(
        "The docstring of `compute_grpo_advantages` says", "group_size"
    ),
    ("twinkle-kit", "uneven-groups"): POSITIONS.format(
        "The docstring of `GRPOAdvantage` says", "num_generations"
    ),
    ("twinkle-kit", "fan-out"): POSITIONS.format("The docstring of `GRPOAdvantage` says", "num_generations"),
    ("trl", "masked-row"): "It documents that `mask_truncated_completions` excludes rows only from the loss.",
    (
        "ms-swift",
        "masked-row",
    ): "It documents that `overlong_filter` excludes truncated samples only from the loss.",
    (
        "trl",
        "shared-tokens",
    ): "`AsyncGRPOConfig` documents that a new prompt that drops fewer than `fork_threshold_tokens` (1024) "
    "tokens of the last answer takes them out of the loss. So 5 and 6 do not train. "
    "With `fork_threshold_tokens=1`, each token trains once.",
}
# The documented settings with which a peer was called for a case.
BY_IDS = "Run with `compute_advantages_dynamic`, which is for prompts with different numbers of rows."
STEPS = "Run with `StepWiseGRPOAdvantageFn`, which is for rollouts with several steps, each a row."
NONE = "Run with the reward None, the documented way to exclude a completion."
SETTINGS = {
    ("trl", "nan-reward"): NONE,
    ("trl", "rejected-row"): NONE,
    (
        "trl",
        "stale-group",
    ): "Run with `RolloutQueueDataset` of its asynchronous trainer, with `max_staleness=1`.",
    ("headrace", "sum-over-ranks"): "Run with the recipe `dr_grpo`, with a length of 5.",
    ("trl", "sum-over-ranks"): 'Run with `loss_type="dr_grpo", max_completion_length=5`.',
    **{
        (name, "sum-over-ranks"): 'Run with `loss_agg_mode="seq-mean-token-sum-norm"`.'
        for name in ("verl", "verl v1")
    },
    ("rlinf", "sum-over-ranks"): "Run with `seq-mean-token-sum`.",
    ("twinkle-kit", "sum-over-ranks"): "Run with `DRGRPOLoss(max_completion_length=5)`.",
    ("headrace", "threshold"): "Run with the recipe `high_entropy`, with a share of 0.25.",
    (
        "headrace",
        "shared-tokens",
    ): "Run with `TrainSharedOnce` on a row for each branch. No recipe has this stage. "
    "Without it, 3 and 4 train twice, and the report says so.",
    ("headrace", "stale-group"): "Run with the criterion `fresh` and `max_staleness=1`.",
    ("trinity-rft", "fan-out"): STEPS,
    ("trinity-rft", "truncated-session"): STEPS,
    **{
        ("ms-swift", case): BY_IDS
        for case in ("uneven-groups", "fan-out", "lone-rollout", "lost-rollout", "truncated-session")
    },
    **{
        ("rlinf", case): 'Run with `adv_type="grpo_dynamic", advantage_mode="trajectory"`.'
        for case in ("fan-out", "truncated-session")
    },
    **{
        ("torchrl", case): 'Run with `trajectory_return="max"`, which gives each trajectory one return.'
        for case in ("fan-out", "truncated-session")
    },
    (
        "torchrl",
        "prompt-drawn-twice",
    ): 'Run with `prompt_key="group_id"`. The default is the text of the prompt.',
}
# For peers with two functions for advantages: the function that the other cases call.
FIRST = {
    "headrace": "`headrace.decide`",
    "torchrl": '`MCAdvantage` with `trajectory_return="max"`',
    "verl": "`compute_grpo_outcome_advantage`",
    "verl v1": "`compute_advantage_for_multi_trajectories`",
    "ms-swift": "`compute_advantages`",
    "trinity-rft": "`GRPOGroupedAdvantage`",
    "rlinf": '`adv_type="grpo"`',
}
# The evidence for a wrong answer, besides the threads of its case.
WRONG = {
    **{
        (name, "nan-reward"): "The mean of the group includes the NaN."
        for name in ("torchrl", "verl", "verl v1", "openrlhf", "trinity-rft", "rlinf", "twinkle-kit")
    },
    **{
        (name, "lone-rollout"): LONE.format("`compute_grpo_outcome_advantage`")
        for name in ("verl", "verl v1")
    },
    ("agentlightning", "lone-rollout"): LONE.format("It calls verl's estimator, which"),
    ("trinity-rft", "lone-rollout"): LONE.format("`GRPOGroupedAdvantage`")
    + " A comment in the code says that the value is to be checked.",
    ("verl", "masked-row"): "verl-project/verl #6452, which is open, reports it.",
    ("verl v1", "masked-row"): "verl-project/verl #6452, which is open, reports it.",
    ("openrlhf", "masked-row"): "OpenRLHF/OpenRLHF #1239, which is open, reports it.",
    (
        "verl v1",
        "truncated-session",
    ): "It documents that the advantage of the last output is copied to the other outputs of a session. "
    "The code reads it at the first unmasked token of the last output, and there is none.",
    ("torchrl", "micro-batches"): TOKEN_MEAN.format(
        "`token_mean` is a global masked token mean", "divides by `gradient_accumulation_steps`"
    ),
    ("torchrl", "ranks"): TOKEN_MEAN.format(
        "`token_mean` is a global masked token mean", "averages the gradients of the ranks"
    ),
    ("rlinf", "micro-batches"): TOKEN_MEAN.format(
        "`token-mean` is a mean over tokens (`get_loss_agg_func`)",
        "divides by the number of micro-batches",
    ),
    ("rlinf", "ranks"): TOKEN_MEAN.format(
        "`token-mean` is a mean over tokens (`get_loss_agg_func`)", "averages the gradients of the ranks"
    ),
    ("trinity-rft", "micro-batches"): TOKEN_MEAN.format(
        "`token-mean` is a mean over all unmasked elements (`aggregate_loss`)",
        "is verl's engine. It adds up the losses of the micro-batches and does not divide by their number, "
        "so with two of them all weights are twice as large as with one",
    ),
    ("trinity-rft", "ranks"): TOKEN_MEAN.format(
        "`token-mean` is a mean over all unmasked elements (`aggregate_loss`)",
        "averages the gradients of the ranks",
    ),
    (
        "trinity-rft",
        "sum-over-ranks",
    ): "It documents that `seq-mean-token-sum-norm` is a sum that is divided by a "
    "fixed number (`aggregate_loss`). But nothing makes up for the mean of the gradients over the ranks.",
    (
        "trl",
        "threshold",
    ): "`top_entropy_quantile=0.25`: the quantile is that of one micro-batch, on all ranks.",
    **{
        (name, "threshold"): "`kl_cov_ratio=0.25`: `compute_policy_loss_kl_cov` chooses the tokens of one "
        "micro-batch. verl-project/verl #7829, which is open, reports it."
        for name in ("verl", "verl v1")
    },
    (
        "openrlhf",
        "step-without-tokens",
    ): "`aggregate_loss` divides by the number of tokens of the step, which is 0.",
    (
        "ms-swift",
        "nan-reward",
    ): "`nansum` makes the reward 0. TRL had the same bug and fixed it, see huggingface/trl #5902.",
}


def near(found: Answer, expected: Answer) -> bool:
    """Whether two answers are nearly equal. None and 0 are equal. NaN, the text `nan`, equals nothing."""

    def same(one: float | None, other: float | None) -> bool:
        one, other = float(one or 0.0), float(other or 0.0)
        return abs(one - other) <= NEAR * max(1.0, abs(other))

    return all(same(one, other) for one, other in zip(found, expected, strict=True))


def judge(peer: str, case: Case, answer: dict[str, Any]) -> tuple[Verdict, str]:
    """Return the verdict, and the result or the reason in words."""
    if "not_seen" in answer:
        return "not seen", f"{answer['not_seen'][:1].upper()}{answer['not_seen'][1:]}."
    if "refused" in answer:
        cut = len(answer["refused"].partition(": ")[2]) == CUT
        return "refused", f"Raised `{answer['refused'].strip()}{' …' * cut}`."
    accepted = [answer["found"]] if case.asks == "paths" else case.accepted
    found = answer["other" if case.asks == "paths" else "found"]
    says = (
        f"{FIRST.get(peer, peer)} was compared with {answer['path']}."
        if case.asks == "paths"
        else SETTINGS.get((peer, case.name), "")
    )
    if any(near(found, expected) for expected in accepted):
        return "right", says
    if (peer, case.name) in DESIGN:
        return "by design", DESIGN[peer, case.name]
    project = peer.split()[0].removesuffix("-kit")
    own = [f"#{each.number}" for each in case.threads if each.project.lower().endswith(f"/{project}")]
    reported = f"See {', '.join(own)} below." if own else "The threads below report it in other projects."
    return "wrong", WRONG.get((peer, case.name), reported)


def number(case: Case, answer: dict[str, Any]) -> str:
    """The text that shows why an answer is not right: all weights, or the first of the worst numbers."""
    found = [None if value is None else float(value) for value in answer["found"]]
    if any(value is not None and value != value for value in found):
        return "NaN"
    if case.asks == "weight" and 0.0 not in found:
        return ", ".join(f"{value:.3g}" for value in dict.fromkeys(found))
    gaps = [
        [abs((one or 0.0) - (other or 0.0)) for one, other in zip(found, expected, strict=True)]
        for expected in case.accepted
    ]
    least = min(gaps, key=sum)
    row = next(row for row, gap in enumerate(least) if gap > 0.99 * max(least))
    return f"{found[row] or 0.0:.3g}".replace("-", "−")
