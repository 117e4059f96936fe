"""Guarantees for authors of stages: masking, renamed columns and carried rows."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from itertools import permutations, product

import pytest
import torch
from batches import batch_of
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from headrace.pipeline import Pipeline, StageError, load_pipeline
from headrace.transforms import (
    BatchError,
    BatchTransform,
    BestOf,
    ByColumn,
    Criterion,
    Diverged,
    FanOutCollapse,
    GroupRelativeAdvantage,
    LogRatio,
    RewardShaping,
    RewardsToGo,
    SampleFilter,
    ShuffleSplit,
    TokenAdvantage,
    TokenFilter,
    group_relative_advantage,
)
from headrace.transforms.table import COLUMNS
from headrace.transforms.table.schema import COUNTED, MINIBATCH, REWARD

MASK, LOG_PROBS = ("masks", "all_assistant_mask"), ("log_probs", "full")


class Low(BatchTransform):
    """A user's own stage, written with the methods of the table."""

    reasons: Mapping[str, str] = {"low": "masked"}
    more: tuple[str, ...] = ()  # further columns

    def __init__(self, *, low: float = 2.0, effect: str = "masked"):
        super().__init__([("next", "reward"), *self.more])
        self.low, self.effect = low, effect

    def decide(self, rows):
        rows.leave(rows["reward"] < self.low, "low", self.effect)


def test_a_row_that_leaves_the_loss_is_masked_by_any_stage():
    batch = batch_of([1.0, 2, 3], [0, 0, 0])
    for out in (Low()(batch), Pipeline({"low": Low()}).run(batch).batch):
        assert out[MASK].any(1).tolist() == [False, True, True]
        assert out[LOG_PROBS][0].isnan().all()
    with pytest.raises(BatchError, match="so they would still train"):
        Low()(batch.exclude("masks", "log_probs"))


@pytest.mark.parametrize("names", [{"loss_mask_key": "mask"}, {"columns": {"loss_mask": "mask"}}])
def test_a_stage_without_a_mask_key_masks_the_mask_of_the_pipeline(names):
    batch = batch_of([1.0, 2, 3], [0, 0, 0])
    batch["mask"] = batch[MASK].clone()
    assert Pipeline({"low": Low()}, **names).run(batch).batch["mask"].any(1).tolist() == [False, True, True]


def test_a_reason_has_one_effect():
    class Twice(Low):
        def decide(self, rows):
            super().decide(rows)
            rows.leave(rows["reward"] > 2, "low", "dropped")

    with pytest.raises(ValueError, match=r"rows that leave for 'low' are masked; .* dropped another reason"):
        Twice()(batch_of([1.0, 2, 3], [0, 0, 0]))


def test_excluded_rows_are_out_of_the_statistics_at_once():
    class Sum(Low):
        more = ("group_id", "rollout_id")

        def decide(self, rows):
            rows.leave(rows["reward"] < 2, "low", "excluded")
            rows.metric("sum", rows.groups.sum(rows["reward"])[0])
            rows.metric("voters", len(rows.voters))

    run = Pipeline({"sum": Sum()}).run(batch_of([1.0, 2, 3], [0, 0, 0]))
    assert (run.metrics["sum/sum"], run.metrics["sum/voters"]) == (5, 2)


@pytest.mark.parametrize("values", [torch.zeros(1), torch.zeros(1, dtype=torch.int64)], ids=["float", "int"])
def test_writing_to_some_rows_leaves_the_others_unchanged(values):
    class Some(BatchTransform):
        def __init__(self):
            super().__init__([("next", "reward")], [("next", "reward")])

        def decide(self, rows):
            rows.where(rows["reward"] > 2)["reward"] = values

    assert Some()(batch_of([1.5, 2, 3], [0, 0, 0]))["next", "reward"].flatten().tolist() == [1.5, 2, 0]


