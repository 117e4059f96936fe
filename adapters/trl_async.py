"""Run a recipe inside TRL's ``AsyncGRPOTrainer``, between its queue and its step, on whole groups.

huggingface/trl 1.16.0, trl/experimental/async_grpo: the rollout worker's child process puts scored samples on
a queue, from which ``RolloutQueueDataset`` takes them one by one. The data set drops single samples that are
too old.
"""

from __future__ import annotations

import asyncio
import math
import queue
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict

from headrace.pipeline import Pipeline, advantages_of
from headrace.transforms import GroupAssembler, Status
from headrace.transforms.table import COLUMNS

from .attaching import GIVEN, Follows, log_run

ROLLOUT, LAST = "headrace/rollout", "headrace/last"  # among a sample's metrics, until the trainer gets it


class Dispatched(NamedTuple):
    """A message on the queue: the first rollout of a group begins."""

    group: int
    version: int


class Paced:
    """The methods of TRL's rollout loop that are replaced in the child process.

    A group begins when the trainer's GroupAssembler has capacity for it. Its samples have the policy version
    with which the group began, and the number of their rollout in the group.
    """

    def __init__(self, *, allowed: Any, **options: Any):
        super().__init__(**options)
        self._allowed, self._began = allowed, dict[int, int]()

    async def _generate_one(self: Any, *args: Any, group_id: int, **options: Any) -> Any:
        while group_id >= self._allowed.value:
            if self._stop_event.is_set():  # TRL waits for its tasks before it ends
                return [], [], [], 0, 0, None
            await asyncio.sleep(0.01)
        if group_id not in self._began:
            self._began[group_id] = self.model_version
            while not self._stop_event.is_set():
                try:
                    self.rollout_buffer.put_nowait(Dispatched(group_id, self._began[group_id]))
                    break
                except queue.Full:
                    await asyncio.sleep(0.01)
        return await super()._generate_one(*args, group_id=group_id, **options)  # type: ignore[misc]

    async def _score_group(self: Any, group: Any) -> list[Any]:
        from trl.experimental.async_grpo.async_rollout_worker import TrainingSequence

        if group.group_id not in self._began:  # the training ended before the group began
            return []
        group.model_version = self._began.pop(group.group_id)
        for sequences in group.completions_sequences:
            if not sequences:  # a rollout without a token still counts in the baseline
                sequences.append(TrainingSequence([self.tokenizer.pad_token_id], [0], [0.0], ""))
        samples: list[Any] = await super()._score_group(group)  # type: ignore[misc]
        places = [
            (rollout, row == len(sequences) - 1)
            for rollout, sequences in enumerate(group.completions_sequences)
            for row in range(len(sequences))
        ]
        for sample, (rollout, last) in zip(samples, places, strict=True):
            sample.metrics |= {ROLLOUT: rollout, LAST: last}
        return samples


class PacedLoops(NamedTuple):
    """Make the loop in the child process. TRL calls this object in place of the loop's class."""

    base: type
    allowed: Any

    def __call__(self, **options: Any) -> Any:
        """Make the loop."""
        return type(self.base.__name__, (Paced, self.base), {})(allowed=self.allowed, **options)


