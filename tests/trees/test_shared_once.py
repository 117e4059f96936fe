"""A sampled token that rows of one rollout share trains once."""

from __future__ import annotations

from random import Random

import pytest
import torch
from alone import said_by
from any_rank import trained_once_of_rank
from composed import composed
from gradients import distance
from rank_threads import on_ranks, results_in_threads
from tensordict import TensorDict, lazy_stack
from tries import ATTENTION, FULL, LOG_PROBS, LOSS, dense, ragged

from headrace.pipeline import Pipeline, load_pipeline, make_report
from headrace.pipeline.tools.report import count_trained_again
from headrace.transforms import (
    BatchError,
    FanOutCollapse,
    GroupRelativeAdvantage,
    LengthWithin,
    LossWeight,
    MergeTurns,
    RewardWithin,
    SampleFilter,
    ShuffleSplit,
    TrainSharedOnce,
    weighted_loss,
)
from headrace.transforms.table.schema import COUNTED, IN_LOSS, LENGTH

LAYOUTS = ("left", "right", "ragged")
SEEDS = (0, 1, 3)


def forked(seed: int, layout: str = "left", *, rollouts: int = 3, odd: bool = True) -> TensorDict:
    """Rollouts of one to six rows that fork up to three times, in a random order of rows.

    There are only three kinds of tokens, so prefixes are often equal by chance. With `odd`, some rows are out
    of the loss, and some tokens in the mask have no finite log-probability.
    """
    draw = Random(seed)
    rows = []
    for rollout in range(rollouts):
        grown = [(draw.choices((1, 2, 3), k=draw.randint(1, 4)), 0)]
        for _ in range(draw.randint(0, 5)):
            stem, depth = draw.choice([each for each in grown if each[1] < 3])
            at = draw.randint(1, len(stem))
            grown.append((stem[:at] + draw.choices((1, 2, 3), k=draw.randint(0, 4)), depth + 1))
        rows += [(rollout, tokens) for tokens, _ in grown]
    draw.shuffle(rows)
    tokens = [tokens for _, tokens in rows]
    batch = ragged(tokens) if layout == "ragged" else dense(tokens, max(map(len, tokens)) + 2, layout)
    batch["rollout_id"] = torch.tensor([10 * rollout for rollout, _ in rows])
    batch["group_id"] = batch["rollout_id"] // 20
    batch["next", "reward"] = batch["rollout_id"] / 8.0
    if odd:
        stays = [draw.random() < 0.8 for _ in rows]
        batch[IN_LOSS] = torch.tensor(stays)
        batch[COUNTED] = torch.tensor([own or draw.random() < 0.5 for own in stays])
    out = []
    for row in batch.unbind(0):
        there = row[ATTENTION]
        loss, log_probs = torch.zeros_like(there), torch.full(there.shape, torch.nan).double()
        loss[there] = torch.tensor([draw.random() < 0.8 for _ in range(int(there.sum()))])
        log_probs[loss] = -torch.rand(int(loss.sum()), generator=torch.Generator().manual_seed(seed)).double()
        if odd:
            log_probs[loss & (torch.arange(len(loss)) % 7 == 3)] = torch.nan
        out.append(row.clone().set(LOSS, loss).set(LOG_PROBS, log_probs))
    return lazy_stack(out) if layout == "ragged" else torch.stack(out)


