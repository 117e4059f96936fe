"""Make docs/beside.md from the results of `make test-light`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "beside.md"
RESULTS = PAGE.with_suffix(".json")
HEAD = """# headrace beside other packages

headrace is installed into the environment of your trainer, and must change nothing there. `make test-light`
makes each environment of this table from the package index: first the other packages, then
headrace's wheel. For NeMo RL it also clones the repository. It requires that

- `pip check` finds no new conflict, and no version of another package changes;
- the commands below end without an error;
- the tests of verl that need no GPU end as they did before.

`make test-light ARGS=verl` does this for one line. All of them were run with Python 3.11 on a CPU.

| beside | tensordict | torchrl | numpy | hydra-core | pyarrow | result |
|---|---|---|---|---|---|---|
"""
PARTS = ("tensordict", "torchrl", "numpy", "hydra-core", "pyarrow")
NOTES = """
What runs in each:

{commands}
- Python 3.10, 3.12 and 3.13: the sources compile, with warnings as errors, and all recipes compose. Without
  torch; nothing else was run there.

What was not installed: for the lines "pip finds versions", pip was only asked whether the packages go
together. These trainers need a GPU's packages to be built. OpenRLHF requires flash-attn, which is
compiled with CUDA, so it is installed without what it requires; what runs there does not call flash-attn
or vLLM. torchrl 0.14.1 needs tensordict ≥ 0.14.3, so the extra `torchrl` does not go into an environment
with verl 0.9.1, which allows at most 0.10.

Where TorchRL is not installed, its part of headrace says so: "TokenGRPOLoss needs TorchRL: pip install
'headrace[torchrl]'". These names need it: `TokenGRPOLoss`, `DrainWriter`, `GroupUnit`, `AssembleOnWrite`,
`PipelineHook`, the environment of the demo, and `task=train`. Everything else works the same: the numbers
are equal bit for bit, and a pipeline that was pickled with TorchRL loads without it.
"""


def said(result: dict[str, Any] | None) -> str:
    """The result of an environment, for the table."""
    if result is None:
        return "not run yet"
    if "failed" in result:
        return f"failed: {result['failed']}".replace("|", "\\|").replace("\n", " ")[:300]
    if "resolved" in result:
        return "pip finds versions"
    own = f"; {result['own_tests']} own tests as before" if "own_tests" in result else ""
    return f"passes{own}"


def files() -> dict[Path, str]:
    """The page, with its text."""
    from beside import BESIDE

    results = json.loads(RESULTS.read_text())
    lines = []
    for name in BESIDE:
        versions = results.get(name, {}).get("versions", {})
        cells = [versions.get(part, "–" if versions else "") for part in PARTS]
        lines.append(f"| {' | '.join([BESIDE[name].title, *cells, said(results.get(name))])} |")
    commands = [
        f"- {each.title}: "
        + ", then ".join(f"`pip install {part}`" for part in each.packages.split(" ; "))
        + "".join(f", then `python {arguments}`" for arguments in each.runs)
        for each in BESIDE.values()
        if not (each.asks_only or each.python)
    ]
    notes = NOTES.format(commands="\n".join(commands))
    return {PAGE: HEAD + "\n".join(lines) + "\n" + notes}
