"""Run the server of ``headrace view``, on this machine only, and make its answers.

The server listens on 127.0.0.1. The path of every request begins with a random word that only the user who
started the server knows. So other users of the machine cannot read the rows. A request with the name of
another host is refused, because a page of another site could send it (DNS rebinding). Only GET is answered,
and only for the names in :data:`FILES` and :data:`ANSWERS`. No path of a request is used as the path of a
file.
"""

from __future__ import annotations

import argparse
import json
import re
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import parse_qsl

from headrace.pipeline.composing.compose import ConfigError
from headrace.pipeline.wording import printable

from .stored_run import SAME, StoredRun, StoredStep, UnreadableRows

HERE, SHARED = Path(__file__).parent / "page", Path(__file__).parents[1] / "report" / "page"
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
OURS = (
    "view.html",
    "view.css",
    "view.js",
    "view_api.js",
    "view_chart.js",
    "view_prompts.js",
    "view_rows.js",
    "view_steps.js",
)
OF_THE_PAGE = ("page.css", "dom.js", "numbers.js", "colour.js", "metrics.js")
FILES = {name: HERE / name for name in OURS} | {name: SHARED / name for name in OF_THE_PAGE}
HOSTS = re.compile(r"(127\.0\.0\.1|localhost)(:\d{1,5})?")  # the port may differ if ssh forwards it
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
MOST = 200  # an answer has at most this many rows or prompts
ORDERS = ("lowest", "highest")


