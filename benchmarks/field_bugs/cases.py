"""Bugs that recur in trainers: the rows, the correct answer computed by hand, and the threads of each.

A row is one training sample. An answer has a number for each row, or None if the row does not train. The
number is GRPO's advantage, (R − mean) / std of the group with the divisor n − 1; or the weight of each token
of the row in the loss; or the number of times that the tokens of a turn train. Answers may differ by two
thousandths, because peers add 0 to 1e-4 to the std. If there are several correct answers, all are listed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

NAN = float("nan")
Answer = list[float | None]


@dataclass(frozen=True)
class Thread:
    """An issue or pull request, with the date of the cited message, and a sentence on what it reports."""

    project: str
    number: int
    date: str
    says: str


@dataclass(frozen=True)
class Case:
    """One bug.

    Attributes:
        asks: what is compared: the advantage of each row; the weight of its tokens; the advantages by two
            paths; or the number of times that the tokens of a turn train.
        accepted: the correct answers.
        columns: columns of the rows. By default a row has 3 ``tokens``, and its group is its ``prompt``.
        bug: what goes wrong, in Markdown.
        why: why the answers are correct, in Markdown.
    """

    name: str
    title: str
    group_size: int
    columns: dict[str, list]
    accepted: list[Answer]
    bug: str
    why: str
    threads: list[Thread]
    asks: Literal["advantage", "weight", "paths", "times"] = "advantage"
    rows: dict[str, list] = field(init=False)

    def __post_init__(self) -> None:
        number = len(self.columns["group"])
        usual = {"tokens": [3] * number, "prompt": self.columns["group"], "micro": [0] * number}
        usual |= {"rank": [0] * number, "version": [8] * number}
        object.__setattr__(self, "rows", usual | self.columns)


def rows(*columns: tuple[str, str]) -> dict[str, list]:
    """Read columns from aligned texts. Ids stay text, other values become numbers."""
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
        """
A trainer makes a group of every four rows. But prompt a has five rollouts and prompt b has three.
So the fifth rollout of a, a failure, is compared with those of b. The successes of b look better.
""",
        """
Each rollout is compared with the rollouts of its own prompt:

- Prompt a has the rewards 1, 0, 0, 0, 0. The mean is 0.2 and the std 0.447. So the success gets 0.8
  / 0.447 = 1.789, and the others −0.447.
- Prompt b has the rewards 1, 1, 0. The mean is 0.667 and the std 0.577. So the successes get 0.577,
  and the failure −1.155.

Another result is also correct. A trainer with groups of exactly four may take the first four
rollouts of a, and keep the other rows for later. The mean of 1, 0, 0, 0 is 0.25 and the std 0.5. So
the success gets 1.5, and the others −0.5.
""",
        [
            Thread(
                "THUDM/slime",
                2062,
                "2026-06-12",
                "Prompts with different numbers of rollouts get one mean over the batch.",
            ),
            Thread("radixark/miles", 1325, "2026-06-12", "Groups are made from a flat vector, by position."),
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
        """
One rollout became five rows, for example because it has five turns. If rows are counted, its reward
counts five times in the baseline of its group.
""",
        """
Group a has four rollouts with the rewards 1, 0, 0, 0. The mean is 0.25 and the std 0.5. All five
rows of the first rollout get 0.75 / 0.5 = 1.5, and the others get −0.5.

Group b has the rewards 1, 1, 0, 0. The mean is 0.5 and the std 0.577.

With the bug, group a counts as eight rollouts, five of them with the reward 1. The mean is 0.625 and
the std 0.518. The first rollout then gets (1 − 0.625) / 0.518 = 0.725 instead of 1.5.
""",
        [
            Thread(
                "radixark/miles",
                1325,
                "2026-06-12",
                "A rollout counts in the baseline once for each of its segments.",
            ),
            Thread(
                "microsoft/agent-lightning",
                462,
                "2026-01-21",
                "Rollouts with more turns have more weight in mean and std.",
            ),
            Thread(
                "microsoft/agent-lightning",
                489,
                "2026-02-13",
                "A question: four rollouts have six turns. May these six rows be one group?",
            ),
        ],
    ),
    Case(
        "lone-rollout",
        "A lone rollout",
        4,
        rows(("group", "a a a a b"), ("rollout", "0 1 2 3 4"), ("reward", "1 0 0 0 1")),
        [[1.5, -0.5, -0.5, -0.5, None]],
        """