def trained_by_loop(batch: TensorDict, once: bool) -> list[list[tuple]]:
    """For each row, the paths of the tokens that train. With `once`, paths of earlier rows are left out."""
    seen: set[tuple] = set()
    found = []
    for number in range(len(batch)):
        row = batch[number]
        tokens, loss, log_probs = (row[key][row[ATTENTION]].tolist() for key in (FULL, LOSS, LOG_PROBS))
        in_loss = bool(row[IN_LOSS]) if IN_LOSS in batch.keys(True) else True
        paths = []
        for at in range(len(tokens)):
            path = (int(row["rollout_id"]), *tokens[: at + 1])
            if in_loss and loss[at] and log_probs[at] == log_probs[at] and not (once and path in seen):
                paths.append(path)
                seen.add(path)
        found.append(paths)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_sampled_prefix_of_a_rollout_trains_exactly_once(layout):
    """A prefix trains in the first row of the rollout that has the prefix in the loss."""
    shared = 0
    for seed in range(8):
        batch = forked(seed, layout)
        said = said_by(TrainSharedOnce(), batch)
        before, after = trained_by_loop(batch, once=False), trained_by_loop(batch, once=True)
        assert trained_by_loop(said.batch, once=False) == after, seed
        every = [path for paths in after for path in paths]
        assert len(every) == len(set(every))
        assert set(every) == {path for paths in before for path in paths}
        given = [was and not now for was, now in zip(before, after, strict=True)]
        out = [len(was) - len(now) for was, now in zip(before, after, strict=True)]
        assert said.reasons == ["shared" if gone else "trained" for gone in given]
        assert said.metrics["shared_tokens"] == sum(out)
        there = said.batch
        assert said_by(TrainSharedOnce(), there).metrics["shared_tokens"] == 0
        for key in (FULL, ATTENTION, "advantage"):
            assert all(torch.equal(a[key], b[key]) for a, b in zip(batch, there, strict=True)), key
        if LENGTH in there.keys(True):
            lengths = [int(row[LOSS].sum()) for row in batch]
            assert there[LENGTH].tolist() == [n if o else -1 for n, o in zip(lengths, out, strict=True)]
        else:
            assert not any(out)
        shared += sum(out)
    assert shared > 30


def test_advantages_and_baselines_do_not_change():
    """A row that equals another row leaves the loss with the reason `once/shared`."""
    rows = [[1, 2, 3], [1, 2, 3], [1, 2], [1, 4]]
    batch = dense(rows).exclude("advantage", "loss_weight")
    batch["rollout_id"], batch["group_id"] = torch.tensor([0, 0, 1, 2]), torch.zeros(4, dtype=torch.int64)
    batch["next", "reward"] = torch.tensor([1.0, 1.0, 0.0, 0.0])
    stages = {"collapse": FanOutCollapse(), "advantage": GroupRelativeAdvantage()}
    plain = Pipeline(stages).run(batch)
    run = Pipeline({**stages, "once": TrainSharedOnce(), "weight": LossWeight()}).run(batch)
    assert [row["row"] for row in run.ledger.rows("once/shared")] == [1]
    assert torch.equal(run.batch["advantage"], plain.batch["advantage"])
    assert run.batch["num_tokens"].tolist() == [4] * 4  # rows 0, 2 and 3 train 2, 1 and 1 of their tokens
    assert run.batch["loss_weight"].tolist() == [0.25, 0.0, 0.25, 0.25]


