"""The assembler in an actor of Ray, and what TorchRL runs there."""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lives
import pytest
import torch
from assembly import Line, batch_of_lines, same_rows
from batches import batch_of
from composed import composed
from faults import CELLS, ELSEWHERE, LONGEST, SILENCE, Carried, Cell, check
from fleets import Fleet, Sent
from rollouts import make_policy
from saving import as_saved
from tensordict import NonTensorStack, TensorDict, TensorDictBase, lazy_stack
from torchrl.data import LazyStackStorage, RayReplayBuffer, SamplerWithoutReplacement

import headrace.pipeline
import headrace.transforms
from headrace.pipeline import (
    RayAssembler,
    RepeatSampler,
    RolloutStream,
    assembled,
    buffer_account,
    groups_on_write,
    informative,
)
from headrace.pipeline.reverse import ReverseEnv
from headrace.transforms import (
    BatchError,
    CompletenessGate,
    GroupAssembler,
    MissingKeyError,
    StalledError,
)

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
from torchrl.collectors.distributed import RayCollector  # noqa: E402  # which needs it

pytestmark = [pytest.mark.torchrl, pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("cluster")]

LINES = [Line(g, 2 * g + r, s, s == 1) for g in range(6) for s in (0, 1) for r in (0, 1)]


ACTORS: dict[int, RayAssembler] = {}


def fresh(number: int = 0, *, max_ready: int | None = None, **options: Any) -> RayAssembler:
    """An empty assembler in an actor that tests share, because starting a process takes seconds."""
    if number not in ACTORS:
        ACTORS[number] = RayAssembler()
    begin = ACTORS[number]._actor.__ray_call__
    ray.get(begin.remote(lambda actor: actor.__init__(max_ready, options)))
    ACTORS[number]._local, ACTORS[number]._like = GroupAssembler(**options), None
    return ACTORS[number]


@ray.remote(num_cpus=0, max_retries=0)
def send(assembler: RayAssembler, pieces: Sequence[TensorDict], came: Path | None = None, then: str = "ends"):
    """Put the pieces, note in a file how many rows were accepted, and end, die or hang."""
    rows = 0
    for piece in pieces:
        assembler.put(piece)
        rows += len(piece)
        if came is not None:
            came.write_text(str(rows))
    if then == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    while then == "hangs":
        time.sleep(0.1)


def pieces(which: slice = slice(None), size: int = 1) -> list[TensorDict]:
    rows = batch_of_lines(LINES)[which]
    return [rows[start : start + size] for start in range(0, len(rows), size)]


# -- every fault ------------------------------------------------------------------------------------------


def on_ray(cell: Cell, came: Path) -> Carried:
    """Run a cell of the fault matrix. A cell that is resumed continues in another actor."""
    assembler = fresh(**cell.options)
    count, batches, begun = 0, [], cell.resumed_at or 0
    if begun:
        ray.get(send.remote(assembler, cell.pieces[:begun], came))
        count, state = int(came.read_text()), as_saved(assembler.state_dict())
        assembler = fresh(1, **cell.options)
        assembler.load_state_dict(state)
    came.write_text("0")
    writer = send.remote(assembler, cell.pieces[begun:], came, cell.then)
    error: BaseException | None = None
    while cell.then == "hangs" and int(came.read_text() or 0) < cell.sent:
        time.sleep(0.01)  # until it hangs
    try:
        for batch in assembler.batches([writer], patience=SILENCE if cell.then == "hangs" else LONGEST):
            batches.append(batch)
    except Exception as err:
        error = err
    finally:
        if cell.then == "hangs":
            ray.cancel(writer, force=True)
        ray.wait([writer], timeout=LONGEST)  # its process serves the next writer
    return Carried(batches, assembler.counts, assembler.held, count + int(came.read_text()), error)


# Writers that are killed for good are tested in the fault table.
HERE = [name for name in ELSEWHERE if not name.startswith("killed") or CELLS[name].resumed_at]


@pytest.mark.parametrize("name", HERE)
def test_each_fault_is_counted_or_raised(name, tmp_path):
    check(CELLS[name], on_ray(CELLS[name], tmp_path / "came"))


# -- writers and the trainer ------------------------------------------------------------------------------