Only one of four rollouts of prompt b is left. If a trainer uses the reward of this rollout as its
advantage, the response is reinforced without any comparison.
""",
        """
The rollout of b has no other rollout to be compared with: R − mean is 0, and the std of one number
is not defined. So it must not train.

Group a has the rewards 1, 0, 0, 0. The mean is 0.25 and the std 0.5.
""",
        [
            Thread("Tencent-Hunyuan/UniRL", 330, "2026-08-05", "A lone rollout should get 0, not NaN."),
            Thread("huggingface/trl", 7176, "2026-09-10", "A group with one rollout left is dropped."),
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
        """
All eight rewards are equal, so there is nothing to learn. But in float32 the mean of eight 1000.1
may differ from 1000.1 by one rounding error, 6e-5. The std is about as small. So (R − mean) / std
is as large as a real advantage. All eight responses are then pushed in the same direction.
""",
        """
The rewards are equal, so R − mean is 0 for every rollout.
""",
        [
            Thread(
                "NVIDIA-NeMo/RL",
                4158,
                "2026-09-16",
                "A std that is only a rounding error gives an advantage of −2075.",
            ),
            Thread(
                "modelscope/twinkle",
                288,
                "2026-09-17",
                "Rewards that are nearly equal give large advantages.",
            ),
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
        """
Four rollouts of prompt a were dispatched, and three came back. A trainer may add a fourth reward of
0, or use a rollout of prompt b in its place. Both are wrong.
""",
        """
There are four correct results for group a:

- The three rollouts are compared. The mean of 1, 0, 0 is 0.333 and the std 0.577. So they get 1.155
  and −0.577.
- The group is dropped.
- The group waits for its fourth rollout.
- An error names the group.

Group b is complete. The mean of 1, 1, 0, 0 is 0.5 and the std 0.577.
""",
        [
            Thread("NVIDIA-NeMo/RL", 3589, "2026-08-12", "Failed rollouts get the reward 0."),
            Thread("NVIDIA-NeMo/RL", 2394, "2026-05-04", "Fewer rollouts return than were requested."),
            Thread(
                "NVIDIA-NeMo/RL",
                2700,
                "2026-07-07",
                "The trainer waits forever for a group that is never complete.",
            ),
        ],
    ),
    Case(
        "masked-row",
        "A masked row in the baseline",
        4,
        rows(("group", "a a a a"), ("rollout", "0 1 2 3"), ("reward", "1 1 0 0"))
        | whole("tokens", "3 0 3 3"),
        [[1.155, None, -0.577, -0.577]],
        """
The second response is masked completely, for example because it was truncated. Its reward still
counts in the baseline, so it changes the advantages of the other rows.
""",
        """
The reward of the masked row has no effect. The other rewards are 1, 0, 0. Their mean is 0.333 and
their std 0.577. So they get 1.155 and −0.577.

With the bug, the mean of 1, 1, 0, 0 is used, and the three rows get 0.866, −0.866 and −0.866.
""",
        [
            Thread("NVIDIA-NeMo/RL", 3467, "2026-08-03", "The same case, with these rewards and advantages."),
            Thread(
                "NVIDIA-NeMo/RL",
                4160,
                "2026-09-17",
                "Rows that are masked in the loss count in the baseline.",
            ),
            Thread("OpenRLHF/OpenRLHF", 1239, "2026-05-17", "Samples without actions change the baseline."),
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
        """
Rejection sampling removed the second response. But its reward of 100 still counts in the baseline.
The only success of the group then gets a negative advantage.
""",
        """
The other rewards are 1, 0, 0. Their mean is 0.333 and their std 0.577. So they get 1.155 and
−0.577.

With the bug, the mean is 25.25, and the success gets (1 − 25.25) / 49.84 = −0.487.
""",
        [
            Thread("verl-project/verl", 6375, "2026-05-17", "A rejected reward of 100 stays in the group."),
            Thread("verl-project/verl", 6452, "2026-05-23", "A second report of #6375."),
            Thread("verl-project/verl", 6362, "2026-05-15", "The reward of a rejected token counts."),
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
        """
An optimiser step has two micro-batches. A trainer computes a mean over the tokens of each
micro-batch, and then averages the two means. The weight of a token then depends on which rows are
in its micro-batch.
""",
        """
The step has four rows and eight tokens. There are two correct results:

- In a mean over tokens, each token has the weight 1/8.
- In a mean over rows, each row has the weight 1/4. A row of one token has 1/4 per token, and the
  row of five tokens has 1/20 per token.