def test_a_stage_that_returns_what_it_should_write_is_refused():
    class Doubles(BatchTransform):
        def decide(self, rows):
            return torch.ones(len(rows))

    said = r"Doubles.decide returned a Tensor, and must return nothing: write a column with rows\.put"
    for run in (Doubles(), Pipeline({"doubles": Doubles()})):
        with pytest.raises((TypeError, StageError), match=said):
            run(batch_of([1.0, 2.0], [0, 0]))


def reading(base, read, columns=(), **declared):
    """A user's own stage, shaping or criterion that declares columns, and calls `read`."""

    class Mine(base, columns=columns):
        def __init__(self, **names):
            super().__init__(**names) if base is RewardShaping else self.name_columns(names)
            if base is BatchTransform:
                super().__init__(in_keys=declared.get("in_keys", ()))

        def decide(self, rows):
            read(rows)
            return None if base is BatchTransform else torch.ones(len(rows), dtype=torch.bool)

    class Shapes(Mine):
        decide = base.decide

        def shape(self, reward, rollouts):
            read(rollouts)
            return reward

    kind = Shapes if base is RewardShaping else Mine
    for name, value in declared.items() if base is not BatchTransform else ():
        setattr(kind, name, value)
    return SampleFilter(criterion=kind()) if base is Criterion else kind()


ENTROPY = ("entropy", "full")
READS = [
    (Criterion, lambda rows: rows.token_column(ENTROPY), {"token_keys": (ENTROPY,)}, "token_keys = (('entr"),
    (Criterion, lambda rows: rows["tone"], {"in_keys": ("tone",)}, "'tone' must be in its in_keys"),
    (Criterion, lambda rows: rows.lengths, {"columns": ("loss_mask",)}, "columns=('loss_mask',))"),
    (Criterion, lambda rows: rows.voters, {"columns": ("rollout",)}, "columns=('rollout',))"),
    (Criterion, lambda rows: rows.reward, {"in_keys": (REWARD,)}, "'reward') must be in its in_keys"),
    (RewardShaping, lambda rows: rows.lengths, {"columns": ("loss_mask",)}, "columns=('loss_mask',))"),
    (RewardShaping, lambda rows: rows.groups, {"columns": ("group",)}, "columns=('group',))"),
    (RewardShaping, lambda rows: rows["tone"], {"reads": ("tone",)}, "reads = ('tone',) in the class Shapes"),
    (BatchTransform, lambda rows: rows["tone"], {"in_keys": ("tone",)}, "'tone' must be in its in_keys"),
    (BatchTransform, lambda rows: rows.groups, {"columns": ("group",)}, "columns=('group',))"),
]  # fmt: skip


@pytest.mark.parametrize(("base", "read", "declared", "how"), READS)
def test_a_column_can_be_read_if_it_is_declared_as_the_error_says(base, read, declared, how):
    batch = batch_of([1.0, 2, 3], [0, 0, 0])
    batch[ENTROPY], batch["tone"] = torch.zeros(3, 4), torch.ones(3)
    collapse = {"collapse": FanOutCollapse()}
    with pytest.raises(BatchError, match=rf"and does not declare it, so .* Declare it: .*{re.escape(how)}"):
        Pipeline(collapse | {"mine": reading(base, read)}).run(batch)
    assert len(Pipeline(collapse | {"mine": reading(base, read, **declared)}).run(batch).batch) == 3


class Keeps:
    """A criterion without a base class."""

    def decide(self, rows):
        return rows["reward"] > 0

    def __call__(self, batch):
        return batch["next", "reward"] > 0


KINDS = {
    "stage": [Low(), FanOutCollapse(), Pipeline({})],
    "criterion": [BestOf(k=1), Diverged(high=0.1), Keeps()],
    "term": [LogRatio()],
}
TAKERS = {
    "stage": [lambda given: Pipeline({"mine": given}), lambda given: ByColumn(column="x", stages={0: given})],
    "criterion": [lambda given: SampleFilter(criterion=given), lambda given: TokenFilter(criterion=given)],
    "term": [lambda given: TokenAdvantage(term=given)],
}
HOMES = {"stage": "into the pipeline", "criterion": "SampleFilter(criterion=", "term": "TokenAdvantage(term="}


