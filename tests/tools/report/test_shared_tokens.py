"""The tokens that prefix trees would save are counted before trees are used."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from command import told
from composed import configure
from dumps import open_instruct_row, write_lines
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tries import ATTENTION, FULL, Trie, dense, ragged

from headrace.pipeline import Pipeline, make_report
from headrace.pipeline.tools.plan import tabulate_group_sizes
from headrace.pipeline.tools.replay import replay_dump
from headrace.pipeline.tools.report import SharedTokens, count_shared_tokens, page_data, said_of_trees
from headrace.transforms import FanOutCollapse, GroupRelativeAdvantage, RewardWithin, SampleFilter

pytestmark = pytest.mark.slow

ROWS = st.lists(st.lists(st.sampled_from([1, 2]), min_size=1, max_size=7), min_size=1, max_size=12)


def with_ids(rows, rollouts, groups, build=dense) -> TensorDict:
    batch = build(rows)
    for key, ids in (("rollout_id", rollouts), ("group_id", groups)):
        batch[key] = torch.tensor(list(ids))
    return batch


def ids_of(batch) -> dict[str, np.ndarray]:
    return {name: batch[name].numpy() for name in ("rollout_id", "group_id")}


def apart(rows) -> TensorDict:
    """The same rows with padding on the left and between their tokens."""
    batch, width = dense(rows, side="left"), 2 * max(map(len, rows))
    spread = TensorDict({}, batch_size=[len(rows)])
    for key in (FULL, ATTENTION):
        spread[key] = torch.zeros(len(rows), width, dtype=batch[key].dtype)
        spread[key][:, ::2] = batch[key]
    return spread


def check_by_tries(rows, rollouts, chosen, build, cells) -> None:
    """Compare the counts with those of tries. A group has two rollouts."""
    groups = [rollout // 2 for rollout in rollouts]
    batch = with_ids(rows, rollouts, groups, build)
    found = count_shared_tokens(batch, ids_of(batch), np.array(chosen), cells=cells)
    homes = {"rows": range(len(rows)), "rollout": rollouts, "group": groups}
    for unit, home in homes.items():
        tries = [
            Trie([row for row, own, keep in zip(rows, home, chosen, strict=True) if own == one and keep])
            for one in set(home)
        ]
        assert found.tokens.get(unit, 0) == sum(len(trie.paths) for trie in tries)
        # A token costs 2 · depth + 1, where depth is the number of tokens before it.
        squares = sum(2 * len(path) - 1 for trie in tries for path in trie.paths)
        assert found.squares.get(unit, 0) == squares


@given(ROWS, st.data(), st.sampled_from([dense, ragged, apart]), st.sampled_from([1, 20, 2**24]))
def test_counts_equal_those_of_tries_built_by_loops(rows, data, build, cells):
    rollouts = data.draw(st.lists(st.integers(0, 4), min_size=len(rows), max_size=len(rows)))
    chosen = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    check_by_tries(rows, rollouts, chosen, build, cells)


@pytest.mark.parametrize("cells", [1, 300, 2**16])
def test_counts_of_long_rows_equal_those_of_tries(cells):
    """Tokens are compared in blocks of 128, and rows differ before, at and after the ends of two blocks."""
    dice = Random(0)
    whole = [dice.randrange(1, 9) for _ in range(300)]
    rows = [whole[:at] + [9] * more for at in (1, 127, 128, 129, 255, 256, 257, 300) for more in (0, 3)]
    rows += [[*whole[:at], 8] for at in (128, 256)]
    rollouts = [dice.randrange(3) for _ in rows]
    for build in (dense, ragged):
        check_by_tries(rows, rollouts, [True] * len(rows), build, cells)


def test_the_estimate_equals_one_by_hand():
    batch = with_ids([[1, 2, 3], [1, 2, 4]], [0, 1], [0, 0])
    counts = count_shared_tokens(batch, ids_of(batch))
    assert counts.tokens == {"rows": 6, "rollout": 6, "group": 4}
    assert counts.squares == {"rows": 18, "rollout": 18, "group": 9 + 9 - 4}
    numbers = counts.numbers(parameters=1e15)  # 10^15 parameters take 6 pflops a token, and LINEAR is 24,576
    assert numbers["tree/flops/group"] == pytest.approx((4 + 14 / 24576) / (6 + 18 / 24576))
    assert numbers["tree/pflops/rows"] == pytest.approx(6 * (6 + 18 / 24576))
    assert "tree/pflops/rows" not in counts.numbers()
    twice = counts + counts
    assert twice.tokens == {unit: 2 * count for unit, count in counts.tokens.items()}
    assert counts + SharedTokens({}, {}) == SharedTokens({}, {}) + counts == counts
    assert SharedTokens({"rows": 1.0}, {"rows": 2.0}) + counts == SharedTokens(
        {"rows": 7.0, "rollout": 6.0, "group": 4.0}, {"rows": 20.0, "rollout": 18.0, "group": 14.0}
    )


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ({"rollout": 1000, "group": 1000}, "; rows share none"),
        ({}, "; rows share none"),
        ({"group": 800}, "; 800 as trees of groups, 1.2 times fewer"),
        (
            {"rollout": 999, "group": 400},
            "; 999 as trees of rollouts, 1.0 times fewer; 400 as trees of groups, 2.5 times fewer",
        ),
    ],
)
def test_a_sentence_names_the_trees_with_fewer_tokens(counts, said):
    numbers = {f"tree/tokens/{unit}": float(count) for unit, count in counts.items()}
    numbers["tree/tokens/rows"] = 1000.0
    assert said_of_trees(numbers) == f"tokens of prompts and responses: 1,000 row by row{said}"
    if "group" in counts and counts["group"] < 1000:
        assert said_of_trees(numbers | {"tree/flops/group": 0.756}).endswith("fewer, with 0.76 of the FLOPs")


def test_a_batch_without_tokens_or_rows_has_no_numbers(make_batch):
    batch = make_batch([1.0, 0.0], [0, 0])
    for nothing in (batch.exclude("tokens"), batch[:0]):
        found = count_shared_tokens(nothing, ids_of(nothing))
        assert (found, found.numbers()) == (SharedTokens({}, {}), {})
    assert said_of_trees({}) == ""
    batch = batch.exclude("tokens")
    report = make_report(Pipeline({}).run(batch), batch=batch)
    assert not [name for name in report.numbers if name.startswith("tree/")]


def test_a_report_counts_the_kept_rows():
    """Masked rows go through the model, and dropped rows do not."""
    batch = with_ids([[1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 7, 8]], [0, 1, 2], [0, 0, 0])
    batch["next", "reward"] = torch.tensor([1.0, 2.0, 9.0])
    for action, tokens in (("mask", 8), ("drop", 6)):
        out = SampleFilter(criterion=RewardWithin(high=5.0), action=action)
        pipeline = Pipeline(
            {"collapse": FanOutCollapse(), "filter": out, "advantage": GroupRelativeAdvantage()}
        )
        run = pipeline.run(batch)
        report = make_report(run, batch=batch)
        assert report.numbers["tree/tokens/group"] == tokens
        page = page_data([report], title="t")
        assert page["steps"][0]["numbers"]["tree/tokens/group"] == tokens
        assert "tree/tokens/group" in page["curves"]
        assert "tree/tokens/group" not in make_report(run).numbers


def test_a_replay_and_a_plan_say_how_many_tokens_trees_save(tmp_path):
    """Two prompts of 4 tokens have four answers of 3 tokens each: 8 · 7 in rows, 2 · (4 + 4 · 3) in trees."""
    rows = [
        open_instruct_row(row, row // 4, row % 2, prompt_tokens=[row // 4] * 4, response_tokens=[9 + row] * 3)
        for row in range(8)
    ]
    path = write_lines(tmp_path / "run_rollouts_000000.jsonl", rows)
    words = ["pipeline.stages.gate.group_size=4", "pipeline.stages.split.shuffle=false"]
    for task, function in (("replay", replay_dump), ("plan", tabulate_group_sizes)):
        config = configure("config", f"task={task}", *words, f"source.path={path}")
        said = "tokens of prompts and responses: 56 row by row; 32 as trees of groups, 1.8 times fewer"
        assert said in told(function, config, tmp_path / task)[1], task