def view(words: Sequence[str]) -> int:
    """Serve one run or two until Ctrl-C, and return the exit status.

    Args:
        words: the arguments after ``headrace view``.

    Raises:
        ConfigError: an argument is unknown, a folder has no rows, or the port is taken.
    """
    parser = argparse.ArgumentParser(
        prog="headrace view",
        description="Show all rows of all steps of a run, or of two runs side by side, to a browser on this "
        "machine. The command prints the address, and starts no browser. FOLDER is what a training, a replay "
        "or ReportFolder has written.",
    )
    parser.add_argument(
        "folder", metavar="FOLDER", nargs="+", type=Path, help="the folder of a run; at most two"
    )
    parser.add_argument(
        "-p", "--port", type=int, default=0, help="port of the server (default: any free port)"
    )

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"headrace view FOLDER [FOLDER2] [--port PORT]: {message}")

    parser.error = refuse  # type: ignore[method-assign]
    given, unknown = parser.parse_known_args(list(words))
    if unknown:
        refuse(
            f"unknown option {unknown[0]!r}; the only option is --port. No browser is started: view prints "
            "the address"
        )
    if len(given.folder) > 2:
        refuse(f"two runs are shown side by side at most; got {len(given.folder)} folders")
    if not 0 <= given.port < 2**16:
        refuse(f"a port is from 1 to 65535; got {given.port}")
    server = ViewServer([StoredRun(folder) for folder in given.folder], given.port)
    for run in server.runs:
        print(printable(f"{run.folder}: {len(run.steps()):,} steps"))
    port = server.server_address[1]
    print(f"\nOpen {server.address}")
    print(f"From another machine: ssh -N -L {port}:127.0.0.1:{port} HOST, then the same address.")
    print("Ctrl-C ends it.", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.server_close()
    return 0


class ViewServer(ThreadingHTTPServer):
    """Serve the rows of runs on 127.0.0.1, at ``address``.

    Args:
        runs: one run or two.
        port: the port; 0: any free port.

    Raises:
        ConfigError: the port is taken, or this user may not use it.
    """

    def __init__(self, runs: Sequence[StoredRun], port: int = 0):
        self.runs, self.secret = list(runs), secrets.token_urlsafe(16)
        try:
            super().__init__(("127.0.0.1", port), Answering)
        except OSError as err:
            reason = (err.strerror or str(err)).lower()
            raise ConfigError(f"--port {port}: {reason}. Take another port, or leave --port out") from None
        self.address = f"http://127.0.0.1:{self.server_address[1]}/{self.secret}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print errors, except if a browser closes the connection in the middle of an answer."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Answering(BaseHTTPRequestHandler):
    """Answer one connection."""

    server: ViewServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "headrace", ""
    timeout = 60

    def do_GET(self) -> None:
        """Answer with a file of the viewer, or with data of the runs."""
        if HOSTS.fullmatch(self.headers.get("Host", "")) is None:
            return self._refuse(HTTPStatus.FORBIDDEN, "this server answers 127.0.0.1 and localhost only")
        path, _, query = self.path.partition("?")
        parts = path.split("/", 2)  # an empty text, the secret, and a name
        if parts[0] or not secrets.compare_digest(parts[1].encode(), self.server.secret.encode()):
            plain = b"Open the whole address that headrace view has printed.\n"  # a person may have typed it
            return self._send(HTTPStatus.FORBIDDEN, "text/plain", plain)
        if len(parts) < 3:  # without the slash, the page would request its files from another address
            return self._refuse(
                HTTPStatus.NOT_FOUND, "the address that headrace view has printed ends with a slash"
            )
        name = parts[2] or "view.html"
        if name in FILES:
            return self._send(HTTPStatus.OK, KINDS[FILES[name].suffix], FILES[name].read_bytes())
        if name not in ANSWERS:
            return self._refuse(HTTPStatus.NOT_FOUND, "there is nothing of this name")
        try:
            answer = ANSWERS[name](self.server.runs, Query(query))
        except QueryError as err:
            return self._refuse(HTTPStatus.BAD_REQUEST, str(err))
        except UnreadableRows as err:
            return self._refuse(HTTPStatus.UNPROCESSABLE_ENTITY, str(err))
        body = json.dumps(answer, allow_nan=False, separators=(",", ":")).encode()
        self._send(HTTPStatus.OK, "application/json", body)

    def _not_allowed(self) -> None:
        self.close_connection = True  # the body of the request is not read
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "only GET is answered")

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _not_allowed

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._send(
            status, "application/json", json.dumps({"error": printable(why)}, allow_nan=False).encode()
        )

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))} | HEADERS
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            headers["Allow"] = "GET"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because the terminal is for errors."""


# -- queries and answers -------------------------------------------------------------------------------------


class QueryError(ValueError):
    """A request has an unknown name or an invalid value."""


class Query:
    """The part of an address after ``?``. Values are read by name. Names that were not read are an error."""

    def __init__(self, text: str):
        try:
            pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=20)
        except ValueError as err:
            raise QueryError(str(err)) from None
        self._values = dict(pairs)
        if len(self._values) < len(pairs):
            raise QueryError("a name occurs twice")

    def text(self, name: str) -> str:
        """The value of a name as text; empty if it is missing."""
        return self._values.pop(name, "")

    def one_of(self, name: str, words: Sequence[str]) -> str:
        """The value of a name, which must be one of `words`; the first word if it is missing."""
        value = self._values.pop(name, words[0] if words else "")
        if value not in words:
            raise QueryError(f"{name} is one of {', '.join(words)}; got {value[:40]!r}")
        return value

    def number(self, name: str, default: int | None = None) -> int:
        """The value of a name as an integer ≥ 0."""
        value = self._values.pop(name, "" if default is None else str(default))
        if not re.fullmatch(r"[0-9]{1,18}", value):
            raise QueryError(f"{name} is an integer from 0 on; got {value[:40]!r}")
        return int(value)

    def run(self, runs: Sequence[StoredRun]) -> StoredRun:
        """The run that the request names."""
        number = self.number("run")
        if number >= len(runs):
            raise QueryError(f"run is below {len(runs)}; got {number}")
        return runs[number]

    def end(self) -> None:
        """Refuse values that were not read."""
        if self._values:
            raise QueryError(f"there is no {next(iter(self._values))[:40]!r}")


def answer_runs(runs: Sequence[StoredRun], query: Query) -> dict[str, Any]:
    """Answer with the steps of all runs, each with a few numbers. New files are included."""
    query.end()
    found = []
    for run in runs:
        steps = run.steps()
        lines, last = [summary(each) for each in steps.values()], next(reversed(steps.values()), None)
        found.append(
            {
                "name": printable(run.name),
                "recipe": run.recipe,
                "folder": printable(str(run.folder)),
                "problems": run.problems(),
                "failed": run.failed(),
                "metrics": [printable(str(name)) for name in last.numbers] if last else [],
                "steps": {name: [line[name] for line in lines] for name in (lines[0] if lines else ())},
            }
        )
    return {"runs": found, "same": same_of(runs)}


def summary(stored: StoredStep) -> dict[str, Any]:
    """The line of a step in the list of steps."""
    levels = [level for level in stored.funnel if isinstance(level, Mapping)]
    first, last = (levels[0], levels[-1]) if levels else ({}, {})
    gone: dict[str, int] = {}
    for level in levels:
        for left in level.get("out", ()):
            if isinstance(left, Mapping) and isinstance(left.get("rows"), int) and left["rows"]:
                gone[printable(f"{level.get('name')}/{left.get('reason')}")] = left["rows"]
    return {
        "step": stored.step,
        "rows": stored.rows,
        "rollouts": a_number(first.get("rollouts")),
        "groups": a_number(first.get("groups")),
        "trained": a_number(last.get("rows")),
        "reward": a_number(stored.numbers.get("reward/all/mean")),
        "flat": a_number(stored.numbers.get("frac_reward_zero_std")),
        "length": a_number(stored.numbers.get("response_length/mean")),
        "characters": a_number(stored.numbers.get("response_characters/mean")),
        "truncated": a_number(stored.numbers.get("rollouts/truncated")),
        "left": gone,
    }


def a_number(value: Any) -> float | None:
    """The value if it is a number, else None. A file may hold any value."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def answer_metric(runs: Sequence[StoredRun], query: Query) -> dict[str, Any]:
    """Answer with one number for each step of all runs, as [step, value] pairs."""
    name = query.text("name")
    query.end()
    found = []
    for run in runs:
        numbers = {
            step: {printable(str(key)): value for key, value in each.numbers.items()}
            for step, each in run.steps().items()
        }
        found.append([[step, a_number(of.get(name))] for step, of in numbers.items()])
    return {"runs": found}


