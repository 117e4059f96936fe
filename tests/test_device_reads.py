"""What a batch on an accelerator waits for, and that it comes to the same numbers there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from any_rank import RECIPES, collected
from batches import batch_of
from composed import composed
from fake_device import DEVICE, FakeDevice
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch.utils._pytree import tree_map
from torchrl.modules.distributions import LLMMaskedCategorical

from headrace.pipeline import Pipeline
from headrace.pipeline.report import make_report
from headrace.transforms import (
    BatchError,
    BatchWhitening,
    BestOf,
    CombineIds,
    CompletenessGate,
    DenseRows,
    DifficultyWeight,
    DirectedWeight,
    Diverged,
    EntropyShare,
    FanOutCollapse,
    Finite,
    GroupMeanWithin,
    GroupRelativeAdvantage,
    LengthPenalty,
    LengthWithin,
    LogRatio,
    LossWeight,
    MergeTurns,
    NotTruncated,
    OverlongPunishment,
    RelativeLength,
    RewardScale,
    RewardsToGo,
    RewardsVary,
    RewardWithin,
    RolloutCorrection,
    RunningBaseline,
    SampleFilter,
    ScoreRows,
    ShuffleSplit,
    SignFactors,
    StalenessWeight,
    StateAdvantage,
    TokenAdvantage,
    TokenFilter,
    TopShare,
    TreeAdvantage,
    TurnAdvantage,
    TurnDiscount,
    pack,
    split_microbatches,
    unpack,
)
from headrace.transforms.schema import RETURN, REWARD

# -- the tables: by what runs, reads and copies a batch -----------------------------------------------------

K = 8
GRPO = {  # K minibatches, taken one by one where nothing else is said
    "rewards vary": (1, 1),
    "rewards vary, at once": (1, 1),
    "silenced groups": (1, 1),
    "silenced groups, at once": (1, 1),
    "silenced groups, in order": (1, 1),
    "status": (2, 1),
    "status, one failed": (2, 1),
    "ends": (2, 1),
    "fan-out": (1, 1),
    "dropped": (2, 1),
    "excluded": (2, 1),
    "no gate": (1, 1),
    "token budget": (1, 1),
    "padded": (1, 1),
    "carried": (1, 2),
    "two epochs": (1, 1),
    "micro-batches of each": (1, 1),
    "two texts": (1, 1),
    "ids that are text": (1, 3),
    "collector's padding": (2, 1),
    "ragged rows": (9, 1),
}
RECIPE = (1, 1)  # each recipe, 3 minibatches, but for
RECIPE_BY_NAME = {
    "as/miles": (2, 1),
    "as/slime": (2, 1),
    "as/trl": (2, 1),
    "dapo": (2, 1),
    "gigpo": (2, 1),
    "tree_grpo": (2, 1),
}
RECIPE_BY_NAME |= {"gfpo": (2, 1), "pods": (2, 1), "mis": (3, 1), "rae": (3, 2), "spo": (3, 2)}
STAGE = {  # alone
    "dense": (1, 0),
    "score": (2, 1),
    "gate": (1, 0),
    "gate, drop": (2, 0),
    "gate, expected groups": (4, 0),
    "collapse": (1, 0),
    "collapse, sum": (1, 0),
    "filter, sample": (0, 0),
    "filter, group": (1, 0),
    "filter, finite": (1, 0),
    "filter, length": (0, 0),
    "filter, truncated": (0, 0),
    "filter, exclude": (1, 0),
    "filter, drop": (2, 0),
    "advantage": (1, 0),
    "advantage, rows": (1, 0),
    "advantage, batch": (1, 0),
    "advantage, best of others": (1, 0),
    "advantage, reshape formula": (2, 0),
    "advantage, best of k": (1, 0),
    "advantage, medians": (1, 0),
    "advantage, log mean exp": (1, 0),
    "filter, best": (1, 0),
    "filter, most apart": (1, 0),
    "filter, group mean": (1, 0),
    "relative length": (1, 0),
    "peers": (1, 0),
    "running": (2, 1),
    "signs": (0, 0),
    "difficulty": (1, 0),
    "weight, turn": (1, 0),
    "split": (1, 1),
    "split, samples": (0, 1),
    "split, trees": (1, 1),
    "merge": (2, 0),
    "weight": (1, 0),
    "weight, rollout": (1, 0),
    "weight, fold": (1, 0),
    "overlong": (1, 0),
    "length": (1, 0),
    "reward scale": (0, 0),
    "whitening": (1, 0),
    "turn discount": (1, 0),
    "returns": (2, 0),
    "states": (1, 0),
    "states, others": (1, 0),
    "turns": (2, 0),
    "turns, rewards of turns": (1, 0),
    "turns, rows": (2, 0),
    "tree": (2, 0),
    "tree, parents": (2, 0),
    "filter, diverged": (1, 0),
    "filter, diverged rollouts": (1, 0),
    "correction": (1, 0),
    "correction, normalised rollouts": (1, 0),
    "token filter": (1, 0),
    "token filter, all": (1, 0),
    "token term": (1, 0),
    "token term, centred": (1, 0),
    "token term, largest": (1, 0),
    "token term, directed": (1, 0),
    "token term, share": (1, 0),
    "token term, stale": (1, 0),
}
PACK = {  # a micro-batch of 8 rows
    "pack": (2, 0),
    "pack, ragged": (2, 0),
    "unpack": (0, 0),
    "unpack, ragged": (0, 0),
    "pack as a tree": (3, 0),
    "pack as a tree, ragged": (3, 0),
    "unpack a tree": (0, 0),
}
ASKED = {  # of a run of grpo
    "metrics": (4, 0),
    "counts of the ledger": (2, 0),
    "rows of the ledger": (4, 0),
    "report": (1, 0),
}

# -- batches on it ----------------------------------------------------------------------------------------


def check(name: str, fake: FakeDevice, expected: tuple[int, int]) -> None:
    """The counts of the table; what there was instead is listed with its places."""
    found = (len(fake.reads), len(fake.copies) + len(fake.asynchronous))
    listed = [
        f"{count:4} {kind} {event!r}"
        for kind, events in (("read", fake.reads), ("copy", fake.copies), ("asynchronous", fake.asynchronous))
        for event, count in Counter(events).items()
    ]
    words = f"{name}: {found[0]} reads and {found[1]} copies; the table says {expected[0]} and {expected[1]}"
    assert found == expected, "\n".join([words, *listed])


def agree(fake: FakeDevice, found: TensorDictBase, expected: TensorDictBase) -> None:
    """The same columns of the same bits, and all of them on the device."""
    every = {"include_nested": True, "leaves_only": True}
    assert set(map(str, found.keys(**every))) == set(map(str, expected.keys(**every)))
    for key in expected.keys(**every):
        column, here = found.get(key), expected.get(key)
        if isinstance(here, torch.Tensor):
            assert column.device == DEVICE, key
            assert column.dtype == here.dtype, key
            torch.testing.assert_close(fake.get(column), here, rtol=0, atol=0, equal_nan=True)
        else:
            assert list(column) == list(here), key


def run_on_both(make: Callable[[], Pipeline], run: Callable, batch: TensorDictBase) -> FakeDevice:
    """What `run` makes of a pipeline and a batch, on the CPU and on the device, which has counted."""
    pipeline = make()
    expected, numbers = run(pipeline, batch), pipeline.metrics
    with FakeDevice() as fake:
        there = fake.put(batch)
        pipeline = make()
        fake.forget()
        found = run(pipeline, there)
        with fake.unseen():
            assert len(found) == len(expected)
            for pair in zip(found, expected, strict=True):
                agree(fake, *pair)
            assert pipeline.metrics == pytest.approx(numbers, nan_ok=True, rel=0)
    return fake


def one_by_one(pipeline: Pipeline, batch: TensorDictBase) -> list[TensorDictBase]:
    return list(pipeline.minibatches(batch))


def at_once(pipeline: Pipeline, batch: TensorDictBase) -> list[TensorDictBase]:
    return [pipeline(batch)]


def groups_of_eight(*, vary: bool, segments: int = 1) -> TensorDict:
    """16 groups of 8 rollouts; two of the groups have equal rewards, unless all `vary`."""
    rewards = [float(r % 3 == g % 3 and (vary or g % 8 > 0)) for g in range(16) for r in range(8)]
    rows = [(rewards[r], r // 8, r) for r in range(128) for _ in range(1 + r % segments)]
    batch = batch_of(*map(list, zip(*rows, strict=True)), tokens=6)
    return batch.exclude("prompt_text")


def batch_for(name: str) -> TensorDictBase:
    batch = groups_of_eight(vary="vary" in name, segments=3 if name == "fan-out" else 1)
    rows = torch.arange(len(batch))
    if "status" in name:
        batch["next", "status"] = torch.where(rows == 9, 3 if "failed" in name else 0, 0)
    if name == "ends":
        batch["next", "done"] = torch.ones(len(batch), 1, dtype=torch.bool)
    if "padding" in name:
        batch["collector", "mask"] = rows < 120
    if "ids" in name:
        for key in ("group_id", "rollout_id"):
            batch[key] = [f"{key} {number}" for number in batch[key].tolist()]
    if "texts" in name:
        batch["prompt_text"] = [f"prompt {g}" for g in batch["group_id"].tolist()]
        batch["answer"] = [f"answer {row}" for row in rows.tolist()]
    return lazy_stack(list(batch.unbind(0))) if "ragged" in name else batch


SPLIT, FILTER = "pipeline.stages.split", "pipeline.stages.filter"
WORDS = {
    "silenced groups, in order": [f"{SPLIT}.shuffle=false"],
    "status, one failed": ["pipeline.stages.gate.on_incomplete=drop"],
    "dropped": [f"{FILTER}.action=drop"],
    "excluded": [f"{FILTER}.action=exclude"],
    "no gate": ["~pipeline.stages.gate"],
    "token budget": [f"{SPLIT}.max_tokens=30", f"{SPLIT}.balance=attention"],
    "micro-batches of each": [f"{SPLIT}.microbatches=3", f"{SPLIT}.remainder=pad"],
    "padded": [f"{SPLIT}.microbatches=3", f"{SPLIT}.remainder=pad"],
    "carried": [f"{SPLIT}.minibatches=null", f"{SPLIT}.minibatch_size=15", f"{SPLIT}.remainder=carry"],
}
RUNS = {
    "micro-batches of each": lambda pipeline, batch: [
        part for minibatch in pipeline.minibatches(batch) for part in split_microbatches(minibatch)
    ],
    "two epochs": lambda pipeline, batch: list(pipeline.minibatches(batch, epochs=2)),
    "rewards vary, at once": at_once,
    "silenced groups, at once": at_once,
}


@pytest.mark.parametrize("name", GRPO)
def test_reads_and_copies_of_grpo(name):
    size = [] if name == "no gate" else ["pipeline.stages.gate.group_size=8"]
    cut = [f"{SPLIT}.minibatches={K}", f"{SPLIT}.remainder=uneven"]
    words = [*size, *cut, *WORDS.get(name, [])]
    fake = run_on_both(lambda: composed(*words), RUNS.get(name, one_by_one), batch_for(name))
    check(name, fake, GRPO[name])


@pytest.mark.parametrize("kind", ["uniform", "ragged"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_reads_and_copies_of_recipes(recipe, kind):
    words = (f"pipeline={recipe}", f"{SPLIT}.minibatches=3", f"{SPLIT}.remainder=uneven")
    batch = collected(kind, recipe).exclude("prompt_text")
    fake = run_on_both(lambda: composed(*words), one_by_one, batch)
    check(recipe, fake, RECIPE_BY_NAME.get(recipe, RECIPE))


class Uniform:
    """An actor to which all ten tokens are alike."""

    def get_dist(self, batch: TensorDict, logits_key: str) -> LLMMaskedCategorical:
        mask = batch["masks", "all_assistant_mask"]
        return LLMMaskedCategorical(logits=mask.new_zeros(*mask.shape, 10, dtype=torch.float32), mask=mask)


OPTIONS = {
    "dense": lambda: DenseRows(pad_id=9),
    "score": lambda: ScoreRows(actor=Uniform(), max_rows=9),
    "gate": lambda: CompletenessGate(),
    "gate, drop": lambda: CompletenessGate(group_size=5, on_incomplete="drop"),
    "gate, expected groups": lambda: CompletenessGate(expected_groups=[0, 7, 14, 21, 28]),
    "collapse": lambda: FanOutCollapse(),
    "collapse, sum": lambda: FanOutCollapse(reward="sum"),
    "filter, sample": lambda: SampleFilter(criterion=RewardWithin(high=0.6), unit="sample"),
    "filter, group": lambda: SampleFilter(criterion=RewardsVary()),
    "filter, finite": lambda: SampleFilter(criterion=Finite(), unit="rollout"),
    "filter, length": lambda: SampleFilter(criterion=LengthWithin(high=4)),
    "filter, truncated": lambda: SampleFilter(criterion=NotTruncated(truncated_key=("next", "truncated"))),
    "filter, exclude": lambda: SampleFilter(
        criterion=RewardWithin(high=0.6), action="exclude", unit="rollout"
    ),
    "filter, drop": lambda: SampleFilter(criterion=RewardsVary(), action="drop"),
    "advantage": lambda: GroupRelativeAdvantage(),
    "advantage, rows": lambda: GroupRelativeAdvantage(rollout_key=None),
    "advantage, batch": lambda: GroupRelativeAdvantage(scale="batch"),
    "advantage, best of others": lambda: GroupRelativeAdvantage(baseline="best_other", clip=[0.0, None]),
    "advantage, reshape formula": lambda: GroupRelativeAdvantage(dtype="float32"),
    "advantage, best of k": lambda: GroupRelativeAdvantage(baseline="best_of_k", k=2),
    "advantage, medians": lambda: GroupRelativeAdvantage(baseline="median", scale="mad", eps_mode="skip"),
    "advantage, log mean exp": lambda: GroupRelativeAdvantage(baseline="log_mean_exp", scale="none"),
    "filter, best": lambda: SampleFilter(criterion=BestOf(k=2, by="efficiency")),
    "filter, most apart": lambda: SampleFilter(criterion=BestOf(k=2, by="variance")),
    "filter, group mean": lambda: SampleFilter(criterion=GroupMeanWithin(low=0.4)),
    "relative length": lambda: RelativeLength(form="rescale"),
    "peers": lambda: CombineIds(keys=["group_id", "state_id"]),
    "running": lambda: RunningBaseline(baseline_key="group_id"),
    "signs": lambda: SignFactors(positive=0.5),
    "difficulty": lambda: DifficultyWeight(strength=2.0),
    "weight, turn": lambda: LossWeight(unit="turn", turn_key="state_id"),
    "split": lambda: ShuffleSplit(minibatches=2, remainder="uneven"),
    "split, samples": lambda: ShuffleSplit(minibatches=2, remainder="uneven", unit="sample"),
    "split, trees": lambda: ShuffleSplit(minibatches=2, remainder="uneven", max_tokens=9, tree="group"),
    "merge": lambda: MergeTurns(last_keys=[("next", "truncated"), "state_id", "parent_id"]),
    "weight": lambda: LossWeight(),
    "weight, rollout": lambda: LossWeight(unit="rollout"),
    "weight, fold": lambda: LossWeight(unit="constant", length=9, fold="token_mean"),
    "overlong": lambda: OverlongPunishment(max_length=4, cache=2),
    "length": lambda: LengthPenalty(coefficient=0.1),
    "reward scale": lambda: RewardScale(scale=2.0, high=9.0),
    "whitening": lambda: BatchWhitening(),
    "turn discount": lambda: TurnDiscount(discount=0.5),
    "returns": lambda: RewardsToGo(discount=0.5),
    "states": lambda: StateAdvantage(),
    "states, others": lambda: StateAdvantage(baseline="leave_one_out", alone="return"),
    "turns": lambda: TurnAdvantage(turn_rewards="token"),
    "turns, rewards of turns": lambda: TurnAdvantage(turn_rewards="turn", discount=0.5),
    "turns, rows": lambda: TurnAdvantage(turn_index_key=None),
    "tree": lambda: TreeAdvantage(),
    "tree, parents": lambda: TreeAdvantage(forks="parent", baseline="leave_one_out", alone="return"),
    "filter, diverged": lambda: SampleFilter(criterion=Diverged(high=1e-7)),
    "filter, diverged rollouts": lambda: SampleFilter(
        criterion=Diverged(estimator="k1", level="max", high=1.0005, unit="rollout")
    ),
    "correction": lambda: RolloutCorrection(bound="zero", low=0.9995),
    "correction, normalised rollouts": lambda: RolloutCorrection(
        level="mean", unit="rollout", normalise="batch"
    ),
    "token filter": lambda: TokenFilter(criterion=Diverged(estimator="k1", level="token", high=1.0005)),
    "token filter, all": lambda: TokenFilter(
        criterion=Diverged(estimator="k1", high=1.0005, judges="negative"), denominator="all"
    ),
    "token term": lambda: TokenAdvantage(term=LogRatio()),
    "token term, centred": lambda: TokenAdvantage(term=LogRatio(centre="batch"), factor=-0.1),
    "token term, largest": lambda: TokenAdvantage(term=TopShare(), how="multiply"),
    "token term, directed": lambda: TokenAdvantage(term=DirectedWeight(), how="multiply"),
    "token term, share": lambda: TokenAdvantage(term=EntropyShare(), factor=0.1, how="multiply"),
    "token term, stale": lambda: TokenAdvantage(
        term=StalenessWeight(current=9, decay=0.5, version_key="state_id"), how="multiply"
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_reads_and_copies_of_stages(name):
    """On rows with what earlier stages would have written."""
    batch = collected("ragged", "grpo").exclude("prompt_text")
    rewards = batch["next", "reward"].flatten()
    batch[RETURN], batch[REWARD] = rewards.clone(), rewards.clone()
    batch["advantage"] = torch.linspace(-1, 1, len(batch)).view(-1, 1, 1)
    batch["next", "truncated"] = rewards > 0.7
    batch["tokens", "full"] %= 2  # so that rollouts share some
    batch["parent_id"] = torch.where(torch.arange(len(batch)) % 3 == 1, batch["rollout_id"].roll(1), -1)
    batch["parent_id"] = torch.where(batch["group_id"] == batch["group_id"].roll(1), batch["parent_id"], -1)
    same = batch["rollout_id"] == batch["rollout_id"].roll(1)
    batch["parent_id"] = batch["parent_id"].masked_fill(same, -1)
    batch["masks", "all_assistant_mask"][:, 0] = name != "score"  # nothing predicts a first token
    expected = OPTIONS[name]()(batch)
    with FakeDevice() as fake:
        there, stage = fake.put(batch), OPTIONS[name]()
        fake.forget()
        found = stage(there)
        with fake.unseen():
            agree(fake, found, expected)
    check(name, fake, STAGE[name])


def to_pack(*, ragged: bool) -> TensorDictBase:
    """A micro-batch of 8 rows of 4 to 6 tokens; dense ones are padded on the left."""
    batch = groups_of_eight(vary=True)[:8].clone()
    batch["advantage"], batch["loss_weight"] = torch.rand(8, 1, 1), torch.rand(8)
    real = torch.arange(6) >= (torch.arange(8) % 3)[:, None]
    batch["masks", "all_attention_mask"] = real
    batch["masks", "all_assistant_mask"] &= real & (real.cumsum(1) > 1)
    if not ragged:
        return batch
    rows = batch.select("tokens", "masks", "log_probs")
    cut = [row.apply(lambda column, first=i % 3: column[first:]) for i, row in enumerate(rows.unbind(0))]
    return lazy_stack(cut)


@pytest.mark.parametrize("name", PACK)
def test_reads_and_copies_of_a_packed_microbatch(name):
    batch, tree = to_pack(ragged="ragged" in name), "tree" in name
    batch = (
        batch.apply(lambda column: column % 3 if column.dtype is torch.int64 else column) if tree else batch
    )
    expected = pack(batch, tree=tree)
    with FakeDevice() as fake:
        there = fake.put(batch)
        with fake.unseen():
            packed = pack(there, tree=tree)
            agree(fake, packed, expected)
        fake.forget()
        if "unpack" in name:
            expected, found = unpack(expected), unpack(packed)
        else:
            found = pack(there, tree=tree)
        with fake.unseen():
            agree(fake, found, expected)
    check(name, fake, PACK[name])


@pytest.mark.parametrize("late", ["the next batch", "check()"])
def test_rules_that_are_deferred_are_read_with_the_next_batch_or_when_asked(late):
    """Where nothing else is read, a batch costs no read at all."""
    stages = {"collapse": FanOutCollapse(), "advantage": GroupRelativeAdvantage()}
    wrong = groups_of_eight(vary=True)
    wrong["next", "reward"][3] = torch.nan
    with FakeDevice() as fake:
        pipeline = Pipeline(stages, validate="deferred")
        for batch in (groups_of_eight(vary=True), wrong):
            there = fake.put(batch)
            fake.forget()
            pipeline(there)
            assert len(fake.reads) == (1 if batch is wrong else 0)  # of the batch before
        fake.forget()
        with pytest.raises(BatchError, match=r"found late.*stage 'collapse'.*finite; found nan at row 3"):
            pipeline(there) if late == "the next batch" else pipeline.check()
        pipeline.check()  # said once
    with pytest.raises(BatchError, match="finite"):
        Pipeline(stages)(wrong)


@pytest.mark.parametrize("name", ASKED)
def test_reads_and_copies_of_what_is_asked_of_a_run(name):
    ask = {
        "metrics": lambda run: run.metrics,
        "counts of the ledger": lambda run: run.ledger.counts(),
        "rows of the ledger": lambda run: run.ledger.rows("trained"),
        "report": lambda run: repr(make_report(run).numbers),
    }[name]
    words = ["pipeline.stages.gate.group_size=8", f"{SPLIT}.minibatches={K}"]
    batch = groups_of_eight(vary=False)
    expected = ask(composed(*words).run(batch))
    with FakeDevice() as fake:
        run = composed(*words).run(fake.put(batch))
        fake.forget()
        assert ask(run) == expected
    check(name, fake, ASKED[name])


def refused(name: str) -> TensorDict:
    """A batch with one fault."""
    batch = collected("ragged", "grpo").exclude("prompt_text")
    mask = ("masks", "all_assistant_mask")
    if name == "reward":
        batch["next", "reward"][2] = torch.nan
    elif name == "unset id":
        batch["rollout_id"][2] = -1
    elif name == "two groups":
        batch["group_id"][0] = 28
    elif name == "two rewards":
        batch["rollout_id"][1] = batch["rollout_id"][0]
        batch["next", "reward"][:2] = torch.tensor([[0.25], [0.5]])
    elif name == "incomplete":
        batch["expected_rollouts"] += 1
    elif name == "two ends":
        batch["next", "done"] = torch.ones(len(batch), 1, dtype=torch.bool)
    elif name == "no mask":
        del batch["masks"][mask[1]]
    elif name == "float mask":
        batch[mask] = batch[mask].float()
    elif name == "no ids":
        del batch["group_id"]
    return batch


FAULTS = ["reward", "unset id", "two groups", "two rewards", "incomplete", "two ends"]
FAULTS += ["no mask", "float mask", "no ids"]


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_refused_is_refused_in_the_same_words(name):
    words = [f"{SPLIT}.minibatches=3", f"{SPLIT}.remainder=uneven"]
    with pytest.raises(BatchError) as here:
        composed(*words)(refused(name))
    with FakeDevice() as fake, pytest.raises(BatchError) as there:
        composed(*words)(fake.put(refused(name)))
    assert (type(there.value), str(there.value)) == (type(here.value), str(here.value))


@pytest.mark.parametrize("says", [True, False], ids=["a batch that says its device", "one that does not"])
def test_carried_rows_go_where_the_batch_is(says):
    """A checkpoint from a GPU is read on a machine without one, ``map_location="cpu"``, and back."""
    words = [f"{SPLIT}.minibatches=null", f"{SPLIT}.minibatch_size=15", f"{SPLIT}.remainder=carry"]
    words.append("pipeline.stages.gate.group_size=8")
    first, second = groups_of_eight(vary=True), groups_of_eight(vary=True)
    second["group_id"] += 100
    second["rollout_id"] += 1000
    alone = composed(*words)
    expected = [list(alone.minibatches(batch)) for batch in (first, second)][1]
    with FakeDevice() as fake:
        pipeline, there = composed(*words), fake.put(first)
        list(pipeline.minibatches(there if says else there.clear_device_()))
        saved = tree_map(lambda x: fake.get(x) if isinstance(x, torch.Tensor) else x, pipeline.state_dict())
    pipeline = composed(*words)
    pipeline.load_state_dict(saved)
    for found, row in zip(pipeline.minibatches(second), expected, strict=True):
        torch.testing.assert_close(found["advantage"], row["advantage"], rtol=0, atol=0)
    pipeline.load_state_dict(saved)
    with FakeDevice() as fake:
        for found, row in zip(pipeline.minibatches(fake.put(second)), expected, strict=True):
            agree(fake, found, row)
