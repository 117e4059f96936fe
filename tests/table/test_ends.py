"""An unfinished rollout makes its group incomplete. A rollout that ends twice is refused."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from alone import said_by
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from headrace.pipeline import Pipeline, make_report, write_dump
from headrace.pipeline.tools.dumps.readers import open_dump
from headrace.transforms import (
    BatchError,
    CompletenessGate,
    FanOutCollapse,
    GroupRelativeAdvantage,
    IncompleteGroupsError,
    RewardsToGo,
    Status,
    incomplete_groups,
)
from headrace.transforms.table.schema import REWARD

DONE = ("next", "done")


def ended(make_batch, rollouts, done, groups=None, **columns):
    batch = make_batch([1.0] * len(rollouts), groups or [0] * len(rollouts), rollouts, **columns)
    batch[DONE] = torch.tensor(done)[:, None]
    return batch


def verdicts(batch, **options):
    """The reason of each row: 0 is trained, 1 incomplete, 2 failed, 3 unfinished."""
    sizes = {"group_size": 2, "on_incomplete": "drop"}
    reasons = ["trained", *CompletenessGate.reasons]
    return [reasons.index(reason) for reason in said_by(CompletenessGate(**sizes | options), batch).reasons]


# -- one end ---------------------------------------------------------------------------------------------


def test_a_rollout_without_an_end_makes_its_group_incomplete(make_batch):
    batch = ended(make_batch, [0, 0, 1, 1], [False, True, False, False])
    assert verdicts(batch) == [1, 1, 3, 3]
    with pytest.raises(
        IncompleteGroupsError, match=r"group 0 has 1 of 2 \(1 completed, 1 unfinished: \[1\]\)"
    ):
        CompletenessGate(group_size=2)(batch)


def test_ends_are_checked_only_with_a_done_column_and_rollout_ids(make_batch):
    batch = ended(make_batch, [0, 1], [False, False])
    assert verdicts(batch) == [3, 3]
    assert verdicts(batch, done_key=None) == verdicts(batch.exclude(DONE)) == [0, 0]
    assert verdicts(batch, rollout_key=None) == [0, 0]


@pytest.mark.parametrize("state", [Status.FAILED, Status.ABORTED])
def test_a_failed_or_aborted_rollout_needs_no_end(make_batch, state):
    batch = ended(make_batch, [0, 1], [True, False], status=[Status.COMPLETED, state])
    assert verdicts(batch) == [1, 2]


@pytest.mark.parametrize("mode", ["raise", "drop"])
@pytest.mark.parametrize("done", [[True, True, True], [True, True, False]])
def test_a_rollout_with_two_ends_is_refused_in_every_mode(make_batch, mode, done):
    batch = ended(make_batch, [7, 7, 8], done)
    words = r"a rollout ends once; found more ends \(True\) in rollout 7 \(rows \[0, 1\]: \[True, True\]\)"
    with pytest.raises(
        BatchError, match=words + r"\. Are ids reused by two workers, or did a sampler repeat rows"
    ):
        CompletenessGate(group_size=2, on_incomplete=mode)(batch)
    for stage in (FanOutCollapse(reward="sum"), RewardsToGo()):
        with pytest.raises(BatchError, match=words):
            stage(batch)


def test_rows_after_the_end_are_refused(make_batch):
    batch = ended(make_batch, [7, 7, 8], [True, False, True])
    with pytest.raises(
        BatchError, match=r"rows after the end .* rollout 7 \(rows \[0, 1\]: \[True, False\]\)"
    ):
        CompletenessGate(group_size=2, on_incomplete="drop")(batch)
    batch["turn"] = torch.tensor([1, 0, 0])
    assert verdicts(batch, segment_key="turn") == [0, 0, 0]
    batch["turn"] = torch.tensor([0, 1, 0])
    assert verdicts(batch, segment_key="turn") == [3, 3, 1]


def test_ends_must_be_bool(make_batch):
    batch = ended(make_batch, [0, 1], [1.0, 1.0])
    with pytest.raises(
        BatchError, match=r"CompletenessGate needs one bool per row in .*'done'.* found torch.float32"
    ):
        CompletenessGate(group_size=2)(batch)
    with pytest.raises(BatchError, match="FanOutCollapse needs one bool per row"):
        FanOutCollapse()(batch)


def test_a_collapse_checks_ends_only_without_a_gate(make_batch):
    """The gate reads segment numbers, or its options turn the check off."""
    batch = ended(make_batch, [7, 7, 8], [True, True, True], segment=[0, 1, 0])
    for options in ({"segment_key": "segment"}, {"done_key": None}):
        gate = CompletenessGate(group_size=2, **options)
        assert Pipeline({"gate": gate, "collapse": FanOutCollapse()})(batch)[REWARD].tolist() == [1.0] * 3
    assert FanOutCollapse(rollout_key=None)(batch)[REWARD].tolist() == [1.0] * 3


@pytest.mark.parametrize("file_format", ["parquet", "jsonl"])
def test_unfinished_rollouts_stay_unfinished_in_a_dump(make_batch, tmp_path, file_format):
    """A dump has no ends. In a replay, an unfinished rollout has the status aborted."""
    batch = ended(make_batch, [0, 1, 2, 3], [True, False, True, True], [0, 0, 1, 1])
    pipeline = Pipeline({"gate": CompletenessGate(group_size=2, on_incomplete="drop")})
    report = make_report(pipeline.run(batch))
    write_dump(report, tmp_path, format=file_format)
    [(_, replayed)] = open_dump(tmp_path)
    assert (replayed["status"] == Status.ABORTED).tolist() == [False, True, False, False]
    assert pipeline(replayed)["rollout_id"].unique().shape == (2,)


# -- segments with ends of their own ----------------------------------------------------------------------


def test_all_expected_segments_must_end(make_batch):
    batch = ended(make_batch, [7, 7, 7, 8], [True, False, True, True], expected_segments=[2, 2, 2, 1])
    assert verdicts(batch) == [0] * 4
    assert FanOutCollapse()(batch)[REWARD].tolist() == [1.0] * 4
    batch["expected_segments"] = torch.tensor([3, 3, 3, 1])
    assert verdicts(batch) == [3, 3, 3, 1]
    batch["expected_segments"] = torch.tensor([1, 1, 1, 1])
    for stage in (CompletenessGate(group_size=2), FanOutCollapse()):
        with pytest.raises(BatchError, match=r"at most expected_segments times; found .* rollout 7"):
            stage(batch)
    batch["expected_segments"] = torch.tensor([2, 2, 3, 1])
    with pytest.raises(BatchError, match=r"one number ≥ 1 per rollout; found rollout 7 .*\[2, 2, 3\]"):
        CompletenessGate(group_size=2)(batch)


# -- against a loop over rollouts ------------------------------------------------------------------------


def says(rows) -> bool | None:
    """Whether a rollout with rows (done, begins, segment, expected) is finished. None if it is refused."""
    with_begins, by_segment, expected = rows[0][1] is not None, rows[0][2] is not None, rows[0][3]
    ends = sum(done for done, *_ in rows)
    begun = sum(begins for _, begins, *_ in rows) if with_begins else ends
    if expected is not None and not by_segment:
        if ends > expected or begun > expected or (ends == expected and not rows[-1][0]):
            return None
        return ends == begun == expected
    pieces = defaultdict(list)
    for done, begins, segment, _ in rows:
        pieces[segment].append((done, bool(begins)))
    for piece in pieces.values():
        dones, starts = zip(*piece, strict=True)
        if sum(dones) > 1 or (True in dones and not dones[-1]) or sum(starts) > 1:
            return None
    if expected is not None:
        return None if ends > expected else ends == begun == expected
    once = ends == begun == 1
    if not by_segment:
        return once and rows[0][1] is not False
    ended = {number for number, piece in pieces.items() if any(done for done, _ in piece)}
    started = {number for number, piece in pieces.items() if any(begins for _, begins in piece)}
    each = len(ended) == len(pieces) and (not with_begins or len(started) == len(pieces))
    return each or (once and max(pieces) in ended and (not with_begins or min(pieces) in started))


@st.composite
def rollouts_of_pieces(draw, apart):
    """Draw rows of finished rollouts with interleaved pieces. Up to three bools or numbers are wrong."""
    rollouts = []
    for _ in range(draw(st.integers(1, 3))):
        lengths = draw(st.lists(st.integers(1, 2), min_size=1, max_size=3 if apart else 1))
        order = draw(st.permutations([piece for piece, length in enumerate(lengths) for _ in range(length)]))
        rows = [
            [piece not in order[at + 1 :], piece not in order[:at], piece, len(lengths)]
            for at, piece in enumerate(order)
        ]
        for field in draw(st.lists(st.integers(0, 3), max_size=3)):
            for row in rows if field == 3 else [draw(st.sampled_from(rows))]:
                row[field] = not row[field] if field < 2 else row[field] + 1
        rollouts.append(rows)
    return rollouts


@given(st.data(), *[st.booleans()] * 3)
def test_finished_rollouts_are_those_of_a_loop(data, with_begins, with_segments, with_expected):
    rollouts = data.draw(rollouts_of_pieces(with_segments or with_expected))
    turns = [number for number, rows in enumerate(rollouts) for _ in rows]
    of = [iter(rows) for rows in rollouts]
    rows = [
        (number, done, begins if with_begins else None, segment if with_segments else None,
         expected if with_expected else None)
        for number in data.draw(st.permutations(turns))
        for done, begins, segment, expected in [next(of[number])]
    ]  # fmt: skip
    by_rollout = defaultdict(list)
    for number, *row in rows:
        by_rollout[number].append(row)
    answers = {number: says(group) for number, group in by_rollout.items()}
    ids, done, begins, segment, expected = (list(column) for column in zip(*rows, strict=True))

    def found():
        return incomplete_groups(
            [0] * len(ids),
            ids,
            group_size=9,
            done=done,
            begins=begins if with_begins else None,
            segment=segment if with_segments else None,
            expected_segments=expected if with_expected else None,
        )

    if None in answers.values():
        with pytest.raises(BatchError, match=r"a rollout (ends|begins)"):
            found()
    else:
        assert found().have.tolist() == [sum(answers.values())]


# -- a collector's batches -------------------------------------------------------------------------------


@pytest.mark.torchrl
def test_batches_that_end_inside_rollouts_train_no_wrong_reward():
    """If a rollout begins in one batch and ends in the next, none of its rows trains."""
    from torchrl.collectors import Collector
    from torchrl.envs import InitTracker, TransformedEnv
    from turns import SLOTS, OneAction, TurnsEnv, last_turn, reward_of

    collector = Collector(
        TransformedEnv(TurnsEnv(), InitTracker()),
        OneAction(),
        frames_per_batch=SLOTS * 7,
        total_frames=SLOTS * 7 * 16,
        auto_register_policy_transforms=False,
    )
    pipeline = Pipeline(
        {
            "gate": CompletenessGate(on_incomplete="drop"),
            "collapse": FanOutCollapse(reward="sum"),
            "advantage": GroupRelativeAdvantage(scale="none"),
        }
    )
    trained = 0
    for batch in collector:
        rollouts, rows = batch["rollout_id"].unique(return_counts=True)
        run = pipeline.run(batch)
        assert run.metrics["out/gate/unfinished"] == int(rows[rows != last_turn(rollouts) + 1].sum())
        for row in run.batch.unbind(0) if len(run.batch) else ():
            rollout = row["rollout_id"]
            earned = reward_of(rollout, torch.arange(int(last_turn(rollout)) + 1)).sum()
            assert float(row[REWARD]) == float(earned)
            trained += 1
    assert trained > 0


@pytest.mark.parametrize(
    ("rows", "options", "verdict"),
    [  # (done, begins, segment) of each row, from the agents of one rollout
        ({"done": [0, 1, 1], "init": [1, 0, 0]}, {"expected": 2}, 3),  # one agent's first rows are missing
        ({"done": [0, 0, 0, 1], "init": [1, 0, 1, 0]}, {"segment": [0, 0, 1, 1]}, 3),  # one agent still runs
        ({"done": [0, 0, 1], "init": [0, 1, 0]}, {}, 3),  # the rollout begins in its middle
        ({"done": [0, 0, 1, 1], "init": [1, 1, 0, 0]}, {"expected": 2}, 0),  # both end, interleaved
    ],
)
def test_a_rollout_has_as_many_starts_as_ends(make_batch, rows, options, verdict):
    number = len(rows["done"])
    batch = make_batch([1.0] * number, [0] * number, [7] * number)
    batch["next", "done"], batch["is_init"] = (torch.tensor(rows[name]).bool() for name in ("done", "init"))
    if "expected" in options:
        batch["expected_segments"] = torch.full((number,), options["expected"])
    batch["segment"] = torch.tensor(options.get("segment", [0] * number))
    segment_key = "segment" if "segment" in options else None
    assert verdicts(batch, group_size=1, segment_key=segment_key) == [verdict] * number


def test_the_mask_of_a_collector_is_one_bool_per_row():
    columns = {"group_id": [0] * 4, "rollout_id": [0, 1, 2, 3], ("next", "reward"): [1.0] * 4}
    batch = TensorDict(columns, batch_size=[4])
    batch["collector", "mask"] = torch.tensor([True, True, False, True])
    assert FanOutCollapse()(batch)["rollout_id"].tolist() == [0, 1, 3]
    for mask in (torch.ones(4, 3, dtype=torch.bool), torch.ones(4)):
        batch["collector", "mask"] = mask
        with pytest.raises(BatchError, match=r"one bool per row|one number per row"):
            FanOutCollapse()(batch)
