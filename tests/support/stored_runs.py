"""Runs whose rows are in files, and a server that shows them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import torch
from busy import MASK, stages
from tensordict import TensorDict

from headrace.pipeline import Pipeline, ReportFolder, make_report
from headrace.pipeline.tools.view.server import ViewServer
from headrace.pipeline.tools.view.stored_run import StoredRun

LARGE = 2**60  # an id that JavaScript would round


def step_batch(step: int, shift: float = 0.0, **columns: Any) -> TensorDict:
    """Three groups of three; the second has equal rewards. One prompt alternates between two texts."""
    rewards = [0.1 * step + shift, 1.0, 0.3, 2.0, 2.0, 2.0, -1.0, 0.0, shift]
    groups = [3 * step + LARGE + each // 3 for each in range(9)]
    batch = TensorDict(
        {
            "group_id": torch.tensor(groups),
            "rollout_id": torch.arange(9) + 9 * step,
            ("next", "reward"): torch.tensor(rewards),
            MASK: torch.ones(9, 4, dtype=torch.bool),
        },
        batch_size=[9],
    )
    prompts = ["What is 1 + 1?", f"What is {step % 2} · 7?", "Żółw?"]
    batch["prompt_text"] = [prompts[each // 3] for each in range(9)]
    batch["response_text"] = [f"Answer {each} of step {step}.\nSo it is {each * step}." for each in range(9)]
    batch["ground_truth"] = [str(each) for each in range(9)]
    for name, values in columns.items():
        batch[name] = values
    return batch


def report_of_step(step: int, shift: float = 0.0, **columns: Any):
    """The report of :func:`step_batch`. Each stage has something to do."""
    batch = step_batch(step, shift, **columns)
    return make_report(Pipeline(stages()).run(batch), step=step, batch=batch)


def write_run(folder: Path, steps: int = 4, shift: float = 0.0) -> Path:
    """Write a run of some steps, as a user's own loop does."""
    with ReportFolder(folder, every=None) as run:
        for step in range(steps):
            run.add(report_of_step(step, shift))
    return folder


@contextmanager
def served(*folders: Path) -> Iterator[Client]:
    """Serve these runs in a thread."""
    server = ViewServer([StoredRun(folder) for folder in folders])
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield Client(server)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def started(words: Sequence[str], folder: Path, *, code: str | None = None) -> Iterator[Any]:
    """Run the command in its own process. Yield the process, its output and its address."""
    program = ["-m", "headrace.pipeline"] if code is None else ["-c", code]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, *program, *words], cwd=folder, text=True, **pipes) as process:
        printed = []
        for line in process.stdout:
            printed.append(line.rstrip())
            if line.startswith("Ctrl-C"):
                break
        try:
            [address] = [line.removeprefix("Open ") for line in printed if line.startswith("Open ")]
            yield process, printed, address
        finally:
            process.kill()


class Client:
    """Sends requests exactly as given, without shortening paths or adding headers."""

    def __init__(self, server: ViewServer):
        self.server, self.address = server, server.address
        self.path = urlsplit(server.address).path

    def send(self, path: str, method: str = "GET", host: str | None = None, body: bytes | None = None):
        """Send a request. Return the status, headers and body of the answer."""
        port = self.server.server_address[1]
        connection = HTTPConnection("127.0.0.1", port, timeout=30)
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        if host != "":
            connection.putheader("Host", host or f"127.0.0.1:{port}")
        connection.putheader("Content-Length", str(len(body or b"")))
        connection.endheaders(body)
        response = connection.getresponse()
        found = response.status, dict(response.getheaders()), response.read()
        connection.close()
        return found

    def ask(self, name: str, /, *, status: int = 200, **values: Any) -> Any:
        """The server's answer to a query, as parsed JSON."""
        got, _, body = self.send(f"{self.path}api/{name}?{urlencode(values)}")
        assert got == status, body
        return json.loads(body)