def test_a_writer_waits_only_while_complete_groups_are_not_taken():
    assembler = fresh(groups=1, max_ready=1)
    begun = [batch_of_lines([Line(100 + g, 100 + g, 0, False)]) for g in range(20)]
    whole = pieces(size=4)
    for piece in [*begun, whole[0]]:  # twenty incomplete groups and a whole one
        assembler.put(piece, patience=LONGEST)
    with pytest.raises(StalledError, match=r"The trainer has taken no batch for 0.1 s.*24 arrived, 24 held"):
        assembler.put(whole[1], patience=0.1)
    assert (assembler.ready, assembler.held) == (1, 24)
    assert len(assembler.take()) == 4
    assembler.put(whole[1], patience=LONGEST)
    assert (assembler.ready, assembler.pending) == (1, 20)


def test_a_refused_put_raises_the_same_error_at_its_writer():
    assembler, local = fresh(), GroupAssembler()
    rows = batch_of_lines(LINES)
    unset = rows.clone()
    unset["rollout_id"][3] = -1
    for wrong in (rows.exclude(("next", "done")), unset, torch.cat([rows[:4], rows[2:4]])):
        with pytest.raises(BatchError) as expected:
            local.put(wrong)
        with pytest.raises(BatchError) as raised:
            assembler.put(wrong)
        assert type(raised.value) is type(expected.value)
        assert str(raised.value) == str(expected.value)
        if type(raised.value) is not MissingKeyError:  # the writer raises it, before sending
            assert "AssemblerActor.put" in str(raised.value.__cause__)  # Ray says where the error was raised
    assert assembler.held == 0


def test_all_our_errors_pickle_between_processes():
    modules = (headrace.transforms, headrace.pipeline)
    names = {name: getattr(module, name) for module in modules for name in module.__all__}
    errors = [e for e in names.values() if isinstance(e, type) and issubclass(e, Exception)]
    assert {BatchError, MissingKeyError, StalledError} <= set(errors)
    for error in errors:
        again = pickle.loads(pickle.dumps(error("group 7")))
        assert (type(again), str(again)) == (error, "group 7")
    with pytest.raises(BatchError) as refused:
        GroupAssembler(on_failure="raise").put(batch_of_lines([Line(7, 1, 0, True, 3), Line(7, 2, 0, True)]))
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)


def test_versions_capacity_and_announcements_equal_those_of_the_assembler():
    assembler = fresh(groups=2, max_staleness=1, version_key=("next", "policy_version"))
    assert assembler.capacity() == 4
    rows = batch_of_lines([Line(g, 2 * g + r, 0, True) for g in range(3) for r in (0, 1)])
    assembler.announce(rows[:2].select("group_id", "rollout_id", "expected_rollouts"))
    assert (assembler.capacity(), assembler.pending) == (3, 1)
    with pytest.raises(BatchError, match="announced only once"):
        assembler.announce(rows[:2])
    assembler.put(rows.set(("next", "reward"), torch.tensor([0.0, 0, 0, 1, 1, 0])))
    stream = informative(assembler.batches(patience=LONGEST), groups=2)
    assert next(iter(stream))["group_id"].tolist() == [1, 1, 2, 2]  # group 0 does not use capacity
    assert (assembler.emitted, assembler.ready, assembler.capacity(2)) == (3, 0, 2)
    rows["group_id"], rows["rollout_id"] = rows["group_id"] + 10, rows["rollout_id"] + 20
    assembler.put(rows)
    assembler.version += 2
    assert (assembler.version, assembler.take(), assembler.counts["stale"]) == (2, None, 6)


def test_a_stall_is_raised_at_the_writer_and_at_the_trainer():
    assembler = fresh(max_idle=3)
    begun = [batch_of_lines([Line(90 + g, 90 + g, 0, False)]) for g in range(3)]
    for piece in begun[:2]:
        assembler.put(piece)
    with pytest.raises(StalledError, match="the last 3 puts have made no group whole"):
        assembler.put(begun[2])
    with pytest.raises(StalledError, match="the last 3 puts have made no group whole"):
        next(assembler.batches(patience=LONGEST))
    assembler.put(pieces(size=4)[0])
    assert next(assembler.batches())["number"].tolist() == [0, 2, 1, 3]


def test_a_view_is_sent_without_the_rest_of_its_batch(monkeypatch):
    sent, assembler = [], fresh()
    assembler.put(None)
    for method in ("_ask", "_keep"):
        monkeypatch.setattr(
            RayAssembler, method, lambda self, *args: sent.append(ray.cloudpickle.dumps(args)) or "sent"
        )
    batch = batch_of_lines([Line(g, g, 0, True) for g in range(2000)]).exclude("text")
    assembler.put(batch[5:6])
    assembler.announce(batch[5:6])
    assert all(len(bytes_) < 10_000 < batch.bytes() for bytes_ in sent)


