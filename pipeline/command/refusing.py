"""Errors as one paragraph, in the words of the command."""

from __future__ import annotations

import os
import re
import sys

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.text import Text

from headrace.pipeline.composing import explain_composition
from headrace.pipeline.printable import printable

EARLY = (HydraException, OmegaConfBaseException, OSError, ValueError)  # before there is a task


def refuse(err: Exception, *, go_on: bool = False) -> str:
    """Print an error, with hints for a word that Hydra does not know, and exit with status 2.

    Args:
        err: one that says what is wrong with the words or the data.
        go_on: of a sweep: return what it says, in place of the exit.

    Raises:
        Exception: the error itself, where HYDRA_FULL_ERROR is 1.
        SystemExit: else.
    """
    if isinstance(err, BrokenPipeError) and _nobody_reads():
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still to be written
        sys.exit(128 + 13)  # as a program that SIGPIPE ended
    return _print_error(err, paragraph_of(err), None if go_on else 2)


def give_up(err: Exception, *, go_on: bool = False) -> str:
    """Print an error that nobody foresaw, and how to see where it comes from, and exit with status 1.

    Args:
        err: any.
        go_on: as for :func:`refuse`.

    Raises:
        Exception: the error itself, where HYDRA_FULL_ERROR is 1.
        SystemExit: else.
    """
    said = str(err) if isinstance(err, RuntimeError) else repr(err)
    hint = "This was not foreseen; HYDRA_FULL_ERROR=1 before the command shows where it comes from."
    return _print_error(err, f"{said}\n{hint}", None if go_on else 1)


def _nobody_reads() -> bool:
    """Whether what is printed has nowhere to go: behind `| head`, say, which is no error to speak of."""
    try:
        print(flush=True)  # what was to be written before is forgotten by now
    except BrokenPipeError:
        return True
    return False


def _print_error(err: Exception, text: str, status: int | None) -> str:
    if os.environ.get("HEADRACE_TRACE") == "1":
        raise err
    lines = Text(printable(text, keep="\n"))  # no words in it are markup, or emoji such as :100:
    Console(stderr=True).print(Text("headrace: ", "bold red").append_text(lines), soft_wrap=True)
    if status is not None:
        sys.exit(status)
    return text


def paragraph_of(err: Exception) -> str:
    """What an error says to who typed the words."""
    if isinstance(err, HydraException | OmegaConfBaseException):  # some of which are an OSError, too
        words = [word for word in sys.argv[1:] if "=" in word and not word.startswith("-")]
        return explain_composition(err, words, "config")
    if isinstance(err, OSError) and not isinstance(err, FileExistsError):
        reason = (err.strerror or str(err)).lower()
        where = f"{err.filename}: " if err.filename else ""
        return f"{where}{reason}. hydra.run.dir=FOLDER (with -m hydra.sweep.dir=FOLDER) is where files go"
    if str(err).startswith("Config group override"):  # Hydra does not say which
        files = [word for word in sys.argv[1:] if re.fullmatch(r"[\w/@]+=[\d.]+", word)]
        return f"{', '.join(files)} must be the name of a file, as in pipeline=grpo"
    return in_words_to_type(str(err))


def in_words_to_type(text: str) -> str:
    """What a stage says to set, as the word to type.

    Example:
        >>> in_words_to_type("stage 'gate', CompletenessGate(): group 7 has 3 of 8: set on_incomplete='drop'")
        "stage 'gate', CompletenessGate(): group 7 has 3 of 8: set pipeline.stages.gate.on_incomplete=drop"
    """
    stage = re.search(r"stage '(\w+)', ", text)
    if stage is None:
        return text

    def word(found: re.Match[str]) -> str:
        value = "null" if found[3] == "None" else found[3]
        return f"{found[1]} pipeline.stages.{stage[1]}.{found[2]}={value}"

    return re.sub(r"\b([Ss]et) (\w+)=['\"]?(\w+)['\"]?", word, text)
