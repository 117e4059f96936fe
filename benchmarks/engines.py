"""Measure the rows per second to a trainer, and the bytes of the deciding process, on Ray and TransferQueue.

    python benchmarks/engines.py [--rounds 5] [--rows 4096] [--writers 2]

Writers send the same pieces of 32 rows (four whole groups of 8) through RayAssembler and a plain Ray queue,
and through RolloutQueue and plain puts and gets of TransferQueue. The plain ways return rows as they were
put. They form no groups, count nothing, and refuse nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from results import main
from tables import Cell, Row, Table
from tensordict import TensorDict, TensorDictBase, lazy_stack

from headrace.pipeline import RayAssembler, RolloutQueue, StepQueue, assembled, load_pipeline
from headrace.pipeline.queues.queues import encode_rows, fetch_rows
from headrace.transforms import GroupAssembler

GROUP_SIZE, PIECE = 8, 32
MOST_BYTES = 200
RECIPE = ("pipeline=grpo", "pipeline.stages.split.minibatches=2", "pipeline.stages.split.ranks=2")
NOTE = f"""Rows per second, medians of alternating rounds, with {PIECE} rows a piece, dense or in lazy
stacks of ragged rows. Bytes are those of one row through the assembler's actor, in and out."""
QUEUE_NOTE = f"""The same rows until they have arrived, in whole groups except for the plain puts and gets.
For those by key the tokens are fetched when their groups are whole. Bytes are those of all messages of the
process that runs assembler and pipeline and sends two ranks their rows, {PIECE * 8} rows a batch."""