@pytest.mark.parametrize(("kind", "wanted"), [*permutations(KINDS, 2)])
def test_an_object_in_the_place_of_another_kind_is_refused_before_any_batch(kind, wanted):
    for given, take in product(KINDS[kind], TAKERS[wanted]):
        said = f"{given!r:.200} is a {kind}, and a {wanted} is required. Put it "
        with pytest.raises(ValueError, match=rf"{re.escape(said)}.*{re.escape(HOMES[kind])}"):
            take(given)
    with pytest.raises(ValueError, match=f"a {wanted} is an object; got the class Low: give Low"):
        TAKERS[wanted][0](Low)


def test_the_error_for_a_column_as_an_attribute_names_the_column():
    class Attribute(Low):
        def decide(self, rows):
            rows.advantage  # noqa: B018

    with pytest.raises(AttributeError, match=r"there is no rows.advantage; a column is rows\['advantage'\]"):
        Attribute()(batch_of([1.0, 2, 3], [0, 0, 0]))


def writing(write, writes=("tone",)):
    """A user's own stage that writes, and the columns that it declares to write."""

    class Notes(BatchTransform, columns=("reward",)):
        def __init__(self, **names):
            self.name_columns(names)
            super().__init__([self.reward_key], writes)

        def decide(self, rows):
            write(rows, rows["reward"])

    return Notes()


@pytest.mark.parametrize("name", ["reward", "tone"])
def test_an_attribute_that_is_set_on_rows_is_answered_with_the_method_that_writes(name):
    batch, stage = batch_of([1.0, 2, 3], [0, 0, 0]), writing(lambda rows, r: setattr(rows, name, r))
    with pytest.raises(
        AttributeError, match=rf"^rows.{name} = … writes no column: call rows.put\('{name}', "
    ):
        stage(batch)
    assert writing(lambda rows, r: rows.put("tone", 2 * r))(batch)["tone"].tolist() == [2.0, 4.0, 6.0]


def test_a_column_is_written_once_it_is_declared():
    batch, put = batch_of([1.0, 2, 3], [0, 0, 0]), lambda rows, r: rows.put(("next", "reward"), 2 * r)
    said = (
        r"^stage 'mine', Notes\(\) writes \('next', 'reward'\) and does not declare it, .* in its out_keys$"
    )
    for chain in ({"mine": writing(put)}, {"collapse": FanOutCollapse(), "mine": writing(put)}):
        with pytest.raises(BatchError, match=said):
            Pipeline(chain)(batch)
    declared = writing(put, [("next", "reward")])
    assert Pipeline({"mine": declared})(batch)["next", "reward"].flatten().tolist() == [2.0, 4.0, 6.0]
    with pytest.raises(ValueError, match=r"stage 'collapse' reads .* which 'mine' writes later"):
        Pipeline({"collapse": FanOutCollapse(), "mine": declared})


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([1.0, 2, 3], "a list"),
        (1.0, "a float"),
        (torch.ones(2), r"shape \(2,\)"),
        (torch.ones(()), r"shape \(\)"),
    ],
)
def test_a_column_is_written_with_one_entry_for_each_row(values, found):
    stage = writing(lambda rows, r: rows.put("tone", values))
    with pytest.raises(BatchError, match=rf"^Notes must write 'tone' .* each of 3 rows; found {found}$"):
        stage(batch_of([1.0, 2, 3], [0, 0, 0]))
    some = writing(lambda rows, r: rows.where(r > 1).put("tone", torch.ones(2)))
    assert some(batch_of([1.0, 2, 3], [0, 0, 0]))["tone"].tolist()[1:] == [1.0, 1.0]


