"""Read and run modules of other projects from installed packages and git repositories."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "LOST_ROLLOUTS_SOURCES"
DEFAULT = Path(__file__).parents[2] / "build" / "lost_rollouts"


class Blocks(Exception):
    """A coroutine would have to wait."""


@dataclass(frozen=True)
class Source:
    """A project at one version: a package of the index, or a commit of a repository."""

    project: str
    name: str
    """The name of the project's folder and package."""
    version: str
    url: str = ""
    """Address of the git repository, or empty if the project is a package."""

    @property
    def folder(self) -> Path:
        return Path(os.environ.get(VARIABLE, DEFAULT)) / self.name

    def fetch(self) -> None:
        """Install or clone the project, if its folder does not exist.

        Raises:
            CalledProcessError: the project cannot be installed or cloned.
        """
        if self.folder.exists():
            return
        if self.url:
            command: list[Any] = ["git", "clone", "--quiet", "--filter=blob:none", "--no-checkout", self.url]
        else:
            command = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--ignore-requires-python",
            ]
            command += [f"{self.name}=={self.version}", "--target"]
        subprocess.run([*command, self.folder], check=True, capture_output=True, text=True)

    def text(self, path: str) -> str:
        """Return the text of a module.

        Raises:
            FileNotFoundError: the package is not installed in the folder, or has another version.
            CalledProcessError: the repository or the commit does not exist.
        """
        if self.url:
            command = ["git", "-C", str(self.folder), "show", f"{self.version}:{path}"]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout
        if not (self.folder / f"{self.name}-{self.version}.dist-info").exists():
            raise FileNotFoundError(f"{self.name} {self.version} is not in {self.folder}")
        return (self.folder / path).read_text()


@contextmanager
def modules(stubs: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Make modules importable inside the block. Each has the given names."""
    made = {name: ModuleType(name) for name in stubs}
    for name, module in made.items():
        vars(module).update(stubs[name], __path__=[])
    before = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                del sys.modules[name]
            else:
                sys.modules[name] = old


def run_module(
    text: str, only: str | None = None, stubs: Mapping[str, Mapping[str, Any]] = {}, **names: Any
) -> dict[str, Any]:
    """Run a module, or one definition in it, with stubs for its imports. Return the names that it defines."""
    if only is not None:
        nodes = [node for node in ast.parse(text).body if getattr(node, "name", None) == only]
        text = "from __future__ import annotations\n" + "\n".join(map(ast.unparse, nodes))
    module = ModuleType("peer")
    vars(module).update(names)
    sys.modules["peer"] = module  # where dataclasses look for the module
    with modules(stubs):
        exec(compile(text, "peer", "exec"), vars(module))
    return vars(module)


def result_of(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine.

    Raises:
        Blocks: the coroutine would have to wait.
    """
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise Blocks