def collected(count: int, writer: int, tokens: int, *, ragged: bool) -> TensorDictBase:
    """Finished rollouts with one row each. Each row has an origin."""
    ids = torch.arange(writer * count, (writer + 1) * count)
    zeros = torch.zeros_like(ids)
    columns = {
        "group_id": ids // GROUP_SIZE,
        "rollout_id": ids,
        "expected_rollouts": torch.full_like(ids, GROUP_SIZE),
        ("headrace", "origin"): torch.stack([zeros, zeros + writer, zeros + 99, zeros, zeros + 1], 1),
        ("next", "reward"): torch.rand(count, 1),
        ("next", "done"): torch.ones(count, 1, dtype=torch.bool),
        ("tokens", "full"): torch.zeros(count, tokens, dtype=torch.int64),
        ("log_probs", "full"): torch.zeros(count, tokens),
        ("masks", "all_assistant_mask"): torch.ones(count, tokens, dtype=torch.bool),
    }
    rows = TensorDict(columns, batch_size=[count])
    if not ragged:
        return rows
    singles = [row.clone() for row in rows.unbind(0)]
    for number, row in enumerate(singles):
        for key in (("tokens", "full"), ("log_probs", "full"), ("masks", "all_assistant_mask")):
            row[key] = row[key][: tokens - number % (tokens // 2)].clone()
    return lazy_stack(singles)


class Writer:
    """A process that makes rows, and later sends them."""

    def collect(self, count: int, writer: int, tokens: int, ragged: bool) -> None:
        """Make rows, in pieces."""
        torch.set_num_threads(1)
        self.pieces = [
            piece.clone() for piece in collected(count, writer, tokens, ragged=ragged).split(PIECE)
        ]

    def send(self, put: Callable[[TensorDictBase], Any]) -> None:
        """Send the pieces."""
        for piece in self.pieces:
            put(piece)


class Counting(RayAssembler):
    """Counts the bytes that go to the assembler's actor and come from the actor."""

    sent = 0

    def _ask(self, method: str, *args: Any) -> Any:
        found = super()._ask(method, *args)
        self.sent += bytes_of((args, found))
        return found

    def _keep(self, method: str, packed: Any, *args: Any) -> Any:
        import ray

        self.sent += bytes_of(([ray.put(part) for part in packed], args))
        return super()._keep(method, packed, *args)


def bytes_of(thing: Any) -> int:
    """The bytes of a message between processes, as Ray serializes it."""
    import ray

    return ray._private.worker.global_worker.get_serialization_context().serialize(thing).total_bytes


def rates(options: argparse.Namespace, tokens: int, ragged: bool) -> list[Cell]:
    """Measure a line of the table."""
    import ray
    from ray.util.queue import Queue

    count, found = options.rows // options.writers, {"queue": [], "assembler": []}
    queue, assembler = Queue(actor_options={"num_cpus": 0}), RayAssembler()
    writers = [ray.remote(num_cpus=0)(Writer).remote() for _ in range(options.writers)]
    for turn in range(options.rounds + 1):  # of which the first warms up
        numbers = range(turn * len(writers), (turn + 1) * len(writers))
        ray.get([w.collect.remote(count, n, tokens, ragged) for w, n in zip(writers, numbers, strict=True)])
        for way, put in (("queue", queue.put), ("assembler", assembler.put)):
            start, rows = time.perf_counter(), 0
            tasks = [writer.send.remote(put) for writer in writers]
            if way == "queue":
                while rows < count * len(writers):
                    rows += len(queue.get())
            else:
                for batch in assembler.batches(patience=300):
                    rows += len(batch)
                    if rows == count * len(writers):
                        break
            seconds = time.perf_counter() - start
            ray.get(tasks)
            if rows != count * len(writers):
                raise RuntimeError(f"{count * len(writers)} rows were sent, and {rows} came")
            found[way] += [rows / seconds] if turn else []
    counting = Counting(groups=4 * PIECE // GROUP_SIZE)
    for piece in collected(8 * PIECE, 10**6, tokens, ragged=ragged).split(PIECE):
        counting.put(piece)
        counting.take()
    for actor in (*writers, counting, assembler, queue):
        actor.shutdown() if hasattr(actor, "shutdown") else ray.kill(actor)
    plain, ours = (statistics.median(each) for each in found.values())
    bytes_ = Cell(counting.sent / (8 * PIECE), ",.0f", MOST_BYTES)
    return [Cell(plain, ",.0f"), Cell(ours, ",.0f"), Cell(ours / plain, ".2f", 1, at_least=True), bytes_]


class Plain:
    """Plain puts and gets of TransferQueue, for rows that are already encoded."""

    def __init__(self, partition: str):
        self.partition = partition

    def put(self, piece: TensorDictBase) -> None:
        """Send a piece."""
        import transfer_queue

        columns, tag = encode_rows(piece)
        ids = piece["rollout_id"].tolist()
        transfer_queue.kv_batch_put(
            list(map(str, ids)), self.partition, fields=columns, tags=[tag] * len(ids)
        )

    def rows(self, count: int) -> int:
        """Get this many rows."""
        import transfer_queue

        found = 0
        while found < count:
            tags = transfer_queue.kv_list(self.partition).get(self.partition, {})
            if keys := [key for key, tag in tags.items() if tag]:
                found += len(fetch_rows(transfer_queue, keys, self.partition, tags[keys[0]]))
                transfer_queue.kv_clear(keys, self.partition)
        return found


@contextmanager
def messages() -> Iterator[list[int]]:
    """Note the bytes of each message of TransferQueue that this process sends or gets."""
    from transfer_queue.utils.zmq_utils import ZMQMessage

    sizes: list[int] = []
    serialize, deserialize = ZMQMessage.serialize, ZMQMessage.__dict__["deserialize"]

    def note(frames: Any) -> Any:
        sizes.append(sum(memoryview(frame).nbytes for frame in frames))
        return frames

    ZMQMessage.serialize = lambda message: note(serialize(message))
    ZMQMessage.deserialize = classmethod(lambda cls, frames: deserialize.__func__(cls, note(frames)))
    yield sizes
    ZMQMessage.serialize, ZMQMessage.deserialize = serialize, deserialize


def queue_rates(options: argparse.Namespace, tokens: int, ragged: bool) -> list[Cell]:
    """Measure a line of the second table."""
    import ray

    count, found = options.rows // options.writers, {"plain": [], "whole": [], "by key": []}
    assembler, pipeline = GroupAssembler(groups=8 * PIECE // GROUP_SIZE), load_pipeline(*RECIPE)
    writers = [ray.remote(num_cpus=0)(Writer).remote() for _ in range(options.writers)]
    for turn in range(options.rounds + 1):  # of which the first warms up
        numbers = range(turn * len(writers), (turn + 1) * len(writers))
        ray.get([w.collect.remote(count, n, tokens, ragged) for w, n in zip(writers, numbers, strict=True)])
        for way in found:
            name = f"{way} {tokens} {ragged} {turn}"
            decided = [assembler, pipeline] if way == "by key" else None
            handle: Any = Plain(name) if way == "plain" else RolloutQueue(name, decided_by=decided)
            start, rows = time.perf_counter(), 0
            tasks = [writer.send.remote(handle.put) for writer in writers]
            if way == "plain":
                rows = handle.rows(count * len(writers))
            else:
                for batch in assembled(handle, GroupAssembler(), patience=300):
                    rows += len(handle.fetch(batch) if decided else batch)
                    handle.keep_only() if decided else None
                    if rows == count * len(writers):
                        break
            seconds = time.perf_counter() - start
            ray.get(tasks)
            found[way] += [rows / seconds] if turn else []
    for writer in writers:
        ray.kill(writer)
    name = f"bytes {tokens} {ragged}"
    source = RolloutQueue(name, producers=1, decided_by=[assembler, pipeline])
    for piece in collected(16 * PIECE, 10**6, tokens, ragged=ragged).split(PIECE):
        source.put(piece)
    source.end()
    steps, rows = StepQueue(f"{name}/steps", ranks=2, rollouts=name), 0
    with messages() as sizes:
        for batch in assembled(source, assembler):
            steps.put(pipeline.minibatches(batch))
            source.keep_only(assembler, pipeline, steps)
            rows += len(batch)
    plain, whole, by_key = (statistics.median(each) for each in found.values())
    cells = [Cell(rate, ",.0f") for rate in (plain, whole, by_key)]
    ratio = Cell(by_key / plain, ".2f", 1, at_least=True)
    return [*cells, ratio, Cell(sum(sizes) / rows, ",.0f", MOST_BYTES)]


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """The tables of Ray and of TransferQueue."""
    import ray
    import transfer_queue

    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False)
    lines = [(tokens, ragged) for tokens in (64, 4096) for ragged in (False, True)]
    rows = [
        Row(f"{tokens:,} tokens, {'ragged' if ragged else 'dense'}", rates(options, tokens, ragged))
        for tokens, ragged in (lines[:2] if options.quick else lines)
    ]
    head = ["rows", "Ray queue, rows/s", "RayAssembler, rows/s", "ratio", "bytes a row"]
    yield Table("Rows to a trainer, on Ray", NOTE, head, rows)
    transfer_queue.init()
    rows = [
        Row(f"{tokens:,} tokens, {'ragged' if ragged else 'dense'}", queue_rates(options, tokens, ragged))
        for tokens, ragged in (lines[:2] if options.quick else lines)
    ]
    transfer_queue.close()
    ray.shutdown()
    head = ["rows", "put and get, rows/s", "RolloutQueue, rows/s", "by key, rows/s", "ratio", "bytes a row"]
    yield Table("Rows to a trainer, on TransferQueue", QUEUE_NOTE, head, rows)


if __name__ == "__main__":
    main(tables, __doc__, warm=False, rounds=(5, 1), rows=(2048, 128), writers=(2, 2))