With the bug, a token has the weight 1/2 · 1/2 = 0.25 in the first micro-batch, which has two
tokens. In the second, with six tokens, it has 1/2 · 1/6 = 0.0833.
""",
        [
            Thread(
                "verl-project/verl",
                5625,
                "2026-03-16",
                "The mean over tokens is computed in each micro-batch.",
            ),
            Thread(
                "modelscope/ms-swift",
                10116,
                "2026-09-12",
                "The loss is divided twice by the number of micro-batches.",
            ),
            Thread("allenai/open-instruct", 1161, "2025-11-10", "The accumulation of the loss is corrected."),
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
        """
Two ranks have two rows each, and their gradients are averaged. A trainer computes a mean over the
tokens of each rank. The weight of a token then depends on which rows are on its rank.
""",
        """
The step has four rows and eight tokens. There are two correct results:

- In a mean over tokens, each token has the weight 1/8.
- In a mean over rows, each row has the weight 1/4. A row of one token has 1/4 per token, and the
  row of five tokens has 1/20 per token.

With the bug, each rank computes a mean over its own tokens, and the two means are averaged. The first
rank has two tokens, of weight 1/2 · 1/2 = 0.25 each. The second has six, of weight 1/2 · 1/6 = 0.0833 each.
""",
        [
            Thread(
                "verl-project/verl",
                5366,
                "2026-02-24",
                "With several ranks, the loss needs the counts of all ranks.",
            ),
            Thread(
                "huggingface/trl", 3231, "2025-04-04", "Tokens have equal weights only within one device."
            ),
        ],
        asks="weight",
    ),
    Case(
        "sum-over-ranks",
        "A sum that becomes a mean over ranks",
        2,
        rows(("group", "a a b b"), ("rollout", "0 1 2 3"), ("reward", "1 0 1 0"))
        | whole("tokens", "1 1 1 5")
        | whole("rank", "0 0 1 1"),
        [[0.05] * 4, [0.25] * 4, [0.2] * 4, [1.0] * 4],
        """
The loss of a step is a sum over tokens, for example a sum that is divided by a fixed length. Each of
two ranks computes the sum over its own rows. But data parallelism averages the gradients of the
ranks. So the gradient is half of the sum. With eight ranks it is an eighth, and the learning rate is
in effect eight times smaller.
""",
        """
Two ranks must give the same weights as one. Each token has the same weight, whatever the length of
its row. There are four usual sums. The step has four rows, and the fixed length is 5 tokens.

- Dr. GRPO divides by the rows and by the fixed length: 1 / (4 · 5) = 0.05.
- A sum over tokens and a mean over rows: 1/4 = 0.25.
- A sum over tokens that is divided only by the fixed length: 1/5 = 0.2.
- A sum that is not divided: 1.

With the bug, each of these weights is half as large.
""",
        [
            Thread(
                "verl-project/verl",
                5366,
                "2026-02-24",
                "The loss must be multiplied by the number of ranks, because FSDP averages their gradients.",
            ),
            Thread(
                "verl-project/verl-SpeCo",
                29,
                "2026-07-17",
                "A gradient was divided by the number of ranks.",
            ),
            Thread(
                "radixark/miles",
                3231,
                "2026-09-13",
                "The gradient of a sum over tokens depends on the tokens of the step and on the ranks.",
            ),
        ],
        asks="weight",
    ),
    Case(
        "threshold",
        "A threshold for each micro-batch",
        2,
        rows(("group", "a a b b c c d d"), ("rollout", "0 1 2 3 4 5 6 7"), ("reward", "1 0 1 0 1 0 1 0"))
        | whole("tokens", "1 1 1 1 1 1 1 1")
        | whole("micro", "0 0 0 0 1 1 1 1")
        | {"score": [16.0, 9.0, 4.0, 1.0, 4.0, 1.0, 1.0, 0.0]}
        | {"deviation": [4.0, -3.0, -2.0, 1.0, 2.0, -1.0, -1.0, 0.0]},
        [[0.125, 0.125, *[0.0] * 6], [0.5, 0.5, *[0.0] * 6]],
        """
Only the quarter of the tokens with the highest entropy trains. A trainer computes the threshold for
each micro-batch. Then the number of rows that fit into memory decides which tokens train.
""",
        """
The step has eight rows of one token each. A quarter are two tokens: those with the entropies 16 and 9.
There are two correct results:

- The other tokens still count in the mean. So the weight of these two tokens is 1/8.
- The mean is over the tokens that train. So it is 1/2.