def test_an_advantage_without_group_ids_checks_rollout_ids():
    batch = batch_of([1.0, 2, 3, 4], [-1, -1, -1, -1], [0, -1, 2, 3])
    with pytest.raises(BatchError, match=r"rollout_id ≥ 0; found -1 at row 1"):
        GroupRelativeAdvantage(without_ids=[2, 2])(batch)


def test_a_column_has_one_name_in_all_stages():
    with pytest.raises(ValueError, match="stage 'low' reads the column 'reward' by its default name"):
        Pipeline({"low": Low()}, columns={"reward": "score"})
    of_others = TensorDictModule(lambda reward: reward, in_keys=[("next", "reward")], out_keys=["copy"])
    with pytest.raises(ValueError, match="stage 'other' reads the column 'reward' by its default name"):
        Pipeline({"other": of_others}, columns={"reward": "score"})
    Pipeline({"other": of_others}, columns={"group": "uid"})
    with pytest.raises(
        ValueError, match=r"'group' has two names: pipeline.columns has 'uid', pipeline.group_key is 'x'"
    ):
        Pipeline({}, columns={"group": "uid"}, group_key="x")
    with pytest.raises(TypeError, match="column 'grp'"):
        type("Odd", (BatchTransform,), {}, columns=("grp",))
    pipeline = load_pipeline("grpo", columns={"group": "uid", "reward": "score"}, group_size=2)
    batch = batch_of([1.0, 3], [0, 0])
    batch["uid"], batch["score"] = batch["group_id"], batch["next", "reward"]
    out = pipeline(batch.exclude("group_id", ("next", "reward")))
    assert sorted(out["advantage"].flatten().sign().tolist()) == [-1, 1]


@pytest.mark.parametrize("role", COLUMNS)
def test_a_key_may_be_none_only_if_none_is_its_default_or_is_documented(role):
    class One(BatchTransform, columns=(role,)):
        def __init__(self, **names):
            self.name_columns(names)
            super().__init__()

    column, option = COLUMNS[role], f"{role}_key"
    if column.default is None or "None: " in column.holds:
        assert getattr(One(**{option: None}), option) is None
    else:
        with pytest.raises((TypeError, ValueError), match=option):
            One(**{option: None})


@pytest.mark.parametrize("stage", [FanOutCollapse, RewardsToGo])
def test_ends_are_checked_for_any_done_key(stage):
    batch = batch_of([1.0, 1], [0, 0], [7, 7])
    batch["fin"] = torch.tensor([True, True])
    with pytest.raises(BatchError, match="a rollout ends once"):
        stage(done_key="fin")(batch)


def test_carried_rows_train_even_if_the_new_split_does_not_carry():
    first = ShuffleSplit(minibatch_size=2, remainder="carry", unit="sample")
    first(batch_of([1.0, 2, 3], [0, 1, 2]))
    other = ShuffleSplit(minibatches=1, remainder="drop", unit="sample")
    other.load_state_dict(first.state_dict())
    run = Pipeline({"split": other}).run(batch_of([1.0, 2], [5, 6], [5, 6]))
    assert len(run.batch) == 3
    assert run.ledger.counts()["trained"] == 3


def test_each_pass_has_the_columns_of_stages_after_the_split():
    class Masks(BatchTransform):
        """Lets the rows of the first minibatch train."""

        def __init__(self):
            super().__init__([MINIBATCH], [MASK])

        def apply(self, batch):
            first = batch[MINIBATCH] == 0
            return batch.set(MASK, batch[MASK] & first[:, None])

    batch = batch_of([1.0] * 6, [0] * 6)
    pipeline = Pipeline({"split": ShuffleSplit(minibatches=2, unit="sample"), "masks": Masks()})
    for number, part in enumerate(pipeline.minibatches(batch, epochs=3)):
        assert part[MASK].any(1).tolist() == [number % 2 == 0] * 3


