"""What the stages of a pipeline require of one batch, and when that is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor, nn

from headrace.transforms.checks import Rule, explain, read_columns
from headrace.transforms.distributed import OtherRankError, Ranks
from headrace.transforms.door import labels_in_errors
from headrace.transforms.errors import BatchError
from headrace.transforms.options import one_of
from headrace.transforms.schema import has_key

from .stage import with_stage

Validate = Literal["at_once", "deferred"]


def check_validate(validate: str, process_group: Any) -> Validate:
    """Check the option.

    Raises:
        ValueError: it is none, or ranks share the batches.
    """
    chosen = one_of("validate", validate, get_args(Validate))
    if chosen == "deferred" and process_group is not None:
        raise ValueError("validate='deferred' is for one process: ranks say what they refuse when they meet")
    return chosen


class Rules:
    """The rules of one batch, each with the stage that makes it; errors name the stage.

    Args:
        stages: by name.
        ranks: that share the batch; None: this process has the whole of it.
    """

    def __init__(self, stages: Mapping[str, nn.Module], ranks: Ranks | None = None):
        self.stages, self.ranks = stages, ranks
        self.unread: list[tuple[str, Rule]] = []
        self._named: BaseException | None = None

    def add(self, name: str, rules: Sequence[Rule]) -> None:
        """Rules of a stage. Not read yet."""
        self.unread += [(name, rule) for rule in rules]

    def read(self) -> None:
        """Read all rules at once. One device read.

        Raises:
            BatchError: a rule is broken; the first stage that has one is named.
        """
        self.read_with([])

    def read_with(self, columns: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Bring (N,) int64 columns to the CPU, and read all rules on the way. One device read.

        Raises:
            BatchError: as :meth:`read`.
        """
        rules, self.unread = self.unread, []
        try:
            return read_columns(columns, [rule for _, rule in rules])
        except BatchError:
            for name, rule in rules:
                with self.naming(name):
                    explain([rule])
            raise

    @contextmanager
    def naming(self, name: str) -> Iterator[None]:
        """Name the stage in an error raised inside; what earlier stages refuse comes first, as the cause."""
        if self.ranks is not None:
            self.ranks.place = f"stage {name!r}"
        try:
            yield
        except OtherRankError:
            raise
        except Exception as err:
            if err is self._named:  # by the stage whose rule is broken, which another one has read
                raise
            self.read()
            self._named = with_stage(name, self.stages[name], err)
            raise self._named from err


class Deferred:
    """Rules of earlier batches that nobody has read. A copy, in a worker process say, begins without any."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Rules, TensorDictBase]] = []

    def put(self, rules: Rules, batch: TensorDictBase, id_keys: Sequence[NestedKey]) -> None:
        """Keep rules, and what the batch calls its rows."""
        if rules.unread:
            self._waiting.append((rules, batch.select(*(key for key in id_keys if has_key(batch, key)))))

    def read(self, id_keys: Sequence[NestedKey]) -> None:
        """Read them. One device read a batch.

        Raises:
            BatchError: a rule is broken.
        """
        while self._waiting:  # what one raises for is not lost for the others
            rules, ids = self._waiting.pop(0)
            with labels_in_errors(ids, id_keys):
                try:
                    rules.read()
                except BatchError as err:
                    raise type(err)(f"found late, after an earlier batch was handed out: {err}") from err

    def __reduce__(self) -> tuple[Callable[[], Deferred], tuple[()]]:
        return Deferred, ()


def own_numbers(batch: TensorDictBase) -> None:
    """Copy what errors may say of rows: collectors use their memory again before deferred rules are read.

    Args:
        batch: TensorDict ``[N]``, whose columns of one number a row are replaced. Those of a lazy stack are
            stacked anew by who reads them.
    """
    if isinstance(batch, LazyStackedTensorDict):
        return
    for key, value in list(batch.items(include_nested=True, leaves_only=True)):
        if isinstance(value, Tensor) and value.numel() == len(batch):
            batch.set(key, value.clone())