With the bug, each micro-batch of four tokens trains one of them: the one with the entropy 16, and one
with the entropy 4.

KL-Cov chooses tokens by a covariance, and gives them a penalty. Here the advantage of a token is its
deviation, and its log-probability is its deviation less 5. The mean deviation of each micro-batch is 0. So
the covariance is the square of the deviation, which is the number in the column "entropy". The result
of a trainer with KL-Cov is the weight of the penalty.
""",
        [
            Thread(
                "verl-project/verl",
                7829,
                "2026-09-10",
                "The tokens that KL-Cov chooses change with the size of the micro-batch.",
            ),
            Thread(
                "huggingface/trl",
                3833,
                "2025-08-01",
                "The threshold was computed on each rank. Now it is computed over the ranks.",
            ),
            Thread(
                "radixark/miles",
                3205,
                "2026-09-10",
                "A new option, whose threshold is that of the micro-batch.",
            ),
        ],
        asks="weight",
    ),
    Case(
        "shared-tokens",
        "Sampled tokens that branches share",
        1,
        rows(("group", "a a a"), ("rollout", "0 0 0"), ("reward", "1 1 1"))
        | whole("tokens", "2 2 2")
        | {"prompt": ["1 2", "1 2 3 4", "1 2 3 4"], "sampled": ["3 4", "5 6", "7 8"]},
        [[1.0, 1.0, 1.0]],
        """
A rollout forks: two turns go on from the same beginning. Here the rows of the table are turns. The policy
sampled the tokens 3 and 4 once. But a trainer that makes a row of each branch, 1 2 3 4 5 6 and
1 2 3 4 7 8, has them in both rows. If they are in the loss of both, they train twice.
""",
        """
Each sampled token trains once. It does not matter in which row.

With the bug, 3 and 4 train twice, and the other tokens once. A trainer may also remove a branch. Then
its tokens do not train at all, and nothing says so.
""",
        [
            Thread(
                "PrimeIntellect-ai/prime-rl",
                2975,
                "2026-07-08",
                "A token in N branches has N times the weight. The thread corrects this.",
            ),
            Thread(
                "huggingface/trl",
                6250,
                "2026-07-02",
                "How the asynchronous trainer makes rows of turns, so that each token trains once.",
            ),
        ],
        asks="times",
    ),
    Case(
        "stale-group",
        "A stale group",
        4,
        rows(("group", "a a a a b b b b"), ("rollout", "0 1 2 3 4 5 6 7"), ("reward", "1 0 0 0 1 1 0 0"))
        | whole("version", "3 3 3 3 8 8 8 8"),
        [[None] * 4 + [0.866, 0.866, -0.866, -0.866]],
        """
An asynchronous trainer trains rows that an old policy sampled, although its limit for staleness
excludes them.
""",
        """
The policy has version 8, and rows may be at most one version old. Group a was sampled by version 3.
So the whole group is dropped.

Group b is not affected. The mean of 1, 1, 0, 0 is 0.5 and the std 0.577.
""",
        [
            Thread(
                "huggingface/trl",
                7176,
                "2026-09-10",
                "Another problem: rollouts that will be dropped as stale are still generated to the end.",
            ),
            Thread(
                "PrimeIntellect-ai/prime-rl",
                3313,
                "2026-08-21",
                "A discussion of which rows of a stale group are removed.",
            ),
            Thread("allenai/open-instruct", 1738, "2026-06-25", "Stale results were trained."),
        ],
    ),
    Case(
        "two-paths",
        "Two functions for advantages, a filter in only one",
        6,
        rows(
            ("group", "a a a a a a b b b b b b"),
            ("rollout", "0 1 2 3 4 5 6 7 8 9 10 11"),
            ("reward", "1 1 0 0 0 0 1 1 1 1 1 1"),
        )
        | whole("tokens", "3 0 3 3 3 3 3 3 3 3 3 3"),
        [],
        """
A trainer may have two functions for the advantages, for example a loop and a vectorised one. A
filter, such as one for masked rows, is in the first function and was forgotten in the second. Then
the same rows get different advantages.
""",
        """