def answer_rows(runs: Sequence[StoredRun], query: Query) -> dict[str, Any]:
    """Answer with some rows of a step."""
    run, step = query.run(runs), query.number("step")
    how: dict[str, Any] = {name: query.text(name) for name in ("sort", "reason", "group", "text", "prompt")}
    descending = query.one_of("order", ("ascending", "descending")) == "descending"
    offset, count = query.number("offset", 0), min(query.number("count", 50), MOST)
    query.end()
    how |= {"same": same_of(runs), "descending": descending, "offset": offset, "count": count}
    return run.rows(step, **how)


def answer_text(runs: Sequence[StoredRun], query: Query) -> dict[str, Any]:
    """Answer with one whole text."""
    run, step, place = query.run(runs), query.number("step"), query.number("place")
    column = query.text("column")
    query.end()
    return {"text": run.text(step, place, column)}


def answer_prompts(runs: Sequence[StoredRun], query: Query) -> dict[str, Any]:
    """Answer with the prompts of all runs, each with its mean reward in its first and in its last step."""
    same, text = same_of(runs), query.text("text")
    order = query.one_of("order", ORDERS)
    offset, count = query.number("offset", 0), min(query.number("count", 50), MOST)
    query.end()
    of_runs = [run.prompts(same, text) for run in runs]
    lines = []
    for key in dict.fromkeys(key for found in of_runs for key in found):
        label = next(run.labels[key] for run in runs if key in run.labels)
        of_each = [prompt_summary(found[key].items()) if key in found else None for found in of_runs]
        lines.append({"key": key, "label": label, "runs": of_each})

    def place(line: dict[str, Any]) -> tuple[float, str]:
        rewards = [each and each["reward"] for each in line["runs"]]
        known = [reward for reward in rewards if reward is not None]
        mean = sum(known) / len(known) if known else float("inf")
        return -mean if order == "highest" and known else mean, line["label"]

    lines.sort(key=place)
    return {"prompts": lines[offset : offset + count], "found": len(lines)}


def prompt_summary(steps: Any) -> dict[str, Any]:
    """Summarise a prompt in a run: its steps, and its mean reward in all, the first and the last step."""
    each = sorted(steps)
    rewards = [(seen.reward, seen.scored) for _, seen in each if seen.reward is not None]
    weight = sum(scored for _, scored in rewards)
    return {
        "steps": len(each),
        "groups": sum(seen.groups for _, seen in each),
        "rollouts": sum(seen.rollouts for _, seen in each),
        "reward": sum(reward * scored for reward, scored in rewards) / weight if weight else None,
        "first": [each[0][0], each[0][1].reward],
        "last": [each[-1][0], each[-1][1].reward],
    }


def answer_prompt(runs: Sequence[StoredRun], query: Query) -> dict[str, Any]:
    """Answer with one prompt over all steps of all runs."""
    same, key = same_of(runs), query.text("key")
    query.end()
    of_runs = [run.prompts(same).get(key, {}) for run in runs]
    texts = (run.prompt_text(key, same) for run in runs)
    text = next((text for text in texts if text is not None), None)
    if text is None:
        raise UnreadableRows("no step of these runs has this prompt")
    steps = [
        [[step, seen.groups, seen.rollouts, seen.reward] for step, seen in found.items()] for found in of_runs
    ]
    dots = [run.rollouts_of(key, same) for run in runs]
    return {
        "text": text,
        "runs": steps,
        "dots": [[[step, *pair] for step in of for pair in of[step]] for of in dots],
    }


def same_of(runs: Sequence[StoredRun]) -> str:
    """The column that identifies prompts in all runs; empty if there is none."""
    kinds = [run.kinds() for run in runs]
    return next((name for name in SAME if all(name in of for of in kinds)), "")


ANSWERS: dict[str, Callable[[Sequence[StoredRun], Query], dict[str, Any]]] = {
    "api/runs": answer_runs,
    "api/metric": answer_metric,
    "api/rows": answer_rows,
    "api/text": answer_text,
    "api/prompts": answer_prompts,
    "api/prompt": answer_prompt,
}
