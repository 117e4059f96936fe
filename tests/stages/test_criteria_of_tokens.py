"""A criterion computes one number per row from (B, T) columns of tokens. Errors say how to read them."""

from __future__ import annotations

import pytest
import torch
from any_rank import TOGETHER
from batches import batch_of
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_threads import results_in_threads
from tensordict import TensorDict, lazy_stack
from tensordict.nn import TensorDictModule

from headrace.pipeline import Pipeline
from headrace.transforms import BatchError, Criterion, MissingKeyError, RewardWithin, SampleFilter

ENTROPY, MASK = ("entropy", "full"), ("masks", "all_assistant_mask")


class Sure(Criterion, columns=("loss_mask",)):
    """Keeps rows whose mean entropy in the loss is at most `most`."""

    token_keys = (ENTROPY,)

    def __init__(self, *, most: float, **names):
        self.name_columns(names)
        self.most, self.in_keys = most, (self.loss_mask_key,)

    def decide(self, rows):
        entropy, mask = rows.token_column(ENTROPY), rows.token_column("loss_mask")
        return rows.from_batch((entropy * mask).sum(-1) / mask.sum(-1)) <= self.most


@settings(max_examples=20)
@given(st.lists(st.tuples(st.floats(0, 1), st.lists(st.floats(0, 1), min_size=1, max_size=4)), min_size=1))
def test_a_criterion_of_tokens_keeps_the_rows_of_a_loop(drawn):
    """A filter drops rows first, so the criterion must not confuse the tokens of different rows."""
    rewards, entropies = [reward for reward, _ in drawn], [values for _, values in drawn]
    batch = batch_of(rewards, [0] * len(drawn))
    batch["next", "reward"] = torch.tensor(rewards, dtype=torch.float64)
    batch[ENTROPY] = torch.tensor([[*values, *[9.0] * (4 - len(values))] for values in entropies])
    batch[MASK] = torch.arange(4) < torch.tensor([[len(values)] for values in entropies])
    expected = []
    for row, (reward, _) in enumerate(drawn):
        inside = [float(batch[ENTROPY][row, t]) for t in range(4) if batch[MASK][row, t]]
        if reward >= 0.5 and torch.tensor(inside).sum() / len(inside) <= 0.5:
            expected.append(row)
    best = SampleFilter(criterion=lambda batch: batch["next", "reward"].flatten() >= 0.5, action="drop")
    sure = SampleFilter(criterion=Sure(most=0.5), action="drop")
    assert Pipeline({"best": best, "sure": sure})(batch)["rollout_id"].tolist() == expected


def not_least(batch: TensorDict) -> torch.Tensor:
    reward = batch["next", "reward"].flatten()
    return reward >= reward.min()  # fails without rows


def kept_on(rank: int, world: int) -> list[list[int]]:
    """The rollouts that a rank keeps. Rank 0 has one row, and rank 1 has two. Then rank 0 has none."""
    batch = batch_of([0.0, 1.0, 2.0], [0, 0, 0])
    batch[ENTROPY] = torch.tensor([[0.0], [1.0], [0.0]]).expand(3, 4).contiguous()
    own = batch[rank:][: rank + 1]
    sure, late = Sure(most=0.5), RewardWithin(low=1.0)
    judges = {"sure": sure, "late": late, "asked": not_least}
    stages = {name: SampleFilter(criterion=judge, action="drop") for name, judge in judges.items()}
    kept = (Pipeline(each, **TOGETHER)(own) for each in ({"sure": stages["sure"]}, stages))
    return [each["rollout_id"].tolist() for each in kept]


def test_each_rank_keeps_its_own_rows_by_their_tokens_and_a_rank_without_rows_none():
    assert results_in_threads(kept_on, 2) == [[[0], []], [[2], [2]]]


def test_the_order_check_reads_the_token_columns_of_a_criterion():
    assert SampleFilter(criterion=Sure(most=1.0)).in_keys == [MASK, ENTROPY]
    later = TensorDictModule(lambda entropy: entropy, in_keys=[("logits", "full")], out_keys=[ENTROPY])
    with pytest.raises(ValueError, match=r"'sure' reads \('entropy', 'full'\), which 'later' writes later"):
        Pipeline({"sure": SampleFilter(criterion=Sure(most=1.0)), "later": later})


def test_a_renamed_mask_is_read_by_its_role():
    batch = batch_of([0.0, 1.0], [0, 0])
    batch[ENTROPY] = torch.tensor([[0.0, 1, 1, 1], [1.0, 1, 1, 1]])
    batch["mine"] = torch.tensor([[True, False, False, False]] * 2)
    keep = Sure(most=0.5, loss_mask_key="mine")
    assert SampleFilter(criterion=keep, action="drop")(batch)["rollout_id"].tolist() == [0]


HOW = r"token column is rows.token_column\(KEY\), and the batch with its tokens is rows.tokens\(\)"


@pytest.mark.parametrize(
    ("decide", "error", "message"),
    [
        (lambda rows: rows["batch"], MissingKeyError, rf"finds no column 'batch': a {HOW}"),
        (lambda rows: rows.batch, AttributeError, rf"no rows.batch; a column is rows\['batch'\]; a {HOW}"),
        (
            lambda rows: rows["entropy"],
            BatchError,
            r"'entropy' is a group of columns: .* \('entropy', 'full'\)",
        ),
        (
            lambda rows: rows.token_column("entropi"),
            MissingKeyError,
            "needs the key 'entropi'; the batch has",
        ),
        (
            lambda rows: rows.token_column("entropy"),
            BatchError,
            "needs dense rows in 'entropy'; found Tensor",
        ),
        (
            lambda rows: rows.token_column(ENTROPY) > 0,
            BatchError,
            r"returned .*with rows\.from_batch\(result\)",
        ),
    ],
)
def test_errors_say_how_to_read_tokens(decide, error, message):
    class Mine(Criterion):
        token_keys = (ENTROPY,)

        def decide(self, rows):
            return decide(rows)

    batch = batch_of([0.0, 1.0], [0, 0])
    with pytest.raises(error, match=message):
        SampleFilter(criterion=Mine())(batch)


def test_ragged_rows_are_refused():
    rows = [TensorDict({ENTROPY: torch.zeros(n), MASK: torch.ones(n, dtype=torch.bool)}) for n in (2, 3)]
    with pytest.raises(BatchError, match=r"needs dense rows in \('entropy', 'full'\); found ragged rows"):
        SampleFilter(criterion=Sure(most=1.0))(lazy_stack(rows))
