"""Handle the arguments of the command line before Hydra: commands without a task, and mistakes."""

from __future__ import annotations

import glob
import re
import shlex
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from itertools import accumulate, takewhile
from pathlib import Path
from typing import NoReturn

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from headrace.installed import PACKAGES, versions
from headrace.pipeline.composing.compose import (
    PARTS,
    TASKS,
    ConfigError,
    compose_config,
    example_of,
    for_hydra,
    known_parts,
    options_meant,
    recipes,
)
from headrace.pipeline.tools.dumps import missing_path
from headrace.spelling import closest, suggest

ABSENT = object()
CONF = Path(str(files("headrace.conf")))
OF_FILTER = "pipeline.stages.filter.criterion"
DATED = "outputs/DATE/TIME"  # the output folder, unless hydra.run.dir is set
ALONE = ("recipes", "stages", "doctor", "help", "version", "view")
DUMPS = (
    ".jsonl",
    ".parquet",
    ".pt",
    ".gz",
    ".json",
)  # an argument with such a suffix and no = may be a file
SHOWN = ("--help", "-h", "--version", "-m", "--multirun", "--cfg", "--resolve", "--hydra-help")
OF_ANY_RECIPE = r"pipeline\.stages\.\w+(\.|=null$)"  # composed with a ++, because grpo may lack the stage
BASES = {  # base classes for users, with the title of their section in CONTRIBUTING.md
    "BatchTransform": "A new stage",
    "Criterion": "A new criterion",
    "RewardShaping": "A new reward shaping",
    "TokenTerm": "A new token term",
}
INSTEAD = {  # flags and commands of other programs, and what to use here
    "list": "headrace recipes",
    **dict.fromkeys(("demo", "run"), "headrace pipeline=NAME, or for the demo headrace alone"),
    **dict.fromkeys(("plot", "show"), "headrace view FOLDER"),
    "verbose": "hydra.verbose=true",
    "v": "headrace --version",
    "skip_bad": "source.skip_bad=true",
}


def answer(arguments: Sequence[str]) -> int | None:
    """Run a command that is not a task, such as ``headrace recipes``.

    Args:
        arguments: the arguments of the command line.

    Returns:
        The exit status, or None if the arguments ask for a task.

    Raises:
        ConfigError: a name is unknown.
    """
    first, alone = arguments[0] if arguments else "", len(arguments) == 1
    if first == "view":
        from headrace.pipeline.tools.view import view  # needs pyarrow

        return view(arguments[1:])
    if first == "doctor" and alone:
        from .doctor import examine  # imports torch if possible

        return examine()
    if first == "help" or any(each in ("--help", "-h") for each in arguments):
        tasks = [
            each.removeprefix("task=") for each in arguments if each.startswith("task=") or each in TASKS
        ]
        print(help_of_task(tasks[-1]) if tasks else help_text())
    elif first == "version" or "--version" in arguments:
        found = versions()
        print("\n".join(f"{name} {found.get(name) or 'is not installed'}" for name in PACKAGES))
    elif first in ("recipes", "stages") and len(arguments) == 2:
        path = find_file(first.removesuffix("s"), arguments[1])
        print(path.read_text(encoding="utf-8").rstrip() if first == "recipes" else describe_node(path))
    elif first == "recipes" and alone:
        print(list_files({name: CONF / "pipeline" / f"{name}.yaml" for name in recipes()}))
        print("\nheadrace pipeline=NAME uses a recipe, and headrace recipes NAME prints its file.")
    elif first == "stages" and alone:
        for folder, title in (("stage", "stages"), ("criterion", "criteria"), ("term", "token terms")):
            nodes = {path.stem: path for path in sorted((CONF / folder).glob("*.yaml"))}
            print(f"{title}\n{list_files(nodes)}\n")
        print("headrace stages NAME prints the options of a stage.")
    else:
        return None
    return 0