The same rows go through both functions, and must get the same advantages. The second row is masked,
and group b has equal rewards. A filter for such rows must be in both functions or in none. This case
only compares the two functions. Whether the reward of a masked row may be in the baseline is
[another case](masked-row.md).
""",
        [
            Thread(
                "NVIDIA-NeMo/RL",
                4061,
                "2026-09-09",
                "One controller passes the mask on, and two loops do not.",
            ),
            Thread(
                "NVIDIA-NeMo/Automodel", 3796, "2026-09-03", "Only one of four losses checks for 0 tokens."
            ),
        ],
        asks="paths",
    ),
    Case(
        "reused-ids",
        "Reused ids",
        2,
        rows(("group", "a a b b"), ("rollout", "0 1 0 1"), ("reward", "1 0 0 0.5")),
        [[0.707, -0.707, -0.707, 0.707]],
        """
Two workers number their rollouts from 0, so two groups have the same rollout ids. If a trainer
identifies a rollout by its id alone, rows of two prompts become one rollout.
""",
        """
There are two correct results:

- A rollout is identified by its group and its id. Group a then has the rewards 1 and 0, and group b
  has 0 and 0.5. Both groups get 0.707 and −0.707.
- The batch is refused.
""",
        [
            Thread("InternLM/xtuner", 1923, "2026-06-17", "Several samplers use the same rollout ids."),
            Thread("rllm-org/rllm", 829, "2026-08-12", "Ids with a colon make the whole batch one group."),
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
        """
A grader failed, so one row has no reward. The NaN spreads to the other rollouts of the group, and
through the gradient to all parameters. Some trainers replace the NaN by the reward 0. The response
that was not graded then becomes less likely.
""",
        """
There are three correct results for group a:

- The other rollouts are compared. The mean of 1, 0, 0 is 0.333 and the std 0.577. So they get 1.155
  and −0.577.
- The group is dropped.
- An error names the row.

With the reward 0, the group would have 1, 0, 0, 0, and the advantages 1.5 and −0.5.

Group b has the rewards 1, 1, 0, 0. The mean is 0.5 and the std 0.577.
""",
        [
            Thread(
                "huggingface/trl", 5902, "2026-06-01", "A row without a reward counted as 0 in the baseline."
            ),
            Thread("Tencent-Hunyuan/UniRL", 335, "2026-08-05", "One NaN made the whole tensor NaN."),
        ],
    ),
    Case(
        "step-without-tokens",
        "A step without tokens",
        2,
        rows(("group", "a a"), ("rollout", "0 1"), ("reward", "1 0")) | whole("tokens", "0 0"),
        [[None, None]],
        """
Every row of an optimiser step is masked. A mean over no tokens is 0 / 0. One NaN in the gradient
makes every parameter NaN.
""",
        """
There is nothing to train. Three results are correct: the gradient is 0, the step is skipped, or it
is refused with an error.
""",
        [
            Thread(
                "pytorch/torchtitan",
                4247,
                "2026-08-20",
                "Batches without valid tokens still make an optimiser step.",
            ),
            Thread(
                "NVIDIA-NeMo/Automodel",
                3797,
                "2026-09-03",
                "The backward pass carries 0 / 0 into every weight.",
            ),
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
        """
Some trainers call a rollout a session. A session may have several outputs, and each output is a row.
Here the last output of a session was truncated, and is masked. If a trainer reads the advantage of the
session at this output, it finds 0, because the output is masked. Then the first output does not train,
although the session is the only success of the group.
""",
        """
The session is rollout 0, and its two outputs are the first two rows. It counts once in the group. The
rewards of the group are 1, 0, 0, 0. The mean is 0.25 and the std 0.5. So the first output gets 1.5.
""",
        [
            Thread(
                "NovaSky-AI/SkyRL",
                1492,
                "2026-04-10",
                "Earlier steps get the masked advantages of the last step.",
            ),
            Thread(
                "verl-project/verl",
                7580,
                "2026-08-27",
                "All rows of a session get the advantage of its last row.",
            ),
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
        """
The prompt 2+2 was dispatched twice, as two groups. A trainer that groups by the text of the prompt
compares the four rollouts with each other.
""",
        """
Each rollout is compared only with the rollouts of its own group:

- Group a has the rewards 0 and 1. The mean is 0.5 and the std 0.707. So they get −0.707 and 0.707.
- Group b has the rewards 10 and 10. They are equal, so both get 0.

With the bug, 0 is compared with 10.
""",
        [
            Thread(
                "NVIDIA-NeMo/RL",
                3882,
                "2026-08-27",
                "Prompts with different images can have the same tokens. They became one group.",
            ),
            Thread("huggingface/trl", 3045, "2025-03-10", "A batch can contain equal prompts."),
        ],
    ),
]
