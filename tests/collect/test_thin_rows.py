"""Recipes decide rows of TransferQueue without tokens. The rank that trains a row fetches its tokens once."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from assembly import Line, batch_of_lines, faulty_stream, same_rows
from batches import cut_rows
from composed import composed
from hypothesis import given, settings
from hypothesis import strategies as st
from queue_here import QueueHere
from recipes import CHAINS, WITH_TORCHRL
from tensordict import TensorDict, TensorDictBase

from headrace.pipeline import Pipeline, RolloutQueue, StepQueue, assembled
from headrace.pipeline.collect import ColumnsRead, pack_thin, unpack_thin
from headrace.pipeline.queues import queues
from headrace.transforms import BatchError, GroupAssembler, MissingKeyError, StalledError

MOST_BYTES = 200
MASK, LOG_PROB = ("masks", "all_assistant_mask"), ("log_probs", "full")
SPLIT = "pipeline.stages.split."
GRPO = ("pipeline=grpo", f"{SPLIT}minibatches=2", f"{SPLIT}ranks=2")
RECIPES = [
    (*GRPO, f"{SPLIT}remainder=pad"),
    (*GRPO, f"{SPLIT}remainder=pad", "pipeline.masked_log_prob=keep", f"{SPLIT}microbatches=2"),
    (
        "pipeline=grpo",
        f"{SPLIT}ranks=2",
        f"{SPLIT}minibatches=null",
        f"{SPLIT}minibatch_size=4",
        f"{SPLIT}remainder=carry",
    ),
    ("pipeline=dapo", f"{SPLIT}ranks=2", f"{SPLIT}remainder=pad", "pipeline.stages.weight.unit=rollout"),
    (
        "pipeline=dr_grpo",
        f"{SPLIT}ranks=2",
        f"{SPLIT}max_tokens=24",
        f"{SPLIT}length_key=[masks,all_assistant_mask]",
        f"{SPLIT}remainder=pad",
    ),
]
OF_TOKENS = {"gtpo", "high_entropy", "kl_in_advantage", "mis", "mlperf", "mt_grpo", "opd", "opsm"}
OF_TOKENS |= {"otb", *WITH_TORCHRL}
OF_TOKENS |= {"rlsd", "tis", "tree_grpo"}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"groups": 2},
    {"on_failure": "keep", "min_rollouts": 1, "timeout": 4, "on_timeout": "keep"},
    {"group_size": 1, "max_pending_groups": 3},
    {"max_staleness": 1, "on_stale": "mask", "on_newer": "wait"},
]


@pytest.fixture
def name(request) -> str:
    """The name of a partition that no other test has."""
    return request.node.name


@pytest.fixture(autouse=True)
def here(request, monkeypatch) -> QueueHere | None:
    """A queue of this process. A test with the fixture `queue` uses TransferQueue itself."""
    if "queue" in request.fixturenames:
        return None
    made = QueueHere()
    monkeypatch.setattr(queues, "tq", lambda: made)
    return made


def rows_of(lines: list[Line], start: int, *, tokens: int = 8, ragged: bool = False) -> TensorDictBase:
    """Rows with masks and log-probabilities, which are not all finite. Some rows do not train."""
    draw = torch.Generator().manual_seed(start)
    rows, size = batch_of_lines(lines, start), (len(lines), tokens)
    rows["next", "reward"] = (rows["rollout_id"] * 7 % 5).float().unsqueeze(-1)  # equal for all segments
    rows["tokens", "full"] = torch.randint(0, 9, size, generator=draw)
    rows[MASK] = torch.rand(size, generator=draw) < torch.rand(len(lines), 1, generator=draw) * 1.4 - 0.2
    rows["masks", "all_attention_mask"] = torch.ones(size, dtype=torch.bool)
    log_prob = -torch.rand(size, generator=draw)
    rows[LOG_PROB] = log_prob.masked_fill(torch.rand(size, generator=draw) < 0.05, float("nan"))
    if not ragged:
        return rows
    keys = (("tokens", "full"), MASK, ("masks", "all_attention_mask"), LOG_PROB)
    return cut_rows(rows, [slice(tokens - number % 3) for number in range(len(rows))], keys)


def stream_of(seed: int, **options: Any) -> list[TensorDictBase]:
    """A stream in pieces: groups of several sizes with fan-out. Rows are lost, failed or repeated."""
    pieces, start = [], 0
    for lines in faulty_stream(random.Random(seed), 1):
        if lines:
            pieces.append(rows_of(lines, start, **options))
        start += len(lines)
    return pieces


def metrics_of(run: Any) -> dict[str, float]:
    return {key: value for key, value in run.metrics.items() if not key.startswith("time/")}


def tried(pipeline: Pipeline, batch: TensorDictBase, epochs: int) -> tuple[Any, str]:
    """The run of a batch, or None and the error."""
    try:
        return pipeline.run(batch, epochs=epochs), ""
    except BatchError as err:
        return None, str(err)


def taken(batches: Iterator[TensorDictBase]) -> Iterator[TensorDictBase]:
    """Yield batches until no further group becomes complete."""
    try:
        yield from batches
    except StalledError:
        return


def put_in_turns(source: RolloutQueue, pieces: Iterable[TensorDictBase], seed: int = 0) -> None:
    producers = [RolloutQueue.__new__(RolloutQueue) for _ in range(2)]
    draw = random.Random(seed)
    for producer in producers:
        producer.__dict__.update(source.__getstate__())
    for piece in pieces:
        draw.choice(producers).put(piece)
    for producer in producers:
        producer.end()


def part_of(step: TensorDictBase, rank: int) -> TensorDictBase:
    return step[step["headrace", "rank"] == rank]


@pytest.mark.slow
def test_rows_without_tokens_give_the_same_batches_metrics_and_steps(name):
    """Each recipe gets streams with several options. Rows are lost, failed or repeated."""
    steps_seen = masked = 0
    for seed in range(5):
        ragged = seed % 2 == 0
        options = {**OPTIONS[(2 * seed + ragged) % 5], "on_duplicate": "drop"}
        words, epochs = RECIPES[seed], 1 + seed % 2
        if "mask" in options.values() and any("keep" in word for word in words):
            continue  # an assembler that masks writes NaN, which only rows with tokens have
        pieces, partition = stream_of(seed, ragged=ragged), f"{name}/{seed}"
        plain, assembler = GroupAssembler(**options), GroupAssembler(**options)
        plain.version = assembler.version = 2
        whole, pipeline = composed(*words), composed(*words)
        source = RolloutQueue(partition, producers=2, max_rows=1, decided_by=[assembler, pipeline])
        put_in_turns(source, pieces, seed)
        steps = StepQueue(f"{partition}/steps", ranks=2, rollouts=partition)
        ranks = [StepQueue(f"{partition}/steps", ranks=2, rollouts=partition).minibatches(r) for r in (0, 1)]
        expected = list(taken(assembled(pieces, plain)))
        found = taken(assembled((piece for piece in source if piece is not None), assembler))
        for batch, thin in zip(expected, found, strict=True):
            assert MASK not in thin.keys(True)
            same_rows(source.fetch(thin), batch)
            run, refused = tried(whole, batch, epochs)
            if run is None:  # for example because the rewards of a rollout differ
                assert tried(pipeline, thin, epochs) == (None, refused)
                continue
            decided = pipeline.run(thin, epochs=epochs)
            assert metrics_of(decided) == pytest.approx(metrics_of(run), rel=0, abs=0, nan_ok=True)
            assert repr(decided) == repr(run)
            steps.put(decided.minibatches())
            for step in run.minibatches():
                steps_seen += 1
                for rank in (0, 1):
                    mine, part = next(ranks[rank]), part_of(step, rank)
                    assert len(mine) == len(part)
                    if len(part):
                        same_rows(mine, part)
                        masked += ("headrace", "in_loss") in part.keys(True) and int(
                            (~part["headrace", "in_loss"]).sum()
                        )
        assert assembler.counts == plain.counts
        source.keep_only(assembler, pipeline, steps)
    assert steps_seen > 10
    assert masked > 0


def test_rows_masked_for_staleness_have_no_tokens_to_count(name):
    options: dict[str, Any] = {"max_staleness": 0, "on_stale": "mask"}
    assembler, plain = GroupAssembler(**options), GroupAssembler(**options)
    assembler.version = plain.version = 1
    lines = [Line(0, r, 0, True, version=r) for r in (0, 1)]
    rows = rows_of(lines, 0)
    rows[MASK] = torch.ones(2, 8, dtype=torch.bool)
    source = RolloutQueue(name, decided_by=[assembler, composed("pipeline=grpo")])
    source.put(rows)
    assembler.put(next(iter(source)))
    plain.put(rows)
    numbers = assembler.take()["headrace", "number_of", ".".join(MASK)]
    assert numbers[:, 0].tolist() == plain.take()[MASK].sum(1).tolist() == [0, 8]


@pytest.mark.parametrize("kept", ["nan", "keep"])
def test_a_rank_masks_the_tokens_that_the_pipeline_masks(kept, name):
    """Group 0 has equal rewards, so it is out of the loss. One token of group 1 has no finite probability."""
    rows = rows_of([Line(g, 2 * g + r, 0, True) for g in (0, 1) for r in (0, 1)], 0)
    rows["next", "reward"] = torch.tensor([[1.0], [1.0], [0.0], [1.0]])
    rows[MASK][:, :4], rows[LOG_PROB] = True, rows[LOG_PROB].nan_to_num(-1)
    rows[LOG_PROB][2, 1] = float("nan")
    words = ("pipeline=grpo", f"{SPLIT}minibatches=1", f"pipeline.masked_log_prob={kept}")
    whole, pipeline = composed(*words), composed(*words)
    source = RolloutQueue(name, decided_by=[pipeline])
    source.put(rows)
    steps = StepQueue(f"{name}/steps", ranks=1, rollouts=name)
    assert steps.put(pipeline.minibatches(next(iter(source)))) == 1
    (expected,) = whole.minibatches(rows)
    found = next(steps.minibatches(0))
    same_rows(found, expected)
    masks = dict(zip(found["rollout_id"].tolist(), found[MASK].any(1).tolist(), strict=True))
    assert masks == {0: False, 1: False, 2: True, 3: True}
    lacks = found["rollout_id"] == 2
    assert found[MASK][lacks][0, 1] == (kept == "nan")  # a loss that keeps finite numbers cannot train it
    assert bool(found[LOG_PROB].isfinite().all()) == (kept == "keep")


# -- packed columns ---------------------------------------------------------------------------------------

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@settings(max_examples=40)
@given(st.data(), st.integers(1, 5))
def test_packed_columns_come_out_with_all_their_bits(data, rows):
    """Integers reach the ends of their dtype, and columns have any width, 0 included."""
    columns: dict[Any, torch.Tensor] = {}
    for dtype in data.draw(st.lists(st.sampled_from(INTEGERS), unique=True)):
        ends = torch.iinfo(dtype)
        number = st.integers(ends.min, ends.max) | st.sampled_from(
            [ends.min, ends.max, 0, 127, 128 % ends.max]
        )
        width = data.draw(st.integers(0, 3))
        values = data.draw(st.lists(number, min_size=rows * width, max_size=rows * width))
        columns["of", str(dtype)] = torch.tensor(values, dtype=dtype).view(rows, width)
    floats = torch.tensor([0.1, float("nan"), float("inf"), -0.0, 1e-7]).expand(rows, 5)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        columns[str(dtype)] = floats.to(dtype)
    columns["one"], columns["deep"] = torch.arange(rows), torch.arange(rows * 6).view(rows, 2, 3)
    columns["bool"] = torch.arange(rows * 2).view(rows, 2) % 3 == 0
    batch = TensorDict(columns, batch_size=[rows])
    found = unpack_thin(pack_thin(batch))
    assert found.batch_size == batch.batch_size
    assert list(found.keys(True, True)) == list(batch.keys(True, True))
    for key in columns:
        assert found[key].dtype is columns[key].dtype
        assert torch.equal(found[key].nan_to_num(7), columns[key].nan_to_num(7)), key
        found[key].add_(1) if found[key].dtype is not torch.bool else found[key].logical_not_()  # its own


def test_thin_rows_have_the_columns_that_decide_and_the_token_counts():
    """Text and a column of 17 numbers per row are left out. Two tokens have no finite probability."""
    rows = rows_of([Line(0, r, 0, True) for r in range(3)], 0)
    rows[LOG_PROB] = torch.zeros(3, 8)
    rows[MASK] = torch.arange(8) < torch.tensor([[8], [3], [0]])
    rows[LOG_PROB][0, :2] = float("nan")
    rows["segment"] = torch.arange(48).view(3, 16)
    rows["partition"] = torch.arange(51).view(3, 17)
    assembler = GroupAssembler(segment_key="segment", partition_key="partition", status_key="text")
    reads = ColumnsRead.of([assembler, composed("pipeline=grpo"), assembler])
    thin = reads.thin(rows)
    count = ("headrace", "number_of", ".".join(MASK))
    assert thin[count].tolist() == [[8, 6], [3, 3], [0, 0]]
    assert set(thin.keys(True, True)) == {
        *("group_id", "rollout_id", "expected_rollouts", "segment", count),
        *(("next", name) for name in ("done", "status", "policy_version", "reward")),
    }
    assert thin["segment"].shape == (3, 16)
    assert (reads.ids, reads.masked) == (["group_id", "rollout_id"], [MASK, LOG_PROB])


# -- what goes where --------------------------------------------------------------------------------------


def put_groups(source: RolloutQueue, *, groups: int = 32, tokens: int = 8) -> None:
    """Finished groups of eight, as workers with origins send them, in pieces of 32 rows."""
    lines = [Line(g, 8 * g + r, 0, True, expected=8) for g in range(groups) for r in range(8)]
    rows = rows_of(lines, 0, tokens=tokens)
    rows["number"] = torch.arange(len(lines))
    rows[MASK][:, 0], rows[LOG_PROB] = True, rows[LOG_PROB].nan_to_num(-1)
    zeros = torch.zeros(len(lines), dtype=torch.int32)
    rows["headrace", "origin"] = torch.stack([zeros, zeros + 3, zeros + 99, zeros, zeros + 1], 1)
    for piece in rows.split(32):
        source.put(piece)
    source.end()


def wire_of(patch: pytest.MonkeyPatch) -> list[int]:
    """A list to which this process adds the bytes of each message of TransferQueue that it sends or gets."""
    sizes: list[int] = []
    message = importlib.import_module("transfer_queue.utils.zmq_utils").ZMQMessage
    serialize, deserialize = message.serialize, message.deserialize.__func__

    def sent(message: Any) -> Any:
        frames = serialize(message)
        sizes.append(sum(memoryview(frame).nbytes for frame in frames))
        return frames

    def came(cls: Any, frames: Any) -> Any:
        sizes.append(sum(memoryview(frame).nbytes for frame in frames))
        return deserialize(cls, frames)

    patch.setattr(message, "serialize", sent)
    patch.setattr(message, "deserialize", classmethod(came))
    return sizes


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("queue")
@pytest.mark.skipif(find_spec("transfer_queue") is None, reason="the extra `tq` is not installed")
def test_at_most_200_bytes_per_row_reach_the_decider_for_any_number_of_tokens(name):
    """All messages count: reads, polls, steps and clears. Pieces have 32 rows, and there are two ranks."""
    pipeline, assembler, sizes, rows = composed(*GRPO), GroupAssembler(groups=32), [], 0
    source = RolloutQueue(name, producers=1, decided_by=[assembler, pipeline])
    put_groups(RolloutQueue(name, decided_by=[assembler, pipeline]), groups=64, tokens=4096)
    steps = StepQueue(f"{name}/steps", ranks=2, rollouts=name)
    with pytest.MonkeyPatch.context() as patch:
        sizes = wire_of(patch)
        for batch in assembled(source, assembler):
            steps.put(pipeline.minibatches(batch))
            source.keep_only(assembler, pipeline, steps)
            rows += len(batch)
    assert rows == 512
    assert 20 < sum(sizes) / rows < MOST_BYTES


def test_a_rank_fetches_the_tokens_of_a_row_once_for_all_epochs(name, here):
    pipeline, assembler = composed(*GRPO), GroupAssembler(groups=16)
    source = RolloutQueue(name, producers=1, decided_by=[assembler, pipeline])
    put_groups(RolloutQueue(name, decided_by=[assembler, pipeline]), groups=16)
    steps = StepQueue(f"{name}/steps", ranks=2, rollouts=name)
    (batch,) = assembled(source, assembler)
    assert steps.put(pipeline.minibatches(batch, epochs=3)) == 6
    fetched: list[str] = []
    get = here.kv_batch_get

    def seen(keys, partition):
        fetched.extend(keys if partition == name else [])
        return get(keys, partition)

    here.kv_batch_get = seen
    steps.end()
    for rank in (0, 1):
        fetched.clear()
        taken = StepQueue(f"{name}/steps", ranks=2, rollouts=name).minibatches(rank)
        numbers = [number for part in taken for number in part["number"].tolist()]
        assert len(numbers) == 3 * 64
        assert len(fetched) == len(set(fetched)) == len(set(numbers))


def test_rows_leave_the_queue_once_unused(name, here):
    """Rows stay in the queue while they wait for their group or a rank, or are carried."""
    words = ("pipeline=grpo", "pipeline.stages.split.minibatches=null", f"{SPLIT}minibatch_size=24")
    pipeline = composed(*words, f"{SPLIT}remainder=carry")
    assembler = GroupAssembler(groups=2)
    source = RolloutQueue(name, decided_by=[assembler, pipeline])
    lines = [Line(g, 2 * g + r, 0, True) for g in range(30) for r in (0, 1)]
    source.put(rows_of(lines[:1] + lines[2:51], 0))  # a row of group 0 is missing, and one of group 25
    steps = StepQueue(f"{name}/steps", ranks=1, rollouts=name)
    assembler.put(next(iter(source)))
    batch = assembler.take(24)
    assert steps.put(pipeline.minibatches(batch)) == 2
    assert source.keep_only(assembler, pipeline, steps) == 0
    rank = StepQueue(f"{name}/steps", ranks=1, rollouts=name).minibatches(0)
    assert len(next(rank)) == 24
    assert source.keep_only(assembler, pipeline, steps) == 24
    assert len(next(rank)) == 24
    left = 50 - len(here.kv_list(name)[name])
    assert source.keep_only(assembler, pipeline, steps) == 24
    assert left == 24
    assert len(here.kv_list(name)[name]) == 2
    assert source.keep_only(steps) == 2
    assert here.kv_list(name)[name] == {}


def test_a_reader_without_tokens_resumes_from_its_last_state(name, here):
    def reader() -> tuple[Any, RolloutQueue, GroupAssembler]:
        assembler = GroupAssembler(groups=1)
        source = RolloutQueue(name, producers=1, clear="saved", max_rows=1, decided_by=[assembler])
        return assembled(source, assembler), source, assembler

    stream, source, assembler = reader()
    lines = [Line(g, 2 * g + r, 0, True) for r in (0, 1) for g in range(6)]
    producer = RolloutQueue(name, decided_by=[assembler])
    for piece in rows_of(lines, 0).split(2):
        producer.put(piece)
    producer.end()
    expected = [[0, 6], [1, 7], [2, 8], [3, 9], [4, 10], [5, 11]]
    batches, states = iter(stream), []
    for number in range(3):
        assert source.fetch(next(batches))["number"].tolist() == expected[number]
        states.append(stream.state_dict())
        source.keep_only(stream)
    for state, at in ((states[1], 2), (states[2], 3)):
        again, source, _ = reader()
        again.load_state_dict(state)
        assert [source.fetch(batch)["number"].tolist() for batch in again] == expected[at:]
    source.keep_only()
    source.keep_only()
    assert here.kv_list(name)[name] == {}


@pytest.mark.slow
def test_every_recipe_decides_equally_without_tokens_or_requires_them(name, make_batch):
    needs = set()
    for number, recipe in enumerate(CHAINS):
        whole, pipeline = composed(f"pipeline={recipe}"), composed(f"pipeline={recipe}")
        batch = make_batch([1.0, 0, 1, 0, 1, 1, 0, 1], [0, 0, 0, 0, 1, 1, 1, 1])
        batch["next", "done"] = torch.ones(8, 1, dtype=torch.bool)
        batch["expected_rollouts"], batch["state_id"] = torch.full((8,), 4), torch.arange(8) // 2
        batch["old_log_probs", "full"] = batch[LOG_PROB] - 0.1
        batch["turn_index"] = torch.zeros(8, 4, dtype=torch.int64)
        batch["turn_reward"] = torch.zeros(8, 4)
        if recipe == "gdpo":
            batch["next", "reward"] = torch.rand(8, 2)
        run = whole.run(batch.clone())
        expected, partition = list(run.minibatches()), f"{name}/{number}"
        source = RolloutQueue(partition, decided_by=[pipeline])
        source.put(batch)
        thin = next(iter(source)).exclude("turn_index", "turn_reward")  # these are token columns
        steps = StepQueue(f"{partition}/steps", ranks=1, rollouts=partition)
        try:
            decided = pipeline.run(thin)
            assert steps.put(decided.minibatches()) == len(expected)
        except (BatchError, MissingKeyError):
            needs.add(recipe)
            continue
        assert metrics_of(decided) == pytest.approx(metrics_of(run), rel=0, abs=0, nan_ok=True), recipe
        for part, mine in zip(expected, steps.minibatches(0), strict=False):
            same_rows(mine, part)
    assert needs == OF_TOKENS


# -- what is refused --------------------------------------------------------------------------------------


def test_rows_without_tokens_are_refused_in_training(name):
    pipeline, assembler = composed("pipeline=grpo"), GroupAssembler()
    source = RolloutQueue(name, decided_by=[assembler, pipeline])
    rows = rows_of([Line(0, r, 0, True) for r in (0, 1)], 0)
    source.put(rows)
    thin = next(iter(source))
    with pytest.raises(BatchError, match=r"elsewhere.*StepQueue\(rollouts=…\)"):
        StepQueue(f"{name}/steps", ranks=1).put(pipeline.minibatches(thin))
    with pytest.raises(
        MissingKeyError, match=r"the key \('headrace', 'elsewhere'\); .*\]\. Read the rows by"
    ):
        source.fetch(rows)
    with pytest.raises(TypeError, match="decided_by takes GroupAssemblers and pipelines; got dict"):
        RolloutQueue(name, decided_by=[{}])


def test_a_producer_without_the_required_columns_is_named(name):
    source = RolloutQueue(name, decided_by=[GroupAssembler()])
    RolloutQueue(name).put(rows_of([Line(0, r, 0, True) for r in (0, 1)], 0))
    with pytest.raises(BatchError, match=r"puts \w+/0 did not: create the producers' RolloutQueue with"):
        next(iter(source))


def test_lost_tokens_and_tokens_of_another_width_raise_on_the_rank(name, here):
    pipeline, assembler = composed("pipeline=grpo"), GroupAssembler()
    source = RolloutQueue(name, decided_by=[assembler, pipeline])
    lines = [Line(0, r, 0, True) for r in (0, 1)]
    source.put(rows_of(lines[:1], 0, tokens=8))
    source.put(rows_of(lines[1:], 1, tokens=9))
    assembler.put(next(iter(source)))
    steps = StepQueue(f"{name}/steps", ranks=1, rollouts=name)
    steps.put(pipeline.minibatches(assembler.take()))
    with pytest.raises(BatchError, match="dense rows must have one width"):
        next(steps.minibatches(0))
    here.kv_clear(list(here.kv_list(name)[name])[:1], name)
    with pytest.raises(BatchError, match=r"all rows that were put into partition.*returned 1 of 2"):
        next(steps.minibatches(0))
