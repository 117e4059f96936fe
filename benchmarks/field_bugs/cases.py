"""Bugs that recur in trainers: the rows, the correct answer computed by hand, and the threads of each.

A row is one training sample. Answers are GRPO's advantages, (R − mean) / std of the group with the divisor
n − 1, to two thousandths, since peers add 0 to 1e-4 to the std; or the weight of each token of a row in the
loss. None: the row does not train. If there are several correct answers, all are listed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

NAN = float("nan")
Answer = list[float | None]


@dataclass(frozen=True)
class Thread:
    """An issue or pull request, with the date of the cited message."""

    project: str
    number: int
    date: str
    says: str


@dataclass(frozen=True)
class Case:
    """One bug.

    Attributes:
        asks: the advantage of each row; the weight of its tokens; or equal advantages by two paths.
        accepted: the correct answers.
        columns: columns of the rows other than the defaults: 3 ``tokens`` each, and the group as ``prompt``.
    """

    name: str
    title: str
    group_size: int
    columns: dict[str, list]
    accepted: list[Answer]
    why: str
    threads: list[Thread]
    asks: Literal["advantage", "weight", "paths"] = "advantage"
    rows: dict[str, list] = field(init=False)

    def __post_init__(self) -> None:
        number = len(self.columns["group"])
        usual = {"tokens": [3] * number, "prompt": self.columns["group"], "micro": [0] * number}
        usual |= {"rank": [0] * number, "version": [8] * number}
        object.__setattr__(self, "rows", usual | self.columns)


def rows(*columns: tuple[str, str]) -> dict[str, list]:
    """Columns as aligned text. Ids stay text, other values become numbers."""
    ids = ("group", "rollout", "prompt")
    return {name: [one if name in ids else float(one) for one in text.split()] for name, text in columns}


def whole(name: str, text: str) -> dict[str, list]:
    return {name: [int(one) for one in text.split()]}


CASES = [
    Case(
        "uneven-groups",
        "Groups from positions, with uneven counts",
        4,
        rows(("group", "a a a a a b b b"), ("rollout", "0 1 2 3 4 5 6 7"), ("reward", "1 0 0 0 0 1 1 0")),
        [
            [1.789, -0.447, -0.447, -0.447, -0.447, 0.577, 0.577, -1.155],
            [1.5, -0.5, -0.5, -0.5, None, None, None, None],
        ],
        "Prompt a has five rollouts and prompt b three, eight rows in all, which is also two times four. "
        "Each rollout is compared with those of its own prompt. For a the mean is 1/5 and the std √(4/5 / "
        "4) = 0.447: 0.8 / 0.447 = 1.789 and −0.447. For b they are 2/3 and 0.577: 0.577, 0.577, −1.155. A "
        "trainer with groups of exactly four takes the first four of a (mean 1/4, std 1/2) and keeps the "
        "others for later. By position, the fifth rollout of a counts as the first of b, and a failure of "
        "a makes the successes of b look better.",
        [
            Thread("THUDM/slime", 2062, "2026-06-12", "uneven rollouts fall through to one global mean"),
            Thread("radixark/miles", 1325, "2026-06-12", "a flat vector is reshaped by position"),
        ],
    ),
    Case(
        "fan-out",
        "Fan-out counted per row",
        4,
        rows(
            ("group", "a a a a a a a a b b b b"),
            ("rollout", "0 0 0 0 0 1 2 3 4 5 6 7"),
            ("reward", "1 1 1 1 1 0 0 0 1 1 0 0"),
        ),
        [[1.5] * 5 + [-0.5] * 3 + [0.866, 0.866, -0.866, -0.866]],
        "Rollout 0 became five rows (turns, sub-agents, compacted segments). It is one rollout with one "
        "reward. For 1, 0, 0, 0 the mean is 1/4 and the std 1/2, so all five rows get 1.5 and the others "
        "−0.5. If rows are counted, the mean is 5/8, and the success gets only 0.725.",
        [
            Thread("radixark/miles", 1325, "2026-06-12", "a rollout counts once per segment in the baseline"),
            Thread("microsoft/agent-lightning", 462, "2026-01-21", "more turns, more weight in mean and std"),
            Thread("microsoft/agent-lightning", 489, "2026-02-13", "six turns of four rollouts as one group"),
        ],
    ),
    Case(
        "lone-rollout",
        "A lone rollout",
        4,
        rows(("group", "a a a a b"), ("rollout", "0 1 2 3 4"), ("reward", "1 0 0 0 1")),
        [[1.5, -0.5, -0.5, -0.5, None]],
        "Prompt b has one rollout of four left. It cannot be compared with others: R − mean is 0, and the "
        "std of one number is not defined. It must not train. If its reward is used as its advantage, its "
        "response is reinforced without a comparison.",
        [
            Thread("Tencent-Hunyuan/UniRL", 330, "2026-08-05", "a singleton should produce 0, not NaN"),
            Thread("huggingface/trl", 7176, "2026-09-10", "a group with a single survivor is dropped"),
        ],
    ),
    Case(
        "equal-rewards",
        "Eight equal rewards of 1000.1",
        8,
        rows(
            ("group", "a a a a a a a a"),
            ("rollout", "0 1 2 3 4 5 6 7"),
            ("reward", "1000.1 " * 8),
        ),
        [[0.0] * 8],
        "Equal rewards carry no information: R − mean = 0. In float32 the mean of eight 1000.1 may differ "
        "from 1000.1 by one rounding, 6e-5, and their std is as small, so the quotient is of the order of "
        "1. All eight are pushed in the same direction by a rounding error.",
        [
            Thread("NVIDIA-NeMo/RL", 4158, "2026-09-16", "an advantage of −2075 from a std of rounding"),
            Thread("modelscope/twinkle", 288, "2026-09-17", "near ties become strong advantages"),
        ],
    ),
    Case(
        "lost-rollout",
        "A lost rollout",
        4,
        rows(("group", "a a a b b b b"), ("rollout", "0 1 2 4 5 6 7"), ("reward", "1 0 0 1 1 0 0")),
        [
            [1.155, -0.577, -0.577, 0.866, 0.866, -0.866, -0.866],
            [None, None, None, 0.866, 0.866, -0.866, -0.866],
        ],
        "Four rollouts of a were dispatched and three were returned. It is right to compare the three (mean "
        "1/3, std 0.577: 1.155 and −0.577), to drop the group, to wait for the fourth rollout, or to stop "
        "with an error that names the group. It is wrong to add a fourth reward of 0, or to use a rollout "
        "of b instead. b is 1, 1, 0, 0: mean 1/2, std 0.577.",
        [
            Thread("NVIDIA-NeMo/RL", 3589, "2026-08-12", "failed rollouts are committed with reward zero"),
            Thread("NVIDIA-NeMo/RL", 2394, "2026-05-04", "fewer rollouts return than were requested"),
            Thread("NVIDIA-NeMo/RL", 2700, "2026-07-07", "a group that never completes hangs the trainer"),
        ],
    ),
    Case(
        "masked-row",
        "A masked row in the baseline",
        4,
        rows(("group", "a a a a"), ("rollout", "0 1 2 3"), ("reward", "1 1 0 0"))
        | whole("tokens", "3 0 3 3"),
        [[1.155, None, -0.577, -0.577]],
        "The second response is masked completely, for example because it was truncated or its environment "
        "failed. Its reward must have no effect. The others are 1, 0, 0: mean 1/3, std 0.577. If the reward "
        "of the masked row is in the baseline, they get 0.866, −0.866, −0.866: the row changes the others.",
        [
            Thread("NVIDIA-NeMo/RL", 3467, "2026-08-03", "these rewards, and these numbers"),
            Thread("NVIDIA-NeMo/RL", 4160, "2026-09-17", "loss-masked rows vote in the baseline"),
            Thread("OpenRLHF/OpenRLHF", 1239, "2026-05-17", "zero-action samples shift valid siblings"),
        ],
    ),
    Case(
        "rejected-row",
        "A rejected row in the baseline",
        4,
        rows(("group", "a a a a"), ("rollout", "0 1 2 3"), ("reward", "1 100 0 0"))
        | whole("tokens", "3 0 3 3")
        | {"rejected": [False, True, False, False]},
        [[1.155, None, -0.577, -0.577]],
        "Rejection sampling removed the second response, and with it its reward of 100. The others are 1, "
        "0, 0: mean 1/3, std 0.577. With the 100 in the baseline the mean is 25.25, and the only success "
        "of the group gets a negative advantage: (1 − 25.25) / 49.84 = −0.487.",
        [
            Thread("verl-project/verl", 6375, "2026-05-17", "a reward of 100 stays in the group"),
            Thread("verl-project/verl", 6452, "2026-05-23", "the same, reopened"),
            Thread("verl-project/verl", 6362, "2026-05-15", "a rejected token's reward counts"),
        ],
    ),
    Case(
        "micro-batches",
        "A denominator that depends on micro-batches",
        2,
        rows(("group", "a a b b"), ("rollout", "0 1 2 3"), ("reward", "1 0 1 0"))
        | whole("tokens", "1 1 1 5")
        | whole("micro", "0 0 1 1"),
        [[0.125] * 4, [0.25, 0.25, 0.25, 0.05]],
        "One optimiser step has four rows and eight tokens, in two micro-batches. A mean over tokens gives "
        "each token the weight 1/8, however the rows are divided into micro-batches. A mean over rows gives "
        "each row 1/4: each token of the short rows 1/4, each of the long row 1/20. The bug is to compute a "
        "token mean in each micro-batch and to average the two. Then a token has the weight 1/2 · 1/2 = 1/4 "
        "in the first micro-batch and 1/2 · 1/6 = 1/12 in the second, so the gradient depends on how rows "
        "are divided.",
        [
            Thread("verl-project/verl", 5625, "2026-03-16", "token-mean over each micro-batch"),
            Thread(
                "modelscope/ms-swift", 10116, "2026-09-12", "divided by the number of micro-batches twice"
            ),
            Thread("allenai/open-instruct", 1161, "2025-11-10", "loss accumulation corrected"),
        ],
        asks="weight",
    ),
    Case(
        "ranks",
        "A denominator that depends on ranks",
        2,
        rows(("group", "a a b b"), ("rollout", "0 1 2 3"), ("reward", "1 0 1 0"))
        | whole("tokens", "1 1 1 5")
        | whole("rank", "0 0 1 1"),
        [[0.125] * 4, [0.25, 0.25, 0.25, 0.05]],
        "The same rows on two ranks, whose gradients are averaged. Each token must still have the weight "
        "1/8, or each row 1/4. A mean over each rank's own tokens gives 1/4 and 1/12: a token weighs more on "
        "a rank with fewer tokens.",
        [
            Thread("verl-project/verl", 5366, "2026-02-24", "global counts are required with dp_size > 1"),
            Thread("huggingface/trl", 3231, "2025-04-04", "equal weights inside one device only"),
        ],
        asks="weight",
    ),
    Case(
        "stale-group",
        "A stale group",
        4,
        rows(("group", "a a a a b b b b"), ("rollout", "0 1 2 3 4 5 6 7"), ("reward", "1 0 0 0 1 1 0 0"))
        | whole("version", "3 3 3 3 8 8 8 8"),
        [[None] * 4 + [0.866, 0.866, -0.866, -0.866]],
        "The policy is at version 8, and rows may be at most one version old. Group a was sampled by "
        "version 3, so the whole group is dropped. b is 1, 1, 0, 0 (mean 1/2, std 0.577) and is not "
        "affected.",
        [
            Thread("huggingface/trl", 7176, "2026-09-10", "groups past max_staleness are never trained"),
            Thread("PrimeIntellect-ai/prime-rl", 3313, "2026-08-21", "which rows of a stale group leave"),
            Thread("allenai/open-instruct", 1738, "2026-06-25", "stale results were trained on"),
        ],
    ),
    Case(
        "two-paths",
        "A filter that one path skips",
        6,
        rows(
            ("group", "a a a a a a b b b b b b"),
            ("rollout", "0 1 2 3 4 5 6 7 8 9 10 11"),
            ("reward", "1 1 0 0 0 0 1 1 1 1 1 1"),
        )
        | whole("tokens", "3 0 3 3 3 3 3 3 3 3 3 3"),
        [],
        "The same rows through the other path of the same trainer: its vectorised, multi-turn or streaming "
        "path. A masked row and a group of equal rewards must have the same effect on both paths, so the "
        "two columns of advantages must be equal.",
        [
            Thread("NVIDIA-NeMo/RL", 4061, "2026-09-09", "one controller passes the mask, two loops do not"),
            Thread("NVIDIA-NeMo/Automodel", 3796, "2026-09-03", "one loss of four guards against 0 tokens"),
        ],
        asks="paths",
    ),
    Case(
        "reused-ids",
        "Reused ids",
        2,
        rows(("group", "a a b b"), ("rollout", "0 1 0 1"), ("reward", "1 0 0 0.5")),
        [[0.707, -0.707, -0.707, 0.707]],
        "Two workers number their rollouts from 0. Either ids are unique within their group (1, 0 and 0, "
        "0.5: the mean and std of each give ±0.707), or the batch is refused. By the rollout id alone, "
        "rows of two prompts become one rollout.",
        [
            Thread("InternLM/xtuner", 1923, "2026-06-17", "rollout ids of several samplers collide"),
            Thread("rllm-org/rllm", 829, "2026-08-12", "ids with a colon make one group of a batch"),
        ],
    ),
    Case(
        "nan-reward",
        "A reward that is NaN",
        4,
        rows(("group", "a a a a b b b b"), ("rollout", "0 1 2 3 4 5 6 7"), ("reward", "1 nan 0 0 1 1 0 0")),
        [
            [1.155, None, -0.577, -0.577, 0.866, 0.866, -0.866, -0.866],
            [None, None, None, None, 0.866, 0.866, -0.866, -0.866],
        ],
        "A grader failed, so its row has no reward. Three results are right: the others are compared without "
        "it (1, 0, 0: mean 1/3, std 0.577), the group is dropped, or an error names the row. It is wrong to "
        "give NaN to the other rollouts. It is also wrong to use the reward 0 for this row: 1, 0, 0, 0 would "
        "give 1.5 and −0.5, and the ungraded response would become less likely.",
        [
            Thread("huggingface/trl", 5902, "2026-06-01", "an unscored row became 0 in the baseline"),
            Thread("Tencent-Hunyuan/UniRL", 335, "2026-08-05", "one NaN poisoned the whole tensor"),
        ],
    ),
    Case(
        "step-without-tokens",
        "A step without tokens",
        2,
        rows(("group", "a a"), ("rollout", "0 1"), ("reward", "1 0")) | whole("tokens", "0 0"),
        [[None, None]],
        "Every row of the step is masked. There is nothing to train: the gradient is 0, or the step is "
        "skipped or refused. A mean over no tokens is 0 / 0, and one NaN in the gradient makes every "
        "parameter NaN.",
        [
            Thread("pytorch/torchtitan", 4247, "2026-08-20", "batches without valid tokens still step"),
            Thread("NVIDIA-NeMo/Automodel", 3797, "2026-09-03", "0 / 0 through backward into every weight"),
        ],
        asks="weight",
    ),
    Case(
        "truncated-session",
        "A session whose last output is truncated",
        4,
        rows(("group", "a a a a a"), ("rollout", "0 0 1 2 3"), ("reward", "1 1 0 0 0"))
        | whole("tokens", "3 0 3 3 3"),
        [[1.5, None, -0.5, -0.5, -0.5]],
        "Session 0 has two outputs. The last was truncated and is masked; the first has three tokens in "
        "the loss. The session has one reward and counts once: for 1, 0, 0, 0 the mean is 1/4, the std "
        "1/2, and its first output gets 1.5. If the advantage is taken from the masked output, it is 0 for "
        "the whole session, and the only success of the group does not train.",
        [
            Thread("NovaSky-AI/SkyRL", 1492, "2026-04-10", "earlier steps get the last step's masked tensor"),
            Thread("verl-project/verl", 7580, "2026-08-27", "the final row of a session is broadcast"),
        ],
    ),
    Case(
        "prompt-drawn-twice",
        "A prompt drawn twice",
        2,
        rows(
            ("group", "a b a b"),
            ("prompt", "2+2 2+2 2+2 2+2"),
            ("rollout", "0 1 2 3"),
            ("reward", "0 10 1 10"),
        ),
        [[-0.707, 0.0, 0.707, 0.0]],
        "The prompt 2+2 was dispatched twice, as two groups, and their rollouts arrive alternately. The "
        "first group has the rewards 0 and 1 (mean 1/2, std 0.707), the second 10 and 10, which are equal. "
        "With groups by the prompt's text, 0 is compared with 10, the reward of another group.",
        [
            Thread("NVIDIA-NeMo/RL", 3882, "2026-08-27", "distinct prompts can have identical text tokens"),
            Thread("huggingface/trl", 3045, "2025-03-10", "not all prompts are always different"),
        ],
    ),
]