class WholeGroups:
    """A queue that takes samples from TRL's queue and returns those that a recipe trains.

    The recipe runs on as many whole groups as a step trains. Each row that is not trained is counted under
    one reason in :attr:`counts`.

    Args:
        trainer: an AsyncGRPOTrainer with a recipe attached.
        allowed: a number that the rollout loop reads: how many groups it may begin. None: the worker has a
            loop of its own. Then groups are not announced, and groups that are too old are dropped.

    Raises:
        ValueError: a step does not train a whole number of groups.
    """

    def __init__(self, trainer: Any, allowed: Any = None):
        args = trainer.args
        rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
        rows *= trainer.accelerator.num_processes
        self.size: int = args.num_generations
        if rows % self.size:
            raise ValueError(
                f"a step must train whole groups: set per_device_train_batch_size * "
                f"gradient_accumulation_steps * processes ({rows}) to a multiple of num_generations "
                f"({self.size})"
            )
        self._rows_of_step = rows
        self._first: int | None = None  # the policy version of the first step
        self.trainer, self.allowed, self._queue = trainer, allowed, trainer.rollout_worker.rollout_buffer
        self.assembler = GroupAssembler(
            groups=rows // self.size,
            group_size=self.size,
            max_staleness=args.max_staleness,
            on_stale="drop" if allowed is None else "wait",
        )
        self.came, self.handed_out, self.announced = 0, 0, 0
        self._samples = dict[int, Any]()
        self._rollouts = Counter[int]()  # rollouts by group, if samples have no rollout number
        self._ready = deque[Any]()
        self._decided = Counter[str]()
        self._too_old = 0  # rows that became too old while they waited here
        self._logged = Counter[str]()
        self._allow()

    @property
    def counts(self) -> dict[str, int]:
        """Counts of all rows that arrived: handed out, waiting, or removed for a reason."""
        out = self._left() + self._decided
        waits = self.assembler.held + len(self._ready)
        return {"came": self.came, "handed_out": self.handed_out, "waiting": waits, **out}

    def _left(self) -> Counter[str]:
        """Rows that were not trained, for a reason outside the recipe."""
        return Counter(self.assembler.counts) + Counter(stale=self._too_old)

    def qsize(self) -> int:
        """Return how many samples wait. The size of TRL's queue is approximate."""
        return int(self._queue.qsize()) + self.assembler.held + len(self._ready)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the next sample to train.

        Raises:
            queue.Empty: no sample came within `timeout` seconds.
        """
        while True:
            if not self._ready:
                self._decide()
            if not self._ready:
                self._take_in(self._queue.get(block, timeout))
                continue
            sample = self._ready.popleft()
            # Groups with more rows than rollouts can fill several steps, so their last rows become older.
            age, most = self._version() - sample.model_version, self.trainer.args.max_staleness
            if age <= most + (self.allowed is not None):  # with pacing, one version more
                self.handed_out += 1
                return sample
            self._too_old += 1

    def _take_in(self, sample: Any) -> None:
        if isinstance(sample, Dispatched):
            self.announced += 1
            draws = {"group_id": [sample.group], ("next", "policy_version"): [sample.version]}
            self.assembler.announce(TensorDict(draws, [1]))
            return
        group = int(sample.group_id)
        rollout = int(sample.metrics.pop(ROLLOUT, self._rollouts[group]))
        last = bool(sample.metrics.pop(LAST, True))
        self._rollouts[group] = rollout + last
        ends = int(sample.input_ids[-1]) in self.trainer.eos_token_ids or not last
        self._samples[self.came] = sample
        columns = {
            "group_id": [group],
            "rollout_id": [group * self.size + rollout],
            ("next", "policy_version"): [int(sample.model_version)],
            ("next", "reward"): [self._reward(sample.metrics)],
            ("next", "done"): [last],
            "status": [int(Status.COMPLETED if ends else Status.TRUNCATED)],
            "row": [self.came],
        }
        self.came += 1
        self.assembler.put(TensorDict(columns, [1]))

    def _reward(self, metrics: Mapping[str, float]) -> Any:
        """Return one reward, or one for each reward function if the recipe adds up several rewards."""
        collapse = dict(self.trainer.pipeline.stages).get("collapse")
        if getattr(collapse, "columns", 1) == 1:
            return metrics["reward"]
        return [value for name, value in metrics.items() if name.startswith("rewards/")]

    def _decide(self) -> None:
        """Take the groups of a step, if the step may begin, and run the recipe."""
        if self.assembler.version != (version := self._version()):
            self.assembler.version = version
        if begun := self.handed_out % self._rows_of_step:  # a filter took rows out: others fill the step
            self.assembler.want(-(-(self._rows_of_step - begun) // self.size))
        batch = self.assembler.take()
        if batch is not None:
            rows = [self._samples.pop(row) for row in batch["row"].tolist()]
            masks = [torch.as_tensor(row.completion_mask).bool() for row in rows]
            batch["masks", "all_assistant_mask"] = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)
            result = advantages_of(self.trainer.pipeline, batch)
            if result.advantage.shape[1] > 1:
                raise ValueError(
                    "AsyncGRPOTrainer has one advantage of each sample, and the recipe gives its tokens "
                    "different ones: attach it to GRPOTrainer"
                )
            trained = set[int]()
            for row, advantage, inside in zip(rows, result.advantage[:, 0], result.in_loss, strict=True):
                if inside.any():
                    row.advantage = float(advantage)
                    row.completion_mask = inside[: len(row.completion_mask)].long().numpy()
                    self._ready.append(row)
                    trained.add(int(row.group_id))
            groups = {int(row.group_id) for row in rows}
            counts = result.run.ledger.counts()
            self._decided += Counter({reason: n for reason, n in counts.items() if reason != "trained"})
            self.assembler.reject(len(groups - trained))
            # A group that the recipe takes out has ended, too: TRL counts epochs and resumes by these ids.
            self.trainer._trained_groups |= groups - trained
            for group in groups:
                self._rollouts.pop(group, None)
            log_run(self.trainer, result.run, training=True)
        out = self._left()
        for reason, number in (out - self._logged).items():
            self.trainer._metrics["train"][f"headrace/out/stream/{reason}_total"].append(float(number))
        if self.allowed is None:  # forget samples two or more versions too old
            oldest = self.assembler.version - self.trainer.args.max_staleness - 1
            young = {row: each for row, each in self._samples.items() if each.model_version >= oldest}
            self._samples = young
        self._logged = out
        self._allow()

    def _version(self) -> int:
        """Return the policy version that trains the next rows. The data loader reads ahead of steps."""
        args, version = self.trainer.args, int(self.trainer.model_version)
        if self._first is None:
            self._first = version
        if args.token_budget:  # a step then has as many rows as fit, so its end is not known here
            return version
        return max(version, self._first + self.handed_out // self._rows_of_step // args.weight_sync_steps)

    def _allow(self) -> None:
        if self.allowed is not None:
            self.allowed.value = max(self.allowed.value, self.announced + self.assembler.capacity())


class RecipeAdvantagesOfQueue(Follows):
    """The methods of TRL's ``AsyncGRPOTrainer`` that a recipe replaces."""

    gives = GIVEN | {COLUMNS["version"].default}
    pipeline: Pipeline
    queued: WholeGroups

    @staticmethod
    def check(trainer: Any) -> None:
        """Check that a step trains whole groups.

        Raises:
            ValueError: a step does not.
        """
        if trainer.rollout_worker is not None:
            WholeGroups(trainer)

    @staticmethod
    def of_trainer(trainer: Any) -> dict[str, str]:
        """Options of the default recipe that give AsyncGRPOTrainer's advantages."""
        return {"advantage.scale": "group", "advantage.ddof": "0", "advantage.eps": "1e-8"}

    def get_train_dataloader(self: Any) -> Any:
        """Make TRL's own data loader, over whole groups."""
        worker, allowed = self.rollout_worker, None
        if worker is not None:
            if hasattr(worker, "_loop_cls"):  # TRL's own worker, whose loop is in a child process
                allowed = worker._mp_ctx.Value("i", 0)
                worker._loop_cls = PacedLoops(type(worker)._loop_cls, allowed)
            self.rollout_queue = self.queued = WholeGroups(self, allowed)
        loader = super().get_train_dataloader()  # type: ignore[misc]
        if worker is not None:
            self._rollout_dataset.max_staleness = math.inf  # samples that are handed out are young enough
        return loader