@ray.remote(num_cpus=0, max_retries=0)
def generate(assembler: RayAssembler, draws: TensorDict, version: int) -> None:
    """One row for each rollout; groups with an even id have equal rewards."""
    rows = draws.clone()
    rows["next", "done"] = torch.ones(len(rows), dtype=torch.bool)
    rows["next", "reward"] = (rows["rollout_id"] * (rows["group_id"] % 2) % 2).double()
    rows["next", "policy_version"] = torch.full((len(rows),), version)
    for row in rows.split(1):
        assembler.put(row)


def test_a_stream_trains_each_group_of_tasks_once():
    sampler = RepeatSampler(12, group_size=2, prompts_per_batch=3)
    options = {"epochs": 2, "informative": True, "max_staleness": 4, "patience": LONGEST}
    stream, trained = RolloutStream(sampler, assembler=RayAssembler, **options), []

    def dispatch():
        for draws in stream.draws(wait=True):
            stream.watch(generate.remote(stream.assembler, draws, stream.version))

    thread = threading.Thread(target=dispatch)
    thread.start()
    for batch in stream:
        trained += batch["group_id"].unique().tolist()
        stream.version += 1
    thread.join(LONGEST)
    stream.assembler.shutdown()
    assert sorted(trained) == list(range(1, 24, 2))
    assert stream._filter.counts == {"uninformative": 24}


# -- rows stay where they are -----------------------------------------------------------------------------


def ragged(rows: TensorDict, tokens: int = 8) -> TensorDictBase:
    """The same rows in a lazy stack. Each gets 1 to `tokens` tokens, which follow from the row's number."""
    singles = [row.clone() for row in rows.unbind(0)]
    for row in singles:
        count = int(row["number"]) % tokens + 1
        row["tokens", "full"] = torch.arange(count) + int(row["number"])
        row["masks", "all_assistant_mask"] = torch.ones(count, dtype=torch.bool)
    return lazy_stack(singles)


@pytest.mark.parametrize(("seed", "kind"), [(0, "dense"), (1, "ragged"), (2, "labels")])
def test_rows_left_in_the_store_equal_those_sent_through_one_process(seed, kind):
    draw = random.Random(seed)
    versions = {"max_staleness": 1, "on_stale": "mask", "version_key": ("next", "policy_version")}
    options = {"groups": 2, "segment_key": "segment", **(versions if seed else {})}
    lines = [
        Line(g, 2 * g + r, s, s == 1, version=draw.randrange(2))
        for g in range(40)
        for r in (0, 1)
        for s in (0, 1)
    ]
    draw.shuffle(lines)
    rows = batch_of_lines(lines)
    if kind == "labels":
        rows["group_id"] = NonTensorStack(*(f"task {line.group}" for line in lines))
    rows = rows if kind == "dense" else ragged(rows)
    local, assembler, start = GroupAssembler(**options), fresh(**options), 0
    for each in (local, assembler):
        each.version = 1 if seed < 2 else 2
    while start < len(rows):
        size = draw.choice([1, 3, 20, 60])
        for each in (local, assembler):
            each.put(rows[start : start + size])
        while (expected := local.take()) is not None:
            taken = assembler.take()
            assert type(taken) is type(expected)
            same_rows(taken, expected)
        start += size
    assert assembler.take_rest() is None
    assert (assembler.counts, assembler.emitted) == (local.counts, local.emitted) == (local.counts, 40)


def sent_bytes(thing: Any) -> int:
    """The size of a message to an actor, as Ray serializes it."""
    return ray._private.worker.global_worker.get_serialization_context().serialize(thing).total_bytes


