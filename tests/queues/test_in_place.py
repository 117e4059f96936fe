"""Rollouts that verl v1 and NeMo RL keep in TransferQueue are read, decided and passed on in place."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from composed import composed
from queue_here import QueueHere
from tensordict import NonTensorStack, TensorDict

from headrace.pipeline import GroupReplayBuffer, QueuedGroups, assembled
from headrace.pipeline.queues import in_place
from headrace.transforms import BatchError, GroupAssembler

transfer_queue = QueueHere()


@pytest.fixture(autouse=True)
def here(monkeypatch) -> Iterator[None]:
    """Use a queue of this process, which is empty at the beginning of each test."""
    monkeypatch.setattr(in_place, "tq", lambda: transfer_queue)
    yield
    vars(transfer_queue).update(vars(QueueHere()))


def keys_in(partition: str) -> set[str]:
    return set(transfer_queue.kv_list(partition).get(partition, {}))


# -- verl v1, as AgentLoopWorkerTQ._run_prompt and _agent_loop_postprocess write (1dda039b) ------------------


def submit(uid: str, step: int = 1, partition: str = "train") -> None:
    """Register a prompt, and mark it as running."""
    tag = {"is_prompt": True, "status": "pending", "global_steps": step}
    transfer_queue.kv_batch_put([uid], partition, tags=[tag])
    transfer_queue.kv_batch_put([uid], partition, tags=[tag | {"status": "running"}])


def run_session(
    uid: str, session: int, reward: float | None, *, outputs: int = 1, step: int = 1, partition: str = "train"
) -> None:
    """Write the outputs of one agent loop, each with the reward on its last token."""
    keys = [f"{uid}_{session}_{index}" for index in range(outputs)]
    sizes = [3 + index + session for index in range(outputs)]
    fields: dict[str, Any] = {
        name: torch.nested.as_nested_tensor([torch.arange(size) for size in sizes], layout=torch.jagged)
        for name in ("prompts", "responses", "response_mask", "loss_mask", "input_ids", "position_ids")
    }
    if reward is not None:
        scores = [torch.zeros(size).index_fill_(0, torch.tensor(size - 1), reward) for size in sizes]
        fields["rm_scores"] = torch.nested.as_nested_tensor(scores, layout=torch.jagged)
    fields["uid"] = NonTensorStack(*[uid] * outputs)
    fields["session_id"] = torch.full((outputs,), session)
    tag = {"status": "success", "global_steps": step}
    tags = [tag | {"prompt_len": size, "response_len": size, "seq_len": 2 * size} for size in sizes]
    transfer_queue.kv_batch_put(keys, partition, fields=TensorDict(fields, batch_size=[outputs]), tags=tags)


def finish(uid: str, step: int = 1, *, status: str = "finished", partition: str = "train") -> None:
    tag = {"is_prompt": True, "status": status, "global_steps": step}
    transfer_queue.kv_batch_put([uid], partition, tags=[tag])


def group(
    uid: str, rewards: Sequence[float | None], *, outputs: int = 1, step: int = 1, partition: str = "train"
) -> None:
    """Write a finished group. A reward of None is a failed session."""
    submit(uid, step, partition)
    for session, reward in enumerate(rewards):
        if reward is not None:
            run_session(uid, session, reward, outputs=outputs, step=step, partition=partition)
    finish(uid, step, status="failure" if None in rewards else "finished", partition=partition)


def test_groups_of_verl_are_decided_in_place():
    group("a-1", [0.0, 1.0], outputs=2)
    group("b_2", [3.0, 5.0, 7.0])
    submit("c")
    run_session("c", 0, 1.0)
    source, assembler = QueuedGroups.of("verl"), GroupAssembler(segment_key="segment")
    assembler.put(source.read())
    batch = assembler.take()
    keys = ["a-1_0_0", "a-1_0_1", "a-1_1_0", "a-1_1_1", "b_2_0_0", "b_2_1_0", "b_2_2_0"]
    assert source.keys_of(batch) == keys
    assert batch["next", "reward"].tolist() == [0, 0, 1, 1, 3, 5, 7]
    advantage = composed("pipeline=dr_grpo").halves()[0](batch)["advantage"].flatten()
    assert advantage.tolist() == [-0.5, -0.5, 0.5, 0.5, -2, 0, 2]
    assert source.read() is None
    finish("c")
    assert source.keys_of(source.read()) == ["c_0_0"]


def build(sampler_kwargs: dict[str, Any], **options: Any) -> Any:
    """Build a sampler as PPOTrainer._build_replay_buffer does, with the same arguments (1dda039b)."""
    module = importlib.import_module("headrace.pipeline.queues.in_place")  # pkg://… by load_extern_type
    given: dict[str, Any] = {
        "trainer_mode": "separate_async",
        "trainer_config": {},
        "max_off_policy_threshold": 8,
        "max_off_policy_strategy": "drop",
        "refill_fn": None,
    }
    given |= options
    made = module.GroupReplayBuffer(sampler_kwargs=sampler_kwargs, **{"poll_interval": 0.001} | given)
    return made


def test_verl_samples_complete_groups_and_requests_failed_ones_again():
    asked: list[int] = []

    def refill(prompts: int) -> int:
        asked.append(prompts)
        for number in range(prompts):
            group(f"new-{len(asked)}-{number}", [1.0, 0.0, 1.0])
        return prompts

    group("whole", [1.0, 2.0, 3.0], outputs=2)
    group("torn", [1.0, None, 3.0])
    group("void", [None, None, None])
    submit("slow")
    run_session("slow", 0, 1.0)
    buffer = build({"group_size": 3}, refill_fn=refill)
    meta, metrics = buffer.sample(global_steps=1, partition_id="train", batch_size=3)
    assert isinstance(meta, transfer_queue.KVBatchMeta)
    assert meta.partition_id == "train"
    assert meta.keys[:6] == [f"whole_{session}_{index}" for session in range(3) for index in range(2)]
    assert meta.keys[6:] == [f"new-1-{number}_{session}_0" for number in (0, 1) for session in range(3)]
    assert [tag["seq_len"] for tag in meta.tags[:2]] == [6, 8]
    assert (asked, metrics) == ([2], {"training/rollout_failure/evicted_samples": 2})
    assert keys_in("train") == {*meta.keys, "slow", "slow_0_0"}  # the taken prompts and the slow prompt
    scores = transfer_queue.kv_batch_get(meta.keys, meta.partition_id, select_fields=["rm_scores"])
    assert len(scores) == 12


def test_verl_samples_the_groups_that_assembler_and_recipe_keep():
    group("torn", [1.0, None, 3.0])
    group("same", [2.0, 2.0, 2.0])
    group("whole", [1.0, 2.0, 3.0])
    options = {"group_size": 3, "on_failure": "keep", "min_rollouts": 2, "recipe": ["pipeline=grpo"]}
    meta, metrics = build(options).sample(global_steps=1, partition_id="train", batch_size=3)
    assert meta.keys == ["torn_0_0", "torn_2_0", "whole_0_0", "whole_1_0", "whole_2_0"]
    assert metrics == {"training/filter_groups/evicted_samples": 1}
    assert keys_in("train") == set(meta.keys)


def test_verl_drops_stale_groups_or_waits():
    group("old", [1.0, 2.0], step=1)
    group("new", [1.0, 2.0], step=4)
    submit("due", step=3)
    meta, metrics = build({"group_size": 2}, max_off_policy_threshold=2).sample(4, "train", 2)
    assert meta.keys == ["new_0_0", "new_1_0"]
    assert metrics == {"training/rollout_failure/evicted_samples": 1}
    group("newer", [1.0, 2.0], step=4)
    group("newest", [1.0, 2.0], step=4)
    given = {"max_off_policy_threshold": 2, "max_off_policy_strategy": "wait", "refill_fn": len}
    buffer, looks = build({"group_size": 2}, **given), []

    def look(read=QueuedGroups.read):
        looks.append(None)
        if len(looks) == 3:
            group("due", [1.0, 2.0], step=3)
        return read(buffer.partitions["train"][0])

    buffer._partition("train", 2)[0].read = look
    meta, _ = buffer.sample(4, "train", 2)
    assert meta.keys[:2] == ["due_0_0", "due_1_0"]
    assert {key.split("_")[0] for key in meta.keys[2:]} < {"newer", "newest"}


def test_verl_validates_on_every_finished_group():
    group("v1", [1.0, None], partition="val")
    group("v2", [None, None], partition="val")
    group("v3", [1.0, 2.0], partition="val")
    meta, metrics = build({"group_size": 2}).sample(global_steps=7, partition_id="val", batch_size=3)
    assert meta.keys == ["v1_0_0", "v3_0_0", "v3_1_0"]
    assert metrics == {"validation/rollout_failure/evicted_samples": 1}


def test_rows_of_verl_without_a_reward_are_refused():
    submit("a")
    run_session("a", 0, None)
    finish("a")
    with pytest.raises(BatchError, match=r"needs the field 'rm_scores' \(reward\); some of a_0_0 lack it"):
        QueuedGroups.of("verl").read()


WAITS = {"max_off_policy_strategy": "wait", "max_off_policy_threshold": 2, "refill_fn": len}
COUNTED = (
    "max_off_policy_strategy=wait needs group_size in sampler_kwargs (verl's rollout.n), because groups are "
    "counted before their rollouts finish, and a refill_fn, which replaces groups that fail; set them, or "
    "max_off_policy_strategy=drop"
)
AHEAD = (
    "max_off_policy_strategy=wait needs num_warmup_batches < max_off_policy_threshold, or groups are too old "
    "before they are trained; got {} batches, and groups may be 1 steps old. Set "
    "trainer.v1.sampler.max_off_policy_threshold to more"
)
PROMPTS = (
    "announce_to needs prompt and version, the tags of a group that is not whole yet, and group_size; got "
    "{}. A queue without such prompts (NeMo RL's) shows a group only when it is whole: call "
    "assembler.announce() where you dispatch, or set on_stale='drop', 'mask' or 'refill'"
)


def warm(batches: float) -> dict[str, Any]:
    return WAITS | {"trainer_config": {"num_warmup_batches": batches}}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: build({}, **WAITS), COUNTED),
        (lambda: build({"group_size": 2}, **WAITS | {"refill_fn": None}), COUNTED),
        (lambda: build({"group_size": 2}, **warm(1.5)), AHEAD.format(2)),
        (
            lambda: build({"group_size": 2}, max_off_policy_threshold=0),
            "max_off_policy_threshold must be an integer ≥ 1; got 0",
        ),
        (
            lambda: build({}, max_off_policy_strategy="keep"),
            "max_off_policy_strategy must be one of 'drop', 'wait'; got 'keep'",
        ),
        (lambda: build({}, poll_interval=0), "poll_interval must be finite and > 0; got 0"),
        (
            lambda: QueuedGroups.of("vrl"),
            "framework must be one of nemo_rl, verl (conf/queue); got 'vrl'",
        ),
        (
            lambda: QueuedGroups("train", key="(?P<group>a)", reward="r"),
            "key needs the groups (?P<group>…) and (?P<rollout>…); got '(?P<group>a)'",
        ),
        (lambda: QueuedGroups.of("verl", group_size=0), "group_size must be an integer ≥ 1; got 0"),
        (lambda: QueuedGroups.of("verl", reward=5), "reward must be a string; got 5"),
        (
            lambda: QueuedGroups.of("verl", announce_to=GroupAssembler()),
            PROMPTS.format("'is_prompt', 'global_steps' and None"),
        ),
        (
            lambda: QueuedGroups.of("nemo_rl", group_size=2, announce_to=GroupAssembler()),
            PROMPTS.format("None, 'weight_version' and 2"),
        ),
    ],
)
def test_an_invalid_option_raises_before_the_first_step(make, message):
    with pytest.raises(ValueError, match=r"needs|must") as caught:
        make()
    assert str(caught.value) == message


def test_valid_options_at_their_ends_are_taken():
    assert build({"group_size": 2}, **warm(1)).ahead == 1
    assert build({"group_size": 2}, max_off_policy_threshold=1).options["max_staleness"] == 0
    assert build({}).options == {"segment_key": "segment", "max_staleness": 7, "on_stale": "drop"}
    assert isinstance(build({}), GroupReplayBuffer)
    with pytest.raises(TypeError, match="on_failures"):
        build({"on_failures": "keep"})


def test_rows_have_ids_ends_and_versions_of_their_keys():
    """Group a has two outputs in session 0 and one in session 2. Group b failed without a row."""
    submit("a", step=3)
    run_session("a", 0, 1.0, outputs=2, step=3)
    run_session("a", 2, 4.0, step=4)
    finish("a", step=3)
    group("b", [None, None], step=5)
    source = QueuedGroups.of("verl", group_size=3)
    rows = source.read()
    a, b = (int(rows["group_id"][at]) for at in (0, -1))
    assert rows["group_id"].tolist() == [a] * 4 + [b] * 3
    low = rows["rollout_id"] % 2**16
    assert low.tolist() == [0, 0, 1, 2, 0, 1, 2]
    assert (rows["rollout_id"] - low).tolist() == [each >> 16 << 16 for each in rows["group_id"].tolist()]
    assert rows["segment"].tolist() == [0, 1, 0, 0, 0, 0, 0]
    assert rows["next", "done"].tolist() == [False, True, True, True, True, True, True]
    assert rows["next", "status"].tolist() == [0, 0, 3, 0, 3, 3, 3]
    assert rows["next", "policy_version"].tolist() == [3, 3, 3, 4, 5, 5, 5]
    assert rows["expected_rollouts"].tolist() == [3] * 7
    assert rows["next", "reward"].nan_to_num(-1).tolist() == [1, 1, -1, 4, -1, -1, -1]
    assert source.keys_of(rows) == ["a_0_0", "a_0_1", "a_2_0"]
    assert source.keys_of(rows[[3, 2, 0]]) == ["a_2_0", "a_0_0"]
    source.clear([a], rows=False)
    assert keys_in("train") == {"b", "a_0_0", "a_0_1", "a_2_0"}
    source.clear([b])
    assert keys_in("train") == {"a_0_0", "a_0_1", "a_2_0"}
    assert source.read() is None
    assert (source.keys, source.groups) == ({}, {})


def test_a_group_with_enough_rollouts_of_other_numbers_lacks_none():
    submit("a")
    for session in (3, 1):
        run_session("a", session, 1.0)
    finish("a")
    rows = QueuedGroups.of("verl", group_size=2).read()
    assert (rows["rollout_id"] % 2**16).tolist() == [1, 3]
    assert rows["next", "status"].tolist() == [0, 0]


def test_a_prompt_that_ends_without_rows_is_a_failed_rollout():
    """It has `group_size` failed rollouts, or one if no size is known."""
    group("a", [None])
    for size in (None, 1, 3):
        rows = QueuedGroups.of("verl", group_size=size).read()
        assert rows["next", "status"].tolist() == [3] * (size or 1)
        assert rows["expected_rollouts"].tolist() == [size or 1] * (size or 1)


def test_a_group_that_others_delete_is_forgotten():
    group("a", [1.0, 2.0])
    group("b", [3.0])
    source = QueuedGroups.of("verl")
    (a, b) = dict.fromkeys(source.read()["group_id"].tolist())
    transfer_queue.kv_clear(["a", "a_0_0", "a_1_0"], "train")
    assert source.read() is None
    assert (source.keys, source.groups) == ({2: "b_0_0"}, {b: ("b", range(2, 3))})
    group("a", [4.0])
    assert source.keys_of(source.read()) == ["a_0_0"]
    assert source.groups == {b: ("b", range(2, 3)), a: ("a", range(3, 4))}


def test_more_groups_may_fail_than_a_batch_has():
    """Without `refill_fn` they are not replaced."""
    for uid in ("a", "b", "c"):
        group(uid, [1.0, None])
    meta, metrics = build({"group_size": 2}).sample(1, "train", 2)
    assert (meta.keys, metrics) == ([], {"training/rollout_failure/evicted_samples": 3})


# -- NeMo RL, as TQReplayBuffer.commit writes by pack_payload (7ea279ab) -------------------------------------


def commit(uid: str, rewards: Sequence[float], version: int = 0) -> None:
    """Write one prompt group with all its completions at once."""
    count, sizes = len(rewards), [4 + number for number in range(len(rewards))]
    fields: dict[str, Any] = {
        name: torch.nested.as_nested_tensor([torch.ones(size) for size in sizes], layout=torch.jagged)
        for name in ("input_ids", "generation_logprobs", "token_mask")
    }
    fields |= {"input_lengths": torch.tensor(sizes), "sample_mask": torch.ones(count)}
    fields |= {"total_reward": torch.tensor(rewards), "prompt_ids_for_adv": torch.ones(count, 3)}
    transfer_queue.kv_batch_put(
        [f"{uid}_g{number}" for number in range(count)],
        "rollout_data",
        fields=TensorDict(fields, batch_size=[count]),
        tags=[{"weight_version": version}] * count,
    )


def test_groups_of_nemo_rl_are_decided_in_place():
    commit("6f2a", [0.0, 1.0], version=3)
    commit("77_g0", [5.0, 5.0, 5.0], version=4)
    source = QueuedGroups.of("nemo_rl")
    assembler = GroupAssembler(max_staleness=4, groups=2, segment_key="segment")  # each rollout has one row
    assembler.version = 4
    batch = next(iter(assembled((rows for rows in source if rows is not None), assembler)))
    assert source.keys_of(batch) == ["6f2a_g0", "6f2a_g1", "77_g0_g0", "77_g0_g1", "77_g0_g2"]
    assert batch["next", "policy_version"].tolist() == [3, 3, 4, 4, 4]
    pipeline = composed("pipeline=grpo").halves()[0]
    assert pipeline(batch)["headrace", "in_loss"].tolist() == [True, True, False, False, False]
    assert pipeline.metrics["out/filter/zero_variance"] == 3
    commit("8", [1.0], version=9)
    assert source.keys_of(source.read()) == ["8_g0"]
    source.clear([int(batch["group_id"][0])])
    assert keys_in("rollout_data") == {"77_g0_g0", "77_g0_g1", "77_g0_g2", "8_g0"}
