"""Read the rollouts of other frameworks in TransferQueue, and select groups without moving their rows."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from math import ceil
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from headrace.pipeline.collect import POLL
from headrace.pipeline.load import load_pipeline
from headrace.transforms import BatchError, GroupAssembler
from headrace.transforms.table import as_ids, listing
from headrace.transforms.table.options import above_zero, at_least, takes_options
from headrace.transforms.table.schema import DONE, Status
from headrace.transforms.table.tensordicts import ELSEWHERE, column_of

from .queues import tq

BITS = 16  # low bits of a rollout id; they hold the rollout's number in its group
MISSING = -1  # the row number of a rollout without rows


@takes_options
class QueuedGroups:
    """Groups that another framework stores in a partition of TransferQueue, as a source like a collector.

    It yields the ids, rewards, ends and policy versions of rows, for groups whose rollouts have finished.
    Tokens and rows stay in the queue; :meth:`keys_of` returns their keys. A missing rollout of a group
    becomes a row with status FAILED and without a key.

    ::

        source = QueuedGroups.of("verl", group_size=8)          # conf/queue/verl.yaml, or nemo_rl
        assembler = GroupAssembler(segment_key="segment", on_failure="keep", min_rollouts=2)
        for batch in assembled(source, assembler):
            run = pipeline.run(batch)
            keys = source.keys_of(batch)

    To wait for old groups instead of dropping them, give the assembler as `announce_to`. Then the assembler
    knows a group as soon as its prompt is in the queue. If another process deletes a prompt before its
    rollouts have finished, the rollouts of the group count as failed.

    Args:
        partition: the name of the partition.
        key: a regular expression for the keys of rows. It needs the named groups ``group``; ``rollout``, the
            number of the rollout in its group; and ``segment`` if rollouts have several rows. Samples with
            other keys are ignored.
        reward: the field with the reward of a row: one number, or one per token, which are added up.
        version: the tag with the policy version; None: rows have no version.
        prompt: the tag that marks prompts. A prompt has the key of its group, and its tag ``status`` is the
            status of the group. None: all rows of a group are put at once.
        over: the statuses of groups whose rollouts have finished.
        group_size: rollouts of a group; None: as many as have rows.
        announce_to: the assembler, if it has ``on_stale="wait"``. Needs `prompt`, `version` and `group_size`.

    Raises:
        ImportError: the extra `tq` is not installed.
        ValueError: an option has an invalid value, or needs another option.
    """

    def __init__(
        self,
        partition: str,
        *,
        key: str,
        reward: str,
        version: str | None = None,
        prompt: str | None = None,
        over: Sequence[str] = (),
        group_size: int | None = None,
        announce_to: Any = None,
    ):
        tq()
        self.partition, self.key, self.reward, self.version = partition, re.compile(key), reward, version
        if not {"group", "rollout"} <= self.key.groupindex.keys():
            raise ValueError(f"key needs the groups (?P<group>…) and (?P<rollout>…); got {key!r}")
        self.prompt, self.over = prompt, tuple(over)
        self.group_size = at_least("group_size", group_size, 1)
        if announce_to is not None and None in (prompt, version, group_size):
            raise ValueError(
                "announce_to needs prompt and version, the tags of a group that is not whole yet, and "
                f"group_size; got {prompt!r}, {version!r} and {group_size}. A queue without such prompts "
                "(NeMo RL's) shows a group only when it is whole: call assembler.announce() where you "
                "dispatch, or set on_stale='drop', 'mask' or 'refill'"
            )
        self.announce_to = announce_to
        self.keys: dict[int, str] = {}
        """Keys of the rows that were read and whose groups are still in the queue, by row number."""
        self.unread: dict[str, int] = {}
        """Announced prompts whose groups were not read, with their versions."""
        self.groups: dict[int, tuple[str, range]] = {}
        """Name and row numbers of the groups that were read and are still in the queue, by id."""
        self._places = 0

    @classmethod
    def of(cls, framework: str, **changes: Any) -> QueuedGroups:
        """Read the groups of a framework, with the options of its file in ``conf/queue``.

        Args:
            framework: ``verl`` or ``nemo_rl``.
            changes: options that replace options of the file.

        Raises:
            ValueError: there is no such file.
        """
        folder = resources.files("headrace.conf") / "queue"
        known = sorted(each.name.removesuffix(".yaml") for each in folder.iterdir())
        if framework not in known:
            raise ValueError(f"framework must be one of {', '.join(known)} (conf/queue); got {framework!r}")
        from omegaconf import OmegaConf

        options: Any = OmegaConf.to_container(OmegaConf.create((folder / f"{framework}.yaml").read_text()))
        return cls(**{**options, **changes})

    def __iter__(self) -> Iterator[TensorDictBase | None]:
        """Yield new groups, or None after a short wait without new groups. Never ends."""
        while True:
            rows = self.read()
            if rows is None:
                time.sleep(POLL)
            yield rows

    def read(self) -> TensorDict | None:
        """The rows of groups that finished since the last read, TensorDict ``[N]``; None without such groups.

        Raises:
            BatchError: a row has no reward.
        """
        tags = tq().kv_list(self.partition).get(self.partition, {})
        found: dict[str, dict[int, list[tuple[int, str]]]] = defaultdict(lambda: defaultdict(list))
        ended: dict[str, int] = {}
        waiting: dict[str, int] = {}
        for key, tag in tags.items():
            if self.prompt is not None and tag.get(self.prompt):
                where = ended if tag.get("status") in self.over else waiting
                where[key] = int(tag.get(self.version, 0))
            elif tag and (match := self.key.fullmatch(key)) is not None:  # without a tag, data may be missing
                segment = int(match["segment"]) if "segment" in self.key.groupindex else 0
                found[match["group"]][int(match["rollout"])].append((segment, key))
        if self.announce_to is not None:
            self._announce(waiting | ended)
            ended |= {name: version for name, version in self.unread.items() if name not in waiting}
            self.unread = waiting
        names = list(found if self.prompt is None else ended)
        numbers = dict(zip(names, as_ids(names, "group").tolist(), strict=True)) if names else {}
        for number in self.groups.keys() - set(numbers.values()):
            self._forget(number)
        lines: list[tuple[Any, ...]] = []
        for name, number in numbers.items():
            if number in self.groups:
                continue
            rollouts, begin = found[name], self._places
            size = self.group_size or max(len(rollouts), 1)
            for rollout in range(max(size, *(each + 1 for each in rollouts), 0)):
                rows = sorted(rollouts.get(rollout, ()))
                if not rows and len(rollouts) >= size:
                    continue  # the group has enough rollouts with other numbers
                own = (number >> BITS << BITS) + rollout  # so that rollouts sort by their number
                for segment, key in rows:
                    ends, version = segment == rows[-1][0], int(tags[key].get(self.version, 0))
                    lines.append((number, own, segment, size, ends, 0, version, self._places))
                    self.keys[self._places], self._places = key, self._places + 1
                if not rows:
                    version, failed = ended.get(name, 0), int(Status.FAILED)
                    lines.append((number, own, 0, size, True, failed, version, MISSING))
            self.groups[number] = name, range(begin, self._places)
        return self._rows(lines) if lines else None

    def _announce(self, prompts: Mapping[str, int]) -> None:
        """Announce the groups of these prompts, with their versions, if the assembler does not know them."""
        read = {name for name, _ in self.groups.values()}
        if not (new := [name for name in prompts if name not in self.unread and name not in read]):
            return
        draws = TensorDict({"group_id": as_ids(new, "group")}, batch_size=[len(new)])
        draws["expected_rollouts"] = torch.full((len(new),), self.group_size)
        draws["next", "policy_version"] = torch.tensor([prompts[name] for name in new])
        self.announce_to.announce(self.announce_to.never_announced(draws))

    def _forget(self, group: int) -> tuple[str, list[str]]:
        """Forget a group. Return its name and the keys of its rows."""
        name, places = self.groups.pop(group)
        return name, [self.keys.pop(place) for place in places]

    def clear(self, groups: Iterable[int], *, rows: bool = True) -> None:
        """Delete groups from the queue: their prompts and their rows.

        Args:
            groups: ids of groups that were read.
            rows: whether rows are deleted, too. False keeps them in the queue, to be trained.
        """
        gone = [self._forget(group) for group in groups]
        keys = [key for _, some in gone for key in some] if rows else []
        keys += [name for name, _ in gone] if self.prompt is not None else []
        if keys:
            tq().kv_clear(keys, self.partition)

    def _rows(self, lines: Sequence[tuple[Any, ...]]) -> TensorDict:
        group, rollout, segment, size, done, status, version, place = map(
            torch.tensor, zip(*lines, strict=True)
        )
        keys = [self.keys[each] for each in place.tolist() if each != MISSING]
        reward = torch.full((len(lines),), float("nan"))
        reward[place != MISSING] = self._rewards(keys) if keys else torch.empty(0)
        rows = {
            "group_id": group,
            "rollout_id": rollout,
            "segment": segment,
            "expected_rollouts": size,
            DONE: done,
            ("next", "status"): status,
            ("next", "reward"): reward,
            ELSEWHERE: torch.stack([torch.zeros_like(place), place, torch.zeros_like(place)], 1),
        }
        if self.version is not None:
            rows["next", "policy_version"] = version
        return TensorDict(rows, batch_size=[len(lines)])

    def _rewards(self, keys: list[str]) -> Tensor:
        fields = tq().kv_batch_get(keys, self.partition, select_fields=[self.reward])
        column = column_of(fields, self.reward) if len(fields) == len(keys) else None
        if column is None:
            raise BatchError(
                "every row of partition {partition} needs the field {field} (reward); some of {found} lack "
                "it. Is the reward computed before rows are sampled?",
                partition=repr(self.partition),
                field=repr(self.reward),
                found=listing(keys),
            )
        return torch.stack([row.sum() for row in column.unbind()]).float()

    def keys_of(self, rows: TensorDictBase) -> list[str]:
        """The keys of yielded rows, in order, without the rows of missing rollouts, which have no key."""
        return [self.keys[place] for place in rows[ELSEWHERE][:, 1].tolist() if place != MISSING]


@takes_options
class GroupReplayBuffer:
    """Sample whole groups by their ids: a ``trainer.v1.sampler.custom_sampler`` for verl v1.

    ::

        trainer.v1.sampler.custom_sampler.path=pkg://headrace.pipeline.queues.in_place
        trainer.v1.sampler.custom_sampler.name=GroupReplayBuffer
        "+trainer.v1.sampler.sampler_kwargs={group_size: 8, on_failure: keep, min_rollouts: 4}"

    A batch has `batch_size` groups with all their rollouts, in the order in which the groups finished. Three
    kinds of groups are deleted from the queue and replaced by new prompts: groups that failed, by the
    assembler's options; groups that are too old; and groups without a row that the recipe trains. In the
    partition ``val`` every group is used with the rollouts that it has.

    With ``max_off_policy_strategy=wait``, or ``on_stale: wait`` in `sampler_kwargs`, no group gets too old: a
    step takes the groups that were dispatched first, and waits for a slow group before this group would be
    too old (``on_stale="wait"`` of :class:`GroupAssembler`). The version is verl's global step. `steps_ahead`
    is verl's `num_warmup_batches`, the number of batches that it dispatches ahead.

    Args:
        trainer_mode: the mode of verl's trainer.
        trainer_config: the configuration of verl's trainer, from which `num_warmup_batches` and
            `parameter_sync_step` are read.
        max_off_policy_threshold: number of steps that a rollout may span, its own included, ≥ 1; None: any.
        max_off_policy_strategy: ``drop`` groups that span more steps, or ``wait`` for groups before they do.
        sampler_kwargs: options of :class:`GroupAssembler` (``on_failure``, ``min_rollouts``, …);
            `group_size`; and `recipe`, arguments of :func:`load_pipeline`. The stages of the recipe before
            its split select groups, without tokens.
        refill_fn: requests a number of prompts; None: deleted groups are not replaced, and the batch has
            fewer groups.
        poll_interval: seconds between two reads of the queue.

    Raises:
        ImportError: the extra `tq` is not installed.
        ValueError: :class:`GroupAssembler` raises it; or ``wait`` lacks a condition: `group_size`,
            `refill_fn`, and fewer `num_warmup_batches` than `max_off_policy_threshold`.
    """

    def __init__(
        self,
        trainer_mode: str,
        trainer_config: Any,
        max_off_policy_threshold: int | None,
        max_off_policy_strategy: Literal["drop", "wait"],
        sampler_kwargs: Mapping[str, Any],
        refill_fn: Any = None,
        poll_interval: float = 2.0,
    ):
        self.trainer_mode, self.trainer_config = trainer_mode, trainer_config
        self.max_off_policy_threshold = at_least("max_off_policy_threshold", max_off_policy_threshold, 1)
        self.refill_fn, self.poll_interval = refill_fn, above_zero("poll_interval", poll_interval)
        options = dict(sampler_kwargs)
        self.group_size, recipe = options.pop("group_size", None), options.pop("recipe", None)
        self.options = {"segment_key": "segment", **options}
        if max_off_policy_threshold is not None:
            bound = {"max_staleness": max_off_policy_threshold - 1, "on_stale": max_off_policy_strategy}
            self.options = bound | self.options
        self.waits = self.options.get("on_stale") == "wait"
        self.ahead = ceil(trainer_config.get("num_warmup_batches", 0))
        """Number of batches that verl dispatches ahead. A fraction is rounded up."""
        self.pipeline = None if recipe is None else load_pipeline(*recipe).halves()[0]
        self.partitions: dict[str, tuple[QueuedGroups, GroupAssembler]] = {}
        self._check_wait()
        self._of_train(1)  # raises errors of options here, not in the first step

    def _check_wait(self) -> None:
        if not self.waits:
            return
        if self.group_size is None or self.refill_fn is None:
            raise ValueError(
                "max_off_policy_strategy=wait needs group_size in sampler_kwargs (verl's rollout.n), because "
                "groups are counted before their rollouts finish, and a refill_fn, which replaces groups "
                "that fail; set them, or max_off_policy_strategy=drop"
            )
        bound = self.options.get("max_staleness")
        if bound is not None and self.ahead > bound:
            raise ValueError(
                "max_off_policy_strategy=wait needs num_warmup_batches < max_off_policy_threshold, or groups "
                f"are too old before they are trained; got {self.ahead} batches, and groups may be {bound} "
                "steps old. Set trainer.v1.sampler.max_off_policy_threshold to more"
            )

    def _of_train(self, groups: int) -> GroupAssembler:
        options: dict[str, Any] = {"groups": groups, "steps_ahead": self.ahead} if self.waits else {}
        return GroupAssembler(**{**options, **self.options})

    def _partition(self, name: str, batch_size: int) -> tuple[QueuedGroups, GroupAssembler]:
        if name not in self.partitions:
            own: dict[str, Any] = {"partition": name}
            if name == "val":
                assembler = GroupAssembler(segment_key="segment", on_failure="keep", min_rollouts=1)
            else:  # verl takes the groups of a step in several calls
                parts = self.trainer_config.get("parameter_sync_step", 1)
                assembler = self._of_train(batch_size * parts)
                own |= {"group_size": self.group_size, "announce_to": assembler if self.waits else None}
            self.partitions[name] = QueuedGroups.of("verl", **own), assembler
        return self.partitions[name]

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Wait for `batch_size` groups and take them.

        Args:
            global_steps: the step that is trained.
            partition_id: ``train`` or ``val``.
            batch_size: number of groups.

        Returns:
            - A ``transfer_queue.KVBatchMeta`` with the keys and tags of the groups' rows.
            - The number of deleted groups by reason, under ``training/…`` or ``validation/…``.

        Raises:
            BatchError: :meth:`QueuedGroups.read` or :meth:`GroupAssembler.put` raises it.
        """
        (source, assembler), validates = self._partition(partition_id, batch_size), partition_id == "val"
        assembler.version = max(assembler.version, global_steps)
        evicted = {"rollout_failure": 0, "filter_groups": 0}
        keys: list[str] = []
        taken = left = 0
        while True:
            if (rows := source.read()) is not None:
                assembler.put(rows)
            while taken + left < batch_size and (batch := assembler.take(1)) is not None:
                group = int(batch["group_id"][0])
                if validates or self.pipeline is None:
                    kept: TensorDictBase | None = batch
                else:
                    kept = self._decided(batch)
                if kept is None:
                    source.clear([group])
                    assembler.reject(1)
                    evicted["filter_groups"] += 1
                    left += self._refill(1, validates)
                else:
                    keys += source.keys_of(kept)
                    source.clear([group], rows=False)
                    taken += 1
            stream = assembler._stream
            held = {group.group for group in (*stream.waiting.values(), *stream.whole_groups())}
            if gone := source.groups.keys() - held:  # the assembler has dropped these groups
                source.clear(gone)
                evicted["rollout_failure"] += len(gone)
                left += self._refill(len(gone), validates)
            if taken + left >= batch_size:
                break
            if rows is None:
                time.sleep(self.poll_interval)
        queue = tq()
        tags = queue.kv_list(partition_id).get(partition_id, {})
        meta = queue.KVBatchMeta(keys=keys, tags=[dict(tags[key]) for key in keys], partition_id=partition_id)
        prefix = "validation" if validates else "training"
        return meta, {f"{prefix}/{why}/evicted_samples": count for why, count in evicted.items() if count}

    def _decided(self, batch: TensorDictBase) -> TensorDictBase | None:
        """The rows of a group that the recipe trains; None if it trains no row."""
        run = self.pipeline.run(batch)  # type: ignore[union-attr]
        rows = batch[
            (run.known_rows.table.fates.here & run.known_rows.table.fates.in_loss).nonzero().flatten()
        ]
        return rows if len(rows) else None

    def _refill(self, groups: int, validates: bool) -> int:
        """Request prompts for deleted groups. Return how many groups are not replaced."""
        if validates or self.refill_fn is None:
            return groups
        self.refill_fn(groups)
        return 0