def test_at_most_200_bytes_per_row_go_through_the_assembler(monkeypatch):
    assembler, sent, ask, keep = fresh(), [], RayAssembler._ask, RayAssembler._keep

    def asked(self, *args):
        sent.append(sent_bytes((args, found := ask(self, *args))))
        return found

    def kept(self, method, packed, *args):
        sent.append(sent_bytes(([ray.put(part) for part in packed], args)))
        return keep(self, method, packed, *args)

    monkeypatch.setattr(RayAssembler, "_ask", asked)
    monkeypatch.setattr(RayAssembler, "_keep", kept)
    fleet = Fleet(1, 1, 4, 999)
    rows = fleet.batch([Sent(n // 4, n, s, s == 1, 0, 0) for n in range(512) for s in (0, 1)])
    rows["tokens", "full"] = torch.zeros(len(rows), 4096, dtype=torch.int64)
    for piece in rows.split(128):
        assembler.put(piece)
    assert len(assembler.take()) == len(rows)
    assert sum(sent) / len(rows) < 200


def test_rows_of_a_dead_writer_are_trained():
    """The loss of a writer raises an error, unless `on_lost` lets the others continue."""
    assembler, begun = fresh(), [batch_of_lines([Line(90, 90, 0, False)])]
    dead = send.remote(assembler, [*map(ragged, pieces(slice(0, None, 2)) + begun)], then="dies")
    ended = send.remote(assembler, [*map(ragged, pieces(slice(1, None, 2)))])
    batches = assembler.batches([ended, dead], patience=LONGEST, on_lost="go_on")
    found = torch.cat([batch["number"] for batch in batches])
    assert found.sort().values.tolist() == list(range(len(LINES)))
    assert assembler.counts["unfinished"] == 1
    with pytest.raises(StalledError, match="1 of 1 writers lost"):
        list(fresh().batches([dead], on_lost="go_on"))


def references(actor: Any = None) -> int:
    """The number of references to stored rows in a process."""

    def count(_: Any) -> int:
        known = ray._private.worker.global_worker.core_worker.get_all_reference_counts()
        return sum(int(each["local"]) > 0 for each in known.values())

    return count(None) if actor is None else ray.get(actor.__ray_call__.remote(count))


def test_no_reference_remains_to_groups_taken():
    assembler = fresh()
    assembler.put(None)
    assembler.put(pieces(size=4)[0])
    assert len(assembler.take()) == 4
    before = [references(actor) for actor in (None, assembler._actor, assembler._store)]
    for batch in range(6):
        for piece in pieces(size=4):
            for key, ids in (("group_id", 6), ("rollout_id", 12)):
                piece[key] += ids * (batch + 1)
            assembler.put(piece)
        assembler.take()
    end = time.monotonic() + LONGEST
    while True:
        gc.collect()
        now = [references(actor) for actor in (None, assembler._actor, assembler._store)]
        if all(found <= most + 2 for found, most in zip(now, before, strict=True)):
            break
        assert time.monotonic() < end, (before, now)


def test_a_missing_extra_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"RayAssembler needs ray: pip install 'headrace\[ray\]'"):
        RayAssembler()


# -- what TorchRL runs on Ray -----------------------------------------------------------------------------


def test_a_ray_collector_is_a_valid_source():
    """Each batch is from one worker, and ends in the middle of rollouts. This test has one worker."""

    def make() -> ReverseEnv:
        sampler = RepeatSampler(1110, group_size=4, prompts_per_batch=4, remainder="drop")
        return ReverseEnv(sampler, revised=0.5)

    frames = make().frames_per_batch // 2  # one of the two turns of each slot
    collector = RayCollector(
        [make],
        make_policy(),
        frames_per_batch=frames,
        total_frames=8 * frames,
        sync=False,
        remote_configs={"num_cpus": 1},
        collector_kwargs={"auto_register_policy_transforms": False},
    )
    collector.update_policy_weights_()
    assembler = GroupAssembler(groups=2)
    try:
        batches = list(assembled(collector, assembler, patience=LONGEST))
    finally:
        collector.shutdown(shutdown_ray=False)
    rows = sum(map(len, batches))
    assert (rows + assembler.counts["unfinished"], assembler.held) == (8 * frames, 0)
    assert rows >= 4 * frames
    found = torch.cat([CompletenessGate()(batch)["group_id"].flatten() for batch in batches])
    assert len(found.unique()) == sum(len(batch["group_id"].unique()) for batch in batches)


def collected() -> TensorDict:
    """Four groups of four rollouts, each of one row."""
    ids = torch.arange(16)
    return batch_of((ids % 3).float().tolist(), (ids // 4).tolist(), ids.tolist())


def test_errors_of_writers_and_counts_of_the_actor_reach_the_trainer():
    factory = partial(groups_on_write, "grpo", assembler={"group_size": 4, "done_key": None})

    def make() -> RayReplayBuffer:
        return RayReplayBuffer(
            storage=partial(LazyStackStorage, 64),
            sampler=SamplerWithoutReplacement,
            batch_size=6,
            remote_config={"num_cpus": 0},
            transform_factory=factory,
        )

    buffer = make()
    buffer.extend(collected()[:14])
    account = buffer_account(buffer)
    assert (account.held, account.emitted, account.counts["lost"]) == (2, 3, 0)
    assert account.metrics["groups/trained"] == 3
    assert account.ledger.counts()["trained"] == 12
    with pytest.raises(Exception, match=r"end only once.*found again rollout 0"):
        buffer.extend(collected()[:1])  # another writer sends rows with equal ids
    with pytest.raises(
        Exception, match=r"refused when they were written into the buffer.*found again rollout 0"
    ):
        buffer.sample()
    _, second = composed("pipeline=grpo", "pipeline.stages.gate.group_size=4").halves()
    (step,) = second.minibatches(buffer.sample().contiguous())
    weights = step["loss_weight"][:, None] * step["masks", "all_assistant_mask"]
    assert float(weights.sum()) == pytest.approx(1.0)
    again = make()
    again.load_state_dict(buffer.state_dict())
    again.extend(collected()[14:])
    assert (len(again), buffer_account(again).held) == (16, 0)
    for each in (buffer, again):
        each.close()


def test_the_example_trains_on_the_rollouts_of_tasks():
    rewards = importlib.import_module("ray_grpo").main(steps=2)
    assert len(rewards) == 2
    assert all(0 < reward < 1 for reward in rewards)


def test_ranks_that_take_from_one_assembler_train_as_one_process():
    example = importlib.import_module("ray_ranks_grpo")
    ranks = example.main(batches=4)
    pipeline, seen = composed("pipeline=grpo", "pipeline.stages.collapse.reward=sum"), []
    for parts in zip(*(trained for trained, _ in ranks), strict=True):  # all ranks take equally many steps
        parts = [part for part in parts if len(part)]
        seen += [group for part in parts for group in part["group_id"].unique().tolist()]
        together = torch.cat(parts)
        one = pipeline.run(together.exclude("advantage", "loss_weight", "headrace")).batch
        assert len(one) == len(together)
        for key in ("advantage", "loss_weight"):
            assert torch.equal(one[key], together[key][one["headrace", "row"]])  # bit by bit
    assert sorted(seen) == sorted(set(seen))  # each group is trained once, on one rank
    assert len(seen) == 4 * example.PROMPTS  # by both writers together
    for name, weight in ranks[0][1].items():
        assert torch.equal(weight, ranks[1][1][name])


@pytest.mark.llm
def test_torchrls_recipe_on_ray_trains_with_only_the_marked_lines():
    pytest.importorskip("transformers", reason="the extra `llm` is not installed")
    example = importlib.import_module("torchrl_ray_grpo")
    lines = Path(example.__file__).read_text().splitlines()
    names = ("StampIds", "buffer_account", "groups_on_write")
    assert all(line.endswith("# headrace") for line in lines if any(name in line for name in names))
    assert sum(line.endswith("# headrace") for line in lines) <= 7
    steps = list(example.train(steps=3, num_envs=8, batch_size=16))
    assert all(0 <= reward <= 1 for reward, _, _ in steps)
    account = steps[-1][2]
    assert (account.error, account.counts["lost"]) == (None, 0)
    assert account.emitted >= 2
    assert account.metrics["groups/in"] >= 1


# -- a journal without rows -------------------------------------------------------------------------------


def test_each_group_is_once_in_the_saved_weights_after_a_kill_of_the_actor(tmp_path):
    """The actor and all its rows are gone, and the trainer restarts. test_ray_actor.py tries more kills."""
    made: list[RayAssembler] = []

    def make(**options: Any) -> RayAssembler:
        for old in made:
            old.shutdown()
        made.append(RayAssembler(max_ready=10**6, **options))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lives, "EPOCHS", 1)
        disk = lives.killed(tmp_path, [90, 40], 2, every=2, make=make)
    made[-1].shutdown()
    assert len(made) == 3
    assert sorted(disk.weights["trained"]) == list(range(lives.PROMPTS))


def test_a_new_actor_refuses_the_journal_of_another_assembler(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the actor runs in another folder
    first = RayAssembler(groups=1, journal="run")
    first.commit(3)
    first.shutdown()
    with pytest.raises(ValueError, match="written with other options: groups is 1 in the file and 2 here"):
        RayAssembler(groups=2, journal="run")
    GroupAssembler(groups=1, journal="local")
    with pytest.raises(ValueError, match="rows is None in the file and 'none' here"):
        RayAssembler(groups=1, journal="local")
    again = RayAssembler(groups=1, journal="run")
    assert (again.committed, again.restored) == (3, True)
    again.shutdown()
