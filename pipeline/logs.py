"""What a pipeline says to Python's `logging`, for programs in which nobody reads a report.

INFO: a batch was refused, and why. DEBUG: where the rows of each batch went, which reads the device.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from .ledger import Ledger
from .wording import printable

log = logging.getLogger(__name__.rpartition(".")[0])


@contextmanager
def logging_refusals() -> Iterator[None]:
    """Log an error of a batch on its way to the caller, who may be a worker process that nobody sees."""
    try:
        yield
    except Exception as err:
        log.info("a batch was refused: %s", printable(str(err), keep="\n"))
        raise


def log_batch(ledger: Ledger | None) -> None:
    """Log where the rows of a batch went. No device read where DEBUG is off."""
    if ledger is not None and log.isEnabledFor(logging.DEBUG):
        log.debug("a batch: %s", trained_in_words(ledger.numbers()))


def trained_in_words(numbers: Mapping[str, float]) -> str:
    """The numbers of a ledger as a line.

    Example:
        >>> trained_in_words({"rows/in": 4.0, "rows/trained": 3.0, "out/gate/failed": 1.0, "out/a/b": 0.0})
        '3 of 4 rows trained; out: gate/failed 1 row'
    """
    units = [name.removesuffix("/in") for name in numbers if name.endswith("/in") and name.count("/") == 1]
    said = [f"{numbers[f'{unit}/trained']:.0f} of {numbers[f'{unit}/in']:.0f} {unit}" for unit in units]
    out = [
        f"{name.removeprefix('out/')} {count:.0f} row{'s' * (count != 1)}"
        for name, count in numbers.items()
        if name.startswith("out/") and count
    ]
    return f"{', '.join(said)} trained" + (f"; out: {', '.join(out)}" if out else "")
