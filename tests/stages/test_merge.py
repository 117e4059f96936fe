"""Turns that are merged into one row train like separate turns."""

from __future__ import annotations

import pytest
import torch
from alone import said_by
from gradients import distance
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack
from tries import ATTENTION, FULL, LOG_PROBS, LOSS, dense, ragged

from headrace.pipeline import Pipeline
from headrace.transforms import (
    BatchError,
    FanOutCollapse,
    GroupRelativeAdvantage,
    LossWeight,
    MergeTurns,
    SampleFilter,
    ShuffleSplit,
)
from headrace.transforms.table.schema import IN_LOSS, IS_FIRST_SEGMENT, ROW

# A turn: the number of tokens that its prompt adds, the number of sampled tokens, and whether the earlier
# tokens are tokenised again.
TURN = st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(0, 4).map(lambda each: each == 0))
ROLLOUTS = st.lists(st.lists(TURN, min_size=1, max_size=5), min_size=1, max_size=4)
LAYOUTS = st.sampled_from(["left", "right", "holes", "ragged"])


def rows_of(rollouts) -> list[dict]:
    """A row for each turn: its tokens, which of them train, and whether it continues the row before."""
    found, token = [], 1
    for number, turns in enumerate(rollouts):
        whole: list[int] = []
        for place, (prompt, sampled, anew) in enumerate(turns):
            extends = place > 0 and not anew
            if not extends:
                whole = list(range(token, token + max(len(whole), 1)))
                token += len(whole)
            whole = whole + list(range(token, token + prompt + sampled))
            token += prompt + sampled
            inside = [place >= len(whole) - sampled for place in range(len(whole))]
            row = {"rollout": number, "tokens": [each % 50 for each in whole], "trains": inside}
            found.append(row | {"extends": extends, "turn": place, "width": len(whole)})
    return found