@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_the_gradient_is_that_of_the_distinct_tokens(layout):
    """The loss of a token is a parameter of its path, so the gradient says how much each path weighs."""
    for seed in range(4):
        batch = forked(seed, layout, odd=False)
        every = sorted({path for paths in trained_by_loop(batch, once=False) for path in paths})
        number = {path: at for at, path in enumerate(every)}
        stages = {
            "collapse": FanOutCollapse(),
            "advantage": GroupRelativeAdvantage(scale="none"),
            "once": TrainSharedOnce(),
            "split": ShuffleSplit(minibatches=1, microbatches=2, remainder="uneven"),
            "weight": LossWeight(dtype="float64"),
        }
        batch = batch.exclude("advantage", "loss_weight")
        own = torch.zeros(batch[FULL].shape, dtype=torch.int64)
        for row in range(len(batch)):
            tokens, rollout = batch[FULL][row][batch[ATTENTION][row]].tolist(), int(batch["rollout_id"][row])
            paths = [(rollout, *tokens[: at + 1]) for at in range(len(tokens))]
            own[row, batch[ATTENTION][row]] = torch.tensor([number.get(path, 0) for path in paths])
        batch["path"] = own
        out = Pipeline(stages).run(batch).batch
        theta = torch.zeros(len(every), dtype=torch.float64, requires_grad=True)
        losses = torch.where(out[LOSS], -out["advantage"][..., 0].double() * theta[out["path"]], 0.0)
        weighted_loss(TensorDict({"loss_objective": losses}), out).backward()
        reward = {10 * each: 10 * each / 8 for each in range(3)}
        mean = {0: (reward[0] + reward[10]) / 2, 1: reward[20]}
        expected = [-(reward[path[0]] - mean[path[0] // 20]) / len(every) for path in every]
        assert torch.allclose(theta.grad, torch.tensor(expected, dtype=torch.float64), atol=1e-12), seed


@pytest.mark.slow
@pytest.mark.torchrl
def test_packed_rows_and_trees_have_the_same_gradient():
    """A tree computes a shared token once, but without the stage the loss counts it in each row."""
    from tree_models import gradient_of, make_actor, make_batch

    actor = make_actor("tiny")
    rows = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8], [1, 2, 3, 4, 7, 9, 9], [2, 3, 4, 4], [2, 3, 4, 4]]
    batch = make_batch(actor, rows)
    there = batch[ATTENTION]
    batch[LOSS] = there & (there.long().cumsum(1) > 1)
    with torch.no_grad():
        batch[LOG_PROBS] = actor.get_dist(batch, logits_key="logits").log_prob(batch[FULL]) - 0.05
    batch["next", "ref_log_probs", "full"] = batch[LOG_PROBS] - 0.1
    batch["rollout_id"] = torch.tensor([0, 0, 0, 1, 2])
    batch["advantage"] = torch.tensor([1.0, 1.0, 1.0, -1.0, 0.5]).double().view(5, 1, 1)
    once = TrainSharedOnce()(batch)
    assert int(batch[LOSS].sum() - once[LOSS].sum()) == 3 + 3 + 1  # 2, 3, 4 of rows 1 and 2, 7 of row 2
    alone = gradient_of(actor, once, mean="token")
    assert alone.norm() > 1e-3
    for transform in ("pack", "tree"):
        assert distance(gradient_of(actor, once, transform, mean="token", tree="rollout"), alone) <= 1e-12
    again = gradient_of(actor, batch, "tree", mean="token", tree="rollout")
    assert distance(again, gradient_of(actor, batch, mean="token")) <= 1e-12 < 1e-3 < distance(again, alone)


def test_turns_can_be_merged_if_shared_tokens_train_once():
    """Both rows train 2 and 3. Without the stage, the second row does not continue the first."""
    batch = dense([[1, 2, 3], [1, 2, 3, 4, 5]])
    batch[LOSS] = batch[ATTENTION] & (batch[FULL] > 1) & (batch[FULL] != 4)
    batch[LOG_PROBS] = torch.where(batch[LOSS], -0.5, torch.nan).double()
    batch["rollout_id"] = torch.tensor([0, 0])
    batch = batch.exclude("loss_weight")
    assert len(MergeTurns()(batch)) == 2
    merged = Pipeline({"once": TrainSharedOnce(), "merge": MergeTurns()}).run(batch)
    assert merged.batch[LOSS].int().tolist() == [[0, 1, 1, 0, 1]]


def test_rows_of_a_rollout_on_two_ranks_train_a_shared_token_once():
    """The masks are those of one process with the rows of both ranks, even if a rank has no rows."""
    found = results_in_threads(trained_once_of_rank, 2, SEEDS)
    for case, seed in enumerate(SEEDS):
        alone = Pipeline({"once": TrainSharedOnce()}).run(forked(seed))
        for how in range(2):
            masks, counts = zip(*(of_rank[case][how] for of_rank in found), strict=True)
            assert torch.equal(torch.cat(masks), alone.ungathered[LOSS]), (seed, how)
            assert set(counts) == {alone.metrics["once/shared_tokens"]} != {0.0}


@pytest.mark.parametrize(("rollouts", "sent"), [([0, 0, 1, 1], 0), ([0, 1, 0, 1], 1)])
def test_ranks_exchange_tokens_only_if_a_rollout_has_rows_on_both(rollouts, sent):
    batch = dense([[*range(1, 41)]] * 4)  # more numbers than the table has for a row
    batch["rollout_id"] = torch.tensor(rollouts)

    def run(group):
        exchanged, exchange = [], group.exchange
        group.exchange = lambda value: exchanged.append(value) or exchange(value)
        stages = {"once": TrainSharedOnce()}
        run = Pipeline(stages, process_group=group, shared_ids="same").run(batch[2 * group.rank :][:2])
        wide = [each for each in exchanged if isinstance(each, torch.Tensor) and each.shape[-1] >= 40]
        return run.metrics["once/shared_tokens"], len(wide)

    shared = float(2 * int(batch[LOSS][0].sum()))
    assert on_ranks(run, 2) == [(shared, sent)] * 2


def test_padding_in_the_loss_mask_is_refused():
    batch = dense([[1, 2, 3], [1, 2]])
    batch["rollout_id"] = torch.tensor([7, 7])
    batch[LOSS][1, 2] = True
    with pytest.raises(BatchError, match=r"real tokens.*in row 1 \(rollout 7\)"):
        TrainSharedOnce()(batch)


def test_a_filter_after_the_stage_is_refused():
    """The filter could remove the row in which a shared token trains."""
    for late in (
        SampleFilter(criterion=LengthWithin(low=1)),
        SampleFilter(criterion=RewardWithin(high=1.0), action="mask"),
    ):
        with pytest.raises(ValueError, match=r"'filter' may take out this row.*Put 'filter' before 'once'"):
            Pipeline({"once": TrainSharedOnce(), "filter": late})
    with pytest.raises(ValueError, match=r"must not drop or mask"):
        Pipeline({"split": ShuffleSplit(minibatches=1), "once": TrainSharedOnce()})


def test_a_report_counts_tokens_that_train_again_and_names_the_stage():
    rows = [[3, 4, 5, 6], [3, 4, 7, 8], [3, 4, 9, 9], [2, 2]]
    batch = dense(rows).exclude("advantage", "loss_weight")
    batch[LOSS] = batch[ATTENTION].clone()
    batch["rollout_id"], batch["group_id"] = torch.tensor([0, 0, 0, 1]), torch.zeros(4, dtype=torch.int64)
    batch["next", "reward"] = torch.tensor([1.0, 1.0, 1.0, 0.0])
    words = ("pipeline.stages.split.minibatches=1", "pipeline.stages.gate.group_size=2")
    words += ("pipeline.stages.split.remainder=uneven",)
    report = make_report(composed("pipeline=grpo", *words).run(batch))
    assert report.numbers["tokens/trained_again"] == 4
    (found,) = [each for each in report.advisories if each.name == "tokens-trained-again"]
    assert found.text == "4 tokens per step train again in another row of their rollout."
    remedy = ("pipeline.stages.once=once", "pipeline.after.once=advantage")
    report = make_report(load_pipeline("pipeline=grpo", *words, *remedy).run(batch))
    assert report.numbers["tokens/trained_again"] == 0
    assert not [each for each in report.advisories if each.name == "tokens-trained-again"]
    assert report.numbers["once/shared_tokens"] == 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_number_of_tokens_that_train_again_is_that_of_a_loop(layout):
    for seed in range(6):
        batch = forked(seed, layout, odd=False)
        before, after = trained_by_loop(batch, once=False), trained_by_loop(batch, once=True)
        counted = count_trained_again(batch, batch["rollout_id"].numpy(), LOSS, LOG_PROBS)
        assert counted == sum(map(len, before)) - sum(map(len, after))
    assert count_trained_again(batch.exclude(FULL), batch["rollout_id"].numpy(), LOSS) is None