def hydra_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments for Hydra: flags first, then the others as :func:`for_hydra` returns them.

    Raises:
        ConfigError: a flag or an argument is wrong. The message suggests what may be meant.
    """
    for at, argument in enumerate(arguments):
        if argument.partition("=")[0].lstrip("-+") == "resume":
            raise ConfigError(
                f"{argument}: the command resumes no run. A loop of your own can, with headrace.Checkpoint "
                "(docs/resume.md)"
            )
        if argument.startswith("-"):
            _check_flag(argument, arguments, at)

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message}; headrace --help lists the options")

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    read, _ = parser.parse_known_intermixed_args(list(arguments))
    if read.package is not None and not read.cfg:
        meant = f"pipeline={read.package}" if read.package in recipes() else "pipeline=NAME for a recipe"
        raise ConfigError(f"unknown option '-p' (did you mean {meant}?); headrace --help lists the options")
    if read.multirun and read.cfg:
        raise ConfigError(
            "--cfg prints the configuration of one job, and -m runs several jobs: use one of the two"
        )
    if read.multirun and not any(map(_has_several_values, read.overrides)):
        raise ConfigError(
            "-m runs a job for each value of an option, and no option has several values: headrace -m "
            "seed=1,2; leave -m out to run one job"
        )
    for at, argument in enumerate(read.overrides):
        if "=" not in argument and not argument.startswith("~"):
            raise ConfigError(_of_bare_word(argument, read.overrides, at))
        if re.fullmatch(r"(pipeline|task|report)=(null)?", argument):
            raise ConfigError(f"{argument}: a name is required; headrace --help lists the options")
        if re.fullmatch(r"hydra\.(run|sweep)\.dir=(null|''|\"\")?", argument):
            raise ConfigError(f"{argument}: an output folder is required; leave it out for {DATED}")
    values = [each for each in arguments if each in read.overrides]
    flags = [each for each in arguments if each not in read.overrides]
    if "task=xray" in values:  # for Hydra, `source` is the node of a dump
        values = [f"xray.{each}" if each.startswith("source=") else each for each in values]
    ready = for_hydra(values)
    if any(each.startswith("pipelines=") for each in values):  # one of the recipes may lack a stage
        ready = [each for one in ready for each in _of_any_recipe(one)]
    return [*flags, *(_of_swept_recipes(ready) if read.multirun else ready)]


def _of_any_recipe(override: str) -> list[str]:
    """Return overrides that set an option of a stage even if the recipe does not have the stage.

    Example:
        >>> _of_any_recipe("pipeline.stages.overlong.cache=4"), _of_any_recipe("seed=1")
        (['++pipeline.stages.overlong.cache=4'], ['seed=1'])
        >>> _of_any_recipe("~pipeline.stages.advantage.scale=group")[0]
        '++pipeline.stages.advantage.scale=group'
    """
    if override.startswith("~pipeline.stages."):
        key, _, value = override[1:].partition("=")
        return [f"++{key}={value or 0}", override]  # Hydra cannot delete null
    return [re.sub(f"^{OF_ANY_RECIPE}", r"++\g<0>", override)]


def _of_swept_recipes(overrides: list[str]) -> list[str]:
    """Return the overrides of a sweep. If it sweeps recipes, options of the pipeline get a ++.

    Hydra also composes these options with the default recipe, which may lack their stages.

    Raises:
        ConfigError: a recipe of the sweep does not have an option.

    Example:
        >>> _of_swept_recipes(["pipeline=tis,mis", "pipeline.stages.correction.level=token"])
        ['pipeline=tis,mis', '++pipeline.stages.correction.level=token']
    """
    several = [each for each in overrides if _has_several_values(each)]
    swept = next((each for each in several if each.startswith("pipeline=")), None)
    fixed = [each for each in overrides if each not in several]
    own = [each for each in fixed if "pipeline." in each.partition("=")[0]]
    if swept is None or not own:
        return overrides
    shared = [each for each in fixed if re.match(r"\w+=|hydra\.searchpath=", each)]  # these choose files
    for recipe in swept.partition("=")[2].split(",") if re.fullmatch(r"pipeline=[\w/,]+", swept) else ():
        compose_config("config", *shared, f"pipeline={recipe}", *own)
    return [f"++{each}" if each in own and each.startswith("pipeline.") else each for each in overrides]


def _has_several_values(argument: str) -> bool:
    """Whether an override has several values, so that -m runs several jobs."""
    if argument.startswith("hydra.sweeper."):
        return True
    try:
        return OverridesParser.create().parse_override(argument).is_sweep_override()
    except HydraException:
        return "=" in argument


def _is_closed(text: str) -> bool:
    """Whether each bracket of an argument is closed."""
    return len(re.findall(r"[\[{]", text)) == len(re.findall(r"[\]}]", text))


def _word_at(arguments: Sequence[str], at: int) -> str:
    """The argument at an index; empty behind the last one."""
    return [*arguments[at:], ""][0]


def _of_bare_word(argument: str, arguments: Sequence[str], at: int) -> str:
    """Return a message for an argument without a value, with what may be meant.

    Args:
        argument: the argument, without ``=``.
        arguments: all arguments without flags.
        at: index of `argument` in `arguments`.
    """
    said = f"an option is NAME=VALUE; got {argument!r}"
    before, after = arguments[at - 1] if at else "", _word_at(arguments, at + 1)
    if argument in ALONE:
        takes = {"recipes": " [NAME]", "stages": " [NAME]", "view": " FOLDER [FOLDER2]"}.get(argument, "")
        return f"{said}; headrace {argument}{takes} is a command of its own, without options"
    paths = [each for each in arguments if "=" not in each and _may_be_dump(each)]
    if argument in TASKS and len(paths) in ((1, 2) if argument == "compare" else (1,)):
        others = [each for each in arguments if each not in (argument, *paths)]
        if argument == "compare" and not any(each.startswith("pipelines=") for each in others):
            others.append("pipelines=[as/verl,grpo]")
        known = shlex.join(["headrace", f"task={argument}", f"source.path={paths[0]}", *others])
        view = shlex.join(["headrace", "view", *paths])
        return f"{said} (did you mean {f'{view}, for two runs, or ' * (len(paths) == 2)}{known}?)"
    if argument in TASKS or argument in recipes():
        known = f"{'task' if argument in TASKS else 'pipeline'}={argument}"
        if before.rstrip("=") and before.endswith("="):  # `pipeline= grpo`
            known = f"{before}{argument}"
        return f"{said} (did you mean {known}?)"
    for start in range(at):  # the shell cuts `columns={group: id, reward: r}` at its spaces
        pieces = accumulate(arguments[start:], "{} {}".format)
        whole = next((piece for piece in pieces if _is_closed(piece)), "")
        if not _is_closed(arguments[start]) and whole:
            return f"{said}: a value with spaces goes in quotes (did you mean {shlex.quote(whole)}?)"
    if _may_be_dump(argument):
        if any(other.startswith("source.path=") for other in arguments):
            return (
                f"{said}: source.path is one file, folder or glob. If your shell has made several files of "
                "a glob, quote it: 'source.path=dump/*.jsonl'"
            )
        lacks = missing_path(argument)
        return f"{said} (did you mean 'source.path={argument}'?)" + f". But {lacks}" * bool(lacks)
    if argument in INSTEAD:
        instead = INSTEAD[argument].replace("NAME", after if after in recipes() else "NAME")
        return f"{said} (did you mean {instead}?)"
    if f"{argument}s" in ALONE:
        return f"{said} (did you mean headrace {argument}s?)"
    name, colon, value = argument.partition(":")
    if meant := _option_of(name, arguments):
        if not colon:
            value = _word_at(arguments, at + 2) if after == "=" else after.removeprefix("=")
        typed = " or ".join(f"{other}={value or 'VALUE'}" for other in meant)
        return f"{said} (did you mean {typed}?)"
    every = {name: f"headrace {name}" for name in ALONE} | {name: f"task={name}" for name in TASKS}
    every |= {name: f"pipeline={name}" for name in recipes()}
    close = closest(argument, every)
    return said + (f" (did you mean {' or '.join(every[name] for name in close)}?)" if close else "")


def _may_be_dump(argument: str) -> bool:
    """Whether an argument is an existing path or a glob, or has the suffix of a dump."""
    return glob.has_magic(argument) or Path(argument).exists() or Path(argument).suffix in DUMPS


def _option_of(name: str, arguments: Sequence[str]) -> list[str]:
    """The dotted options that an undotted name may mean; empty if there is no such option.

    Without a task among the arguments, an option of a dump is returned with its task.
    """
    task = [each for each in arguments if re.fullmatch(r"task=\w+", each)]
    try:
        config = compose_config("config", *task)
    except ConfigError:
        return []
    if name in ("task", "pipeline") or OmegaConf.select(config, name, default=ABSENT) is not ABSENT:
        return [name]
    meant = options_meant(name, config)
    if not task and (not meant or meant[0].startswith("source.")):
        return [f"task=replay {each}" for each in _option_of(name, ["task=replay"])]
    return meant


def _check_flag(argument: str, arguments: Sequence[str], at: int) -> None:
    """Check that Hydra knows a flag.

    Args:
        argument: the flag, with its dashes.
        arguments: all arguments.
        at: index of `argument` in `arguments`.

    Raises:
        ConfigError: Hydra does not know the flag.
    """
    known = list(get_args_parser()._option_string_actions)
    flag, equals, value = argument.partition("=")
    if flag in known:
        return
    name = flag.lstrip("-").replace("-", "_")
    after = _word_at(arguments, at + 1)
    if not equals and "=" not in after:
        value = after
    meant = [INSTEAD[name]] if name in INSTEAD else []
    if len(name) > 1 and not meant:
        meant = [f"{other}={value or 'VALUE'}" for other in _option_of(name, arguments)]
    hint = f" (did you mean {' or '.join(meant)}?)" if meant else suggest(flag, SHOWN)
    raise ConfigError(f"unknown option {flag!r}{hint}; headrace --help lists the options")


def help_text() -> str:
    """The help of the command."""
    return (files(__package__) / "help.txt").read_text(encoding="utf-8").rstrip()


def help_of_task(name: str) -> str:
    """The help of a task: what it does, and its options with their defaults, as they are typed.

    Args:
        name: name of the task.

    Raises:
        ConfigError: there is no such task.
    """
    path = CONF / "task" / f"{name}.yaml"
    if name not in TASKS or not path.exists():
        hint = suggest(name, TASKS, 1, 0.6)
        raise ConfigError(f"unknown task {name!r}{hint}; choose from {', '.join(TASKS)}")
    text = path.read_text(encoding="utf-8")
    said = [line[2:] for line in text.splitlines() if line.startswith("# ") and "@package" not in line]
    options = options_in(text)
    for group, file in re.findall(r"^  - /(\w+): (\w+)", text, re.MULTILINE):  # no entries with a package
        more = (CONF / group / f"{file}.yaml").read_text(encoding="utf-8")
        options += options_in(more, "" if "@package _global_" in more else f"{group}.")
    options = [each for each in options if each[0] != "task" and "${" not in each[1]]  # no references
    shown = [f"headrace task={name}", "", *said, "", "Options"]
    shown += _with_comments((f"{option}={value}", comment) for option, value, comment in options)
    shown += ["", f"headrace --cfg job task={name} also prints the options of the recipe and of the report."]
    return "\n".join(shown)


def _with_comments(options: Iterable[tuple[str, str]]) -> list[str]:
    """Lines of help: an option as it is typed, and its comment to the right."""
    options, shown = list(options), list[str]()
    width = min(max((len(typed) for typed, _ in options), default=0), 44) + 4
    for typed, comment in options:
        start = f"  {typed}"
        if len(start) > width - 2 and comment:
            shown, start = [*shown, start], ""
        wrapped = textwrap.wrap(comment, max(100 - width, 20)) or [""]
        shown += [f"{start:{width}}{wrapped[0]}".rstrip(), *(" " * width + line for line in wrapped[1:])]
    return shown


def options_in(text: str, prefix: str = "") -> list[tuple[str, str, str]]:
    """The options of a configuration file, each with its full name, default and comment.

    Args:
        text: YAML, with nodes as indented lines and values on one line.
        prefix: put before each name.

    Example:
        >>> options_in("plan:\\n  group_sizes: [2, 4] # to compare\\n", "task.")
        [('task.plan.group_sizes', '[2,4]', 'to compare')]
    """
    options: list[tuple[str, str, str]] = []
    outer: dict[int, str] = {}  # the nodes around a line, by their indentation
    for line in text.splitlines():
        found = re.fullmatch(r"( *)(\w+):(?: ([^#]\S*(?: [^#\s]\S*)*))?(?:\s+# (.*))?", line)
        if found is None or found[2] in ("defaults", "_target_"):
            continue
        indent, name, value, comment = found.groups()
        outer = {depth: node for depth, node in outer.items() if depth < len(indent)}
        if value is None:
            outer[len(indent)] = name
        else:
            full = prefix + ".".join([*outer.values(), name])
            options.append((full, value.replace(", ", ","), comment or ""))
    return options


def find_file(kind: str, name: str) -> Path:
    """The YAML file of a recipe, or of a stage, criterion or term.

    Args:
        kind: ``recipe`` or ``stage``.
        name: name of the file, or of the class that is its ``_target_``.

    Raises:
        ConfigError: there is no such file.
    """
    folders = ["pipeline"] if kind == "recipe" else ["stage", "criterion", "term"]
    found = {
        path.relative_to(CONF / folder).with_suffix("").as_posix(): path
        for folder in folders
        for path in sorted((CONF / folder).rglob("*.yaml"))
    }
    texts = {each: path.read_text(encoding="utf-8").rstrip() for each, path in found.items()}
    made = {each: re.search(r"^_target_: headrace\.transforms\.(\w+)$", texts[each], re.M) for each in found}
    known = {of[1]: found[each] for each, of in reversed(made.items()) if of} | found
    if name == "NAME":
        raise ConfigError(f"NAME stands for the name of a {kind}; headrace {kind}s lists all")
    if kind == "stage" and name in BASES:
        raise ConfigError(
            f"{name} has no options: it is a base class, from which you derive classes of your own. "
            f"CONTRIBUTING.md says how, under '{BASES[name]}'"
        )
    if name not in known:
        meant = suggest(name, [*known, *(BASES if kind == "stage" else ())])
        raise ConfigError(f"unknown {kind} {name!r}{meant}; headrace {kind}s lists all")
    return known[name]


def describe_node(path: Path) -> str:
    """The help of a stage, criterion or term: what it does, its options, and examples of overrides.

    Args:
        path: its YAML file, which has a line on its origin, the text of its class, and the options with
            comments.
    """
    kind, name = path.parent.name, path.stem
    head, _, body = path.read_text(encoding="utf-8").partition("_target_: headrace.transforms.")
    made_by, *lines = body.splitlines()
    options, above = list[tuple[str, str, str]](), list[str]()
    for line in lines:
        if found := re.fullmatch(r"(\w+): (.+?)(?: # (.*))?", line):
            said = " ".join([*above, found[3] or ""]).strip()
            if found[1] in PARTS:
                said += f"; or a name: {', '.join(known_parts(PARTS[found[1]]))}"
            options.append((found[1], found[2], said))
        above = [] if found else [*above, line[2:]]
    shown = [
        f"{name}, the {kind} {made_by}",
        "",
        *(line[2:] for line in head.splitlines()[1:]),
        "",
        "Options",
    ]
    shown += _with_comments(
        (option, f"(required) {comment}")
        if value == "???"
        else (option if "${" in value else f"{option}={value}", comment)  # ${…}: an option of the pipeline
        for option, value, comment in options
    )
    needed = [f"{option}={example_of(option, 'VALUE')}" for option, value, _ in options if value == "???"]
    with_value = [
        f"{option}={value}" for option, value, _ in options if not re.search(r"[$?\[]|null|inf", value)
    ]
    whole = "pipeline.stages.mine"
    own, typed = {
        "stage": (whole, [f"{whole}={name}"]),
        "term": (f"{whole}.term", [f"{whole}=token_advantage", f"{whole}.term={name}"]),
        "criterion": (OF_FILTER, [f"{OF_FILTER}={name}"]),
    }[kind]
    typed += [f"{own}.{each}" for each in needed or with_value[:1]]
    typed += ["pipeline.after.mine=STAGE"] * (kind != "criterion")
    return "\n".join([*shown, "", "Example", f"  headrace {' '.join(typed)}"])


def list_files(paths: Mapping[str, Path]) -> str:
    """A list of files: the name of each, and the first paragraph of the comment at its head."""
    width = max(map(len, paths))
    room = max(min(shutil.get_terminal_size((100, 24)).columns, 120) - width - 4, 20)
    lines = []
    for name, path in paths.items():
        top = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
        head = [line[1:].strip() for line in top if not line.startswith(("# @package", "# Generated"))]
        first, *more = textwrap.wrap(" ".join(takewhile(bool, head)), room, break_on_hyphens=False)
        lines += [f"  {name:{width}}  {first}", *(f"{'':{width + 4}}{line}" for line in more)]
    return "\n".join(lines)