def batch_of(rows, layout="left", *, turn: bool = False) -> TensorDict:
    """A batch with an advantage per row, and columns per token whose numbers differ in each row."""
    tokens = [row["tokens"] for row in rows]
    batch = ragged(tokens) if layout == "ragged" else dense(tokens, max(map(len, tokens)) + 2, layout)
    batch = batch.exclude("loss_weight")
    batch["rollout_id"] = torch.tensor([row["rollout"] for row in rows])
    batch["group_id"] = torch.tensor([row["rollout"] // 2 for row in rows])
    if turn:
        batch["turn"] = torch.tensor([row["turn"] for row in rows])
    out = []
    for number, (row, wanted) in enumerate(zip(batch.unbind(0), rows, strict=True)):
        there = row[ATTENTION]
        loss, log_probs = torch.zeros_like(there), torch.full(there.shape, torch.nan).double()
        loss[there] = torch.tensor(wanted["trains"])
        log_probs[loss] = -(number + torch.arange(int(loss.sum()), dtype=torch.float64) / 8)
        out.append(row.clone().set(LOSS, loss).set(LOG_PROBS, log_probs))
    return lazy_stack(out) if layout == "ragged" else torch.stack(out)


def merged_by_loop(rows) -> list[list[int]]:
    segments: list[list[int]] = []
    for number, row in enumerate(rows):
        if row["extends"]:
            segments[-1].append(number)
        else:
            segments.append([number])
    return segments


@settings(max_examples=20)
@example([[(1, 2, False), (1, 2, False)]], "holes", False)
@given(ROLLOUTS, LAYOUTS, st.booleans())
def test_a_merged_row_has_the_numbers_of_the_turn_that_trains_a_token(rollouts, layout, by_turn):
    rows = rows_of(rollouts)
    batch = batch_of(rows, layout, turn=by_turn)
    stage = MergeTurns(turn_key="turn" if by_turn else None)
    said = said_by(stage, batch)
    segments = merged_by_loop(rows)
    last = {segment[-1] for segment in segments}
    assert len(said.batch) == len(segments)
    assert said.reasons == ["trained" if number in last else "merged" for number in range(len(rows))]
    assert said.metrics["merged"] == len(rows) - len(segments)
    assert said.metrics["broken"] == sum(row["turn"] > 0 and not row["extends"] for row in rows)
    for out, segment in zip(said.batch.unbind(0), segments, strict=True):
        there = out[ATTENTION]
        assert out[FULL][there].tolist() == rows[segment[-1]]["tokens"]
        trained = {}
        for number in segment:
            own = batch[number]
            real = own[ATTENTION]
            for place, inside in enumerate(own[LOSS][real].tolist()):
                if inside:
                    credit = float(own["advantage"].reshape(-1)[0])
                    trained[place] = (float(own[LOG_PROBS][real][place]), credit)
        assert out[LOSS][there].nonzero().flatten().tolist() == sorted(trained)
        assert not out[LOSS][~there].any()
        for place, (log_prob, credit) in trained.items():
            assert float(out[LOG_PROBS][there][place]) == log_prob
            assert float(out["advantage"][there][place]) == credit


@settings(max_examples=20)
@given(ROLLOUTS, st.permutations(range(4)))
def test_turns_are_merged_in_the_order_of_the_turn_column(rollouts, order):
    """The rows have any order. A merged row has the row number of its last turn."""
    rows = rows_of(rollouts)
    shuffled = sorted(range(len(rows)), key=lambda i: (order[rows[i]["rollout"]] * 7 + i * 3) % 5)
    batch = batch_of(rows, turn=True)
    batch[ROW] = torch.arange(len(rows))
    stage = MergeTurns(turn_key="turn")
    plain, other = stage(batch), stage(batch[torch.tensor(shuffled)])
    back = other[other[ROW].argsort()]
    for key in (FULL, LOSS, LOG_PROBS, "advantage"):
        assert torch.equal(back[key].nan_to_num(9.0), plain[key].nan_to_num(9.0)), key


@pytest.mark.torchrl
@pytest.mark.parametrize("mean", ["token", "rollout", "group", "constant"])
def test_merged_rows_have_the_gradient_of_the_turns(mean):
    from tree_models import gradient_of, make_actor

    rows = rows_of(
        [
            [(2, 2, False), (1, 2, False), (2, 1, False)],
            [(1, 3, False)],
            [(2, 2, False), (1, 2, True), (0, 2, False)],
        ]
    )
    actor, batch = make_actor("tiny"), batch_of(rows)
    with torch.no_grad():
        own = actor.get_dist(batch, logits_key="logits").log_prob(batch[FULL])
    batch[LOG_PROBS] = torch.where(batch[LOSS], own + 0.1 * torch.sin(own * 99), torch.nan)
    batch["next", "ref_log_probs", "full"] = batch[LOG_PROBS] - 0.1
    merged = MergeTurns()(batch)
    assert len(merged) == 4 < len(batch)
    apart = gradient_of(actor, batch, mean=mean)
    assert apart.norm() > 1e-3
    for transform in (None, "pack", "tree"):
        assert distance(gradient_of(actor, merged, transform, mean=mean), apart) <= 1e-12


def test_each_turn_has_a_ledger_entry_and_every_rollout_trains():
    rows = rows_of(
        [[(2, 2, False), (1, 2, False)], [(1, 2, False), (1, 1, True)], [(1, 1, False)], [(1, 1, False)]]
    )
    batch = batch_of(rows)
    batch["next", "reward"] = torch.tensor([0.0, 1.0, 0.0, 2.0, 5.0, 3.0])
    pipeline = Pipeline(
        {
            "collapse": FanOutCollapse(reward="sum"),
            "advantage": GroupRelativeAdvantage(scale="none"),
            "merge": MergeTurns(),
            "split": ShuffleSplit(minibatches=1, max_tokens=99),
            "weight": LossWeight(unit="rollout"),
        }
    )
    run = pipeline.run(batch)
    assert run.metrics["merge/broken"] == 1.0
    assert run.metrics["out/merge/merged"] == 1.0
    assert run.metrics["rows/trained"] == 5.0
    assert run.metrics["rollouts/trained"] == 4.0
    assert [row["row"] for row in run.ledger.rows("merge/merged")] == [0]
    assert len(run.batch) == 5


def test_a_masked_turn_trains_nothing_in_the_merged_row():
    rows = rows_of([[(2, 2, False), (1, 2, False)], [(1, 1, False)]])
    batch = batch_of(rows)
    for quiet in (0, 1):
        masked = SampleFilter(criterion=lambda _, quiet=quiet: torch.arange(3) != quiet)(batch)
        merged = MergeTurns()(masked)
        trains = merged[LOSS][0][merged[ATTENTION][0]]
        own = [place for place, inside in enumerate(rows[1 - quiet]["trains"]) if inside]
        assert trains.nonzero().flatten().tolist() == own
        if quiet == 0:
            assert merged[IN_LOSS].tolist() == [True, True]
            assert merged["headrace", "length"].tolist() == [4, -1]
        else:  # a row in the loss is not merged into a masked row
            assert merged[IN_LOSS].tolist() == [True, False, True]
            assert merged["headrace", "length"].tolist() == [-1, 2, -1]


@pytest.mark.parametrize("quiet", [None, 0, 1])
def test_the_ledger_counts_tokens_of_merged_rows_as_trained(quiet):
    rows = rows_of([[(2, 2, False), (1, 2, False)], [(1, 1, False)]])
    batch = batch_of(rows)
    batch["next", "reward"] = torch.ones(3)
    stages = {
        "filter": SampleFilter(criterion=lambda _: torch.arange(3) != (3 if quiet is None else quiet)),
        "merge": MergeTurns(),
    }
    run = Pipeline(stages).run(batch, epochs=1)
    out = run.batch
    left = run.report(batch=batch)
    inside = left.columns["reason"] == 0
    assert left.columns["tokens"][inside].sum() == int(out[LOSS].sum())
    assert inside.sum() == int(out[LOSS].any(1).sum())
    assert left.numbers["tree/tokens/rows"] == int(out[ATTENTION].sum())


def test_a_merged_row_is_the_first_segment_if_one_of_its_turns_was():
    batch = batch_of(rows_of([[(2, 2, False), (1, 2, False), (1, 1, True)]]))
    batch["next", "reward"] = torch.ones(3)
    assert MergeTurns()(FanOutCollapse()(batch))[IS_FIRST_SEGMENT].tolist() == [True, False]


def test_a_row_that_trains_a_token_again_is_not_merged():
    for alone in (False, True):  # the row trains only this token, or tokens of its own, too
        batch = batch_of(rows_of([[(2, 2, False), (1, 2, False)]]))
        again = batch[ATTENTION][1] & (batch[ATTENTION][1].cumsum(0) == 4)
        batch[LOSS][1] = again if alone else again | batch[LOSS][1]
        said = said_by(MergeTurns(), batch)
        assert len(said.batch) == 2
        assert said.metrics["broken"] == 1


def test_merged_rows_may_differ_in_how_they_end_and_in_their_prompts():
    """The merged row ends like its last turn. Prompts and responses of turns are removed."""
    batch = batch_of(rows_of([[(2, 2, False), (1, 2, False), (1, 2, False)], [(1, 1, False)]]))
    batch["next", "done"] = torch.tensor([[False], [False], [True], [True]])
    batch["tokens", "prompt"] = torch.arange(4)[:, None]
    merged = MergeTurns()(batch)
    assert merged["next", "done"].flatten().tolist() == [True, True]
    assert ("tokens", "prompt") not in merged.keys(True)


def test_rows_that_cannot_be_merged_are_refused_with_the_reason():
    rows = rows_of([[(2, 2, False), (1, 2, False)], [(1, 1, False)]])
    for layout, key in (("left", ("mine", "score")), ("ragged", "score")):
        batch = batch_of(rows, layout)
        batch[key] = torch.tensor([[1.0], [2.0], [3.0]])
        with pytest.raises(BatchError, match=r"'score'\)? differs in row 0 \(rollout 0\)\. .*remove it"):
            MergeTurns()(batch)
    batch = batch_of(rows)
    batch["score"] = torch.full((3, 1), torch.nan)
    assert len(MergeTurns()(batch)) == 2  # NaN equals NaN here
    batch["entropy", "full"] = torch.zeros(3, 3)
    with pytest.raises(BatchError, match=r"the width of the tokens, \d+; \('entropy', 'full'\) has \(3,\)"):
        MergeTurns()(batch)
    batch = batch_of(rows)
    padding = batch.clone()
    padding[LOSS][1] |= ~padding[ATTENTION][1]
    with pytest.raises(BatchError, match=r"mask is False in row 1 \(rollout 0\), and merging would drop"):
        MergeTurns()(padding)
    with pytest.raises(BatchError, match="needs a rollout_id ≥ 0; found -1 at row 2: rows without an id"):
        MergeTurns()(batch.clone().set("rollout_id", torch.tensor([0, 0, -1])))
    with pytest.raises(BatchError, match="put MergeTurns before ShuffleSplit"):
        MergeTurns()(ShuffleSplit(minibatches=1)(batch))
    with pytest.raises(BatchError, match="must have different turns"):
        MergeTurns(turn_key="turn")(batch.set("turn", torch.zeros(3).long()))
    with pytest.raises(BatchError, match=r"the shape of the tokens, \(3, 10\); .* has \(3, 2\)"):
        MergeTurns()(batch.set(LOSS, batch[LOSS][:, :2]))