def test_a_stage_that_moves_rows_is_refused():
    with pytest.raises(BatchError, match=r"stage 'sort', .*must keep the order of the rows.*\[2, 1, 0\]"):
        Pipeline({"sort": lambda batch: batch[[2, 1, 0]]})(batch_of([1.0, 2, 3], [0, 0, 0]))


def test_equal_rewards_of_a_batch_have_an_advantage_of_0():
    for options in ({"baseline": "batch"}, {"baseline": "batch", "scale": "batch"}):
        found = group_relative_advantage([0.7] * 8, [0] * 8, eps=1e-12, **{"scale": "none", **options})
        assert not found.any()


def test_integer_rewards_are_not_rounded():
    rewards = torch.tensor([2**24 + 1, 2**24])
    batch = TensorDict(
        {"group_id": [0, 0], "rollout_id": [0, 1], ("next", "reward"): rewards}, batch_size=[2]
    )
    assert FanOutCollapse()(batch)[REWARD].tolist() == rewards.tolist()


@pytest.mark.parametrize(
    "stage",
    [
        GroupRelativeAdvantage(baseline="best_of_k", k=2, scale="none"),
        SampleFilter(criterion=BestOf(k=1, by="variance")),
        FanOutCollapse(columns=2),
    ],
    ids=repr,
)
def test_a_batch_without_kept_rows_is_accepted(stage):
    nothing = SampleFilter(criterion=lambda batch: batch["rollout_id"] < 0, action="drop", unit="sample")
    run = Pipeline({"nothing": nothing, "stage": stage}).run(batch_of([1.0, 2], [0, 0]))
    assert len(run.batch) == 0
    assert run.ledger.counts()["trained"] == 0


def test_any_stage_may_exclude_rows_from_the_statistics():
    def exclude(batch):
        return batch.set(COUNTED, batch["rollout_id"] > 0)

    run = Pipeline({"exclude": exclude, "collapse": FanOutCollapse()}).run(batch_of([1.0, 2, 3], [0, 0, 0]))
    assert run.batch[COUNTED].tolist() == [False, True, True]


def test_an_unused_reason_is_listed_once_with_its_effect():
    nothing = SampleFilter(criterion=lambda batch: batch["rollout_id"] < 0, action="drop", unit="sample")
    exclude = SampleFilter(criterion=lambda batch: batch["rollout_id"] < 0, action="exclude", unit="sample")
    split = ShuffleSplit(minibatches=1)
    ledger = Pipeline({"nothing": nothing, "out": exclude, "split": split}).run(batch_of([1.0], [0])).ledger
    found = dict(zip(ledger.names, ledger.actions, strict=True))
    assert len(found) == len(ledger.names)
    assert [found[name] for name in found if name.startswith(("out/", "split/"))] == [
        "excluded",
        "dropped",
        "carried",
    ]


# -- the base class ----------------------------------------------------------------------------------------


class Remembers(BatchTransform):
    """A stage without a column, which keeps a state."""

    stateful = True

    def decide(self, rows):
        rows.metric("rows", len(rows))


def test_a_replay_buffer_writes_nothing_for_an_empty_batch():
    batch, stage = batch_of([1.0, 2], [0, 0]), Low()
    assert stage._call(None) is None
    assert len(stage._call(batch)) == 2
    assert Low(low=9, effect="dropped")._call(batch) is None
    assert stage.train() is stage
    assert (stage.training, stage.train(False).training) == (True, False)


def test_a_stage_with_a_state_is_found_inside_of_others_and_is_not_shared():
    for inside in (Remembers(), Pipeline({"low": Low(), "keeps": Remembers()})):
        assert inside.requires_shared_write_state
        said = f"{type(inside).__name__} keeps a state from one batch to the next, and each process that "
        with pytest.raises(
            TypeError, match=f"^{said}writes to this buffer would have its own copy of the state"
        ):
            inside.share_memory_()
    for other in (Low(), Pipeline({"low": Low()})):
        assert not other.requires_shared_write_state
        assert other.share_memory_() is other


