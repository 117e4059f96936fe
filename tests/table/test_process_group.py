"""The stages of a pipeline and the pipeline share their batches with the same ranks."""

from __future__ import annotations

import re

import pytest

from headrace.transforms.table.process_group import RankOptions, check_one_way, resolve_group


class Stage:
    """A stage with the options for ranks."""

    def __init__(self, process_group=None, shared_ids="raise"):
        self.process_group, self.shared_ids = process_group, shared_ids


ALONE, WORLD = Stage(), Stage("world")
SAME, DIFFERENT = (Stage("world", each) for each in ("same", "different"))


@pytest.mark.parametrize(
    ("stages", "group", "shared_ids", "found"),
    [
        ([], None, None, (None, "raise")),
        ([object(), ALONE], None, "same", (None, "same")),
        ([ALONE], "world", None, ("world", "raise")),
        ([WORLD, ALONE], None, None, ("world", "raise")),
        ([WORLD, SAME, SAME], "world", None, ("world", "same")),
        ([DIFFERENT, WORLD], None, "different", ("world", "different")),
        ([Stage(None, "same")], None, None, (None, "raise")),  # without a group, no id is on another rank
    ],
)
def test_a_pipeline_has_the_ranks_of_its_stages(stages, group, shared_ids, found):
    assert RankOptions.of(stages, group, shared_ids, 9.0) == RankOptions(*found, 9.0)


SHARE = (
    "all stages of a pipeline must share their batches with the same ranks: set pipeline.process_group and "
    "pipeline.shared_ids, and no others on stages; got "
)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: RankOptions.of([SAME], None, "different", 9.0),
            SHARE + "['world'] and ['different', 'same']",
        ),
        (
            lambda: RankOptions.of([DIFFERENT, SAME], None, None, 9.0),
            SHARE + "['world'] and ['different', 'same']",
        ),
        (lambda: RankOptions.of([Stage("a")], "world", None, 9.0), SHARE + "['world', 'a'] and []"),
        (lambda: RankOptions.of([WORLD], None, None, -1.0), "patience must be finite and ≥ 0; got -1.0"),
        (
            lambda: RankOptions.of([], "all", None, 9.0),
            "process_group must be a process group, 'world' or None; got 'all'",
        ),
        (
            lambda: resolve_group("world"),
            "process_group='world' needs torch.distributed: call init_process_group before the first batch",
        ),
        (lambda: check_one_way(0, None), "ranks must be an integer ≥ 1; got 0"),
        (
            lambda: check_one_way(2, "world"),
            "give ranks if each rank holds the whole batch, or process_group if each rank holds its own "
            "rows, not both; got ranks=2 and process_group='world'",
        ),
    ],
)
def test_ranks_that_contradict_each_other_are_refused(call, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        call()


def test_one_way_to_share_a_batch_is_accepted():
    check_one_way(1, "world")
    check_one_way(2, None)
    assert RankOptions.of([WORLD], None, None, 0.0).patience == 0.0
    assert resolve_group(None) is None
