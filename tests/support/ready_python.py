"""A Python process that has imported what tests need, and forks for each program.

Imports take seconds. Without this process, each worker of pytest, TorchRL and Ray would repeat them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp

IMPORTED = [
    "headrace.pipeline",
    "headrace.pipeline.main",
    "headrace.pipeline.tools.command.perform",
    "pyarrow.compute",
    "hypothesis",
]
# pyarrow imports pandas when it makes its first array.
OPTIONAL = ["torchrl.collectors", "torchrl.objectives.llm", "pandas", "transformers.modeling_utils"]
FREE = 500  # a file descriptor that is not in use
NUMBER = 8  # bytes


def ready_python() -> str:
    """The path of a command like ``python``. Programs get the caller's open files, folder and environment.

    Its process ends with the process that called this first. If processes cannot be watched, the path is that
    of Python.
    """
    if not hasattr(os, "pidfd_open"):  # only Linux has it
        return sys.executable
    folder = Path(os.environ.setdefault("HEADRACE_KEPT", mkdtemp()))
    command = folder / "python"
    if not command.exists():
        start(str(folder / "socket"), os.getpid())
        words = [sys.executable, "-IS", __file__, "run", str(folder / "socket")]
        command.write_text(f'#!/bin/sh\nexec {" ".join(map(repr, words))} "$@"\n')
        command.chmod(0o755)
    return str(command)


def ready_ray() -> str:
    """The path of a file that replaces Ray's ``setup_worker.py``.

    On import, Ray reads to which raylet a process belongs, so each raylet has its own process to fork from.
    """
    file = Path(os.environ["HEADRACE_KEPT"], "ray.py")
    file.write_text(f"import runpy\nrunpy.run_path({__file__!r}, run_name='ray')\n")
    return str(file)


def start(address: str, owner: int, environment: Mapping[str, str] = os.environ) -> None:
    """Start the process, if it does not run."""
    with socket.socket(socket.AF_UNIX) as listener:
        mine = f"{address}.{os.getpid()}"
        listener.bind(mine)
        listener.listen(128)
        listener.set_inheritable(True)
        with contextlib.suppress(FileExistsError):
            os.link(mine, address)
            words = [sys.executable, "-Wignore", __file__, "serve", str(listener.fileno()), str(owner)]
            nothing = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
            os.posix_spawn(sys.executable, words, environment, file_actions=[nothing])
        os.unlink(mine)


def run(address: str, words: list[str]) -> int:
    """Let the process run a program, and return the exit code."""
    fds = [int(name) for name in os.listdir("/dev/fd")]
    with socket.socket(socket.AF_UNIX) as connection:
        fds = [fd for fd in fds if is_passed(fd)]
        told = json.dumps([words, fds, os.getcwd(), dict(os.environ)]).encode()
        connection.connect(address)
        socket.send_fds(connection, [len(told).to_bytes(NUMBER, "big")], fds)
        connection.sendall(told)
        code = int.from_bytes(connection.recv(NUMBER) or b"\1", "big", signed=True)
    return code if code >= 0 else 128 - code


def is_passed(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)
    except OSError:  # the descriptor by which the folder is listed
        return False


def forked(listener: socket.socket, owner: int) -> tuple[list[str], dict[str, str]]:
    """Serve requests. Return only in a forked process, with the program's arguments and environment."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    end = os.pidfd_open(owner)
    while True:
        if end in select.select([listener, end], [], [])[0]:
            os._exit(0)
        connection, _ = listener.accept()
        if os.fork():
            connection.close()
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        listener.close()
        os.close(end)
        size, fds, _, _ = socket.recv_fds(connection, NUMBER, 250)
        told = b""
        while len(told) < int.from_bytes(size, "big"):
            told += connection.recv(1 << 20)
        words, places, folder, environment = json.loads(told)
        if process := os.fork():
            for fd in fds:
                os.close(fd)
            _, status = os.waitpid(process, 0)
            with contextlib.suppress(BrokenPipeError):  # the caller has ended
                connection.send(os.waitstatus_to_exitcode(status).to_bytes(NUMBER, "big", signed=True))
            os._exit(0)
        connection.close()
        if "RAY_RAYLET_PID" in environment:
            os.setpgrp()  # Ray kills the group of a process that ends
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for place, fd in enumerate(fds, FREE):
            os.dup2(fd, place)
            os.close(fd)
        for place, fd in enumerate(places, FREE):
            os.dup2(place, fd)
            os.close(place)
        os.chdir(folder)
        return words, environment


def begin(words: list[str], environment: dict[str, str]) -> None:
    """Run what ``python`` would run with these arguments."""
    os.environ.clear()
    os.environ.update(environment)
    sys.path.remove(str(Path(__file__).parent))
    there = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in there if path and path not in sys.path]
    sys.stdout.reconfigure(line_buffering=True)
    while words[0].startswith("-") and words[0] != "-c":
        words.pop(0)
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(words[1], main.__dict__)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "ray":
    raylet = os.environ["RAY_RAYLET_PID"]
    address = str(Path(os.environ["HEADRACE_KEPT"], raylet))
    start(address, int(raylet), os.environ | {"RAY_JOB_ID": "ffffffff"})  # a task brings its own job
    of_setup = ("--language=", "--serialized-runtime-env-context=")
    sys.exit(run(address, [word for word in sys.argv[1:] if not word.startswith(of_setup)]))

if __name__ == "__main__":
    if sys.argv[1] == "run":
        sys.exit(run(sys.argv[2], sys.argv[3:]))
    for name in IMPORTED:
        importlib.import_module(name)
    for name in OPTIONAL:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    begin(*forked(socket.socket(socket.AF_UNIX, fileno=int(sys.argv[2])), int(sys.argv[3])))