@pytest.mark.torchrl
def test_a_stage_is_no_transform_of_an_environment():
    from torchrl.envs import Compose, TransformedEnv
    from torchrl.envs.transforms import StepCounter
    from turns import TurnsEnv

    said = "Low works on whole batches, not on an environment's steps: pass it as Collector(postproc=...), "
    for given in (Low(), Compose(StepCounter(), Low()), Compose(Compose(Low()))):
        with pytest.raises(TypeError, match=f"^{re.escape(said)}"):
            TransformedEnv(TurnsEnv(), given)
    Compose(Low())


class NoInit(BatchTransform):
    """A stage that does not call the method of its base class."""

    def __init__(self, *, low: float = 1.0):
        self.low = low


def test_a_missing_call_of_the_base_class_is_named():
    with pytest.raises(AttributeError, match=r"^NoInit\.__init__ must call super\(\)\.__init__\(\) first$"):
        NoInit()(batch_of([1.0], [0]))
    kind = type("NoNames", (RewardShaping,), {"__init__": lambda self, **names: None})
    with pytest.raises(
        AttributeError, match=r"^NoNames\.__init__ must call super\(\)\.__init__\(\*\*names\) first$"
    ):
        kind()(batch_of([1.0], [0]))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        Low().nothing  # noqa: B018


class Sized(BatchTransform, columns=("group", "rollout", "reward"), unset=("group",), optional=("reward",)):
    """A stage with options of its own and of its columns."""

    _own_of_rank = ("rank",)

    def __init__(self, *, size: int = 2, rank: int = 0, of: object = None, **names):
        self.name_columns(names)
        self.size, self.rank, self.of = size, rank, of
        super().__init__(in_keys=[self.group_key, ["next", "reward"]], out_keys=[["a"], ["b", "c"]])


class Thing:
    """An object whose repr has its address."""


def test_a_stage_is_shown_by_the_options_that_differ_from_their_defaults():
    assert repr(Sized()) == "Sized()"
    assert repr(Sized(size=3, rollout_key="uid")) == "Sized(size=3, rollout_key='uid')"
    assert repr(Sized(rank=1, group_key="g")) == "Sized(rank=1, group_key='g')"
    assert Sized(rank=1, size=3).same_on_all_ranks() == "Sized(size=3)"
    assert "of=<" in Sized(of=Thing()).same_on_all_ranks()
    assert Sized(of=Thing()).same_on_all_ranks() == Sized(of=Thing()).same_on_all_ranks()  # without addresses
    assert "tensor" in repr(Sized(of=torch.ones(2)))  # a value that cannot be compared with the default
    assert Sized().in_keys == [("next", "reward")]
    assert Sized(group_key="g").in_keys == ["g", ("next", "reward")]
    assert Sized().out_keys == ["a", ("b", "c")]
    assert Sized()._id_keys() == ["rollout_id"]
    assert str(inspect.signature(Sized)) == (
        "(*, size: 'int' = 2, rank: 'int' = 0, of: 'object' = None, group_key: 'NestedKey | None' = None, "
        "rollout_key: 'NestedKey | None' = 'rollout_id', reward_key: 'NestedKey | None' = ('next', 'reward'))"
    )


class Twofold(BatchTransform):
    """A stage that changes tokens without the table."""

    def apply(self, batch):
        return batch.set("x", 2 * batch["x"])


def test_a_stage_that_does_not_know_the_table_gets_a_flat_copy():
    batch = TensorDict({"x": torch.arange(6.0).view(2, 3)}, batch_size=[2, 3])
    assert Twofold()(batch)["x"].tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert batch["x"].flatten().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert [Twofold().knows_the_table(), Low().knows_the_table()] == [False, True]
    nothing = batch[:0]
    assert Twofold()(nothing) is nothing
    assert Low()(nothing) is nothing
