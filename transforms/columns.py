"""Where each column is in a batch: its default key and what it holds, stated once for all stages.

A stage takes another key as the keyword ``<role>_key``; in the table a column goes by its role.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypedDict

from tensordict import NestedKey

from .options import nested_key, takes_options
from .schema import DONE, EXPECTED_SEGMENTS, INIT, MINIBATCH, RETURN, REWARD


class Role(NamedTuple):
    """A column that somebody brings, or that stages write."""

    default: NestedKey | None
    """Its key, where nobody gives another."""
    holds: str
    optional: bool = False
    """Whether its key may be None."""


ID = "(N,) or (N, 1) int ≥ 0, or text"
COLUMNS: dict[str, Role] = {
    "group": Role("group_id", f"{ID}: rollouts that are compared"),
    "rollout": Role("rollout_id", f"{ID}: rows of one execution; None: each row is one", True),
    "reward": Role(("next", "reward"), "(N,), (N, 1), (N, 1, 1) or (N, K) float, of the row's rollout"),
    "advantage": Role("advantage", "(N,) and trailing ones, or (N, T, 1) float"),
    "status": Role(None, 'how a rollout ended; None: ("next", "status"), else "status", if there', True),
    "version": Role(("next", "policy_version"), "(N,) or (N, 1) int: which policy acted"),
    "expected": Role("expected_rollouts", "(N,) or (N, 1) int ≥ 1: rollouts that the group was given"),
    "done": Role(DONE, "(N,) or (N, 1) bool, True where a rollout ends; None: all have", True),
    "init": Role(INIT, "(N,) or (N, 1) bool, True where a rollout begins; None: all rows are there", True),
    "segment": Role(None, "(N,) or (N, 1) int: order of segments that end each by themselves", True),
    "expected_segments": Role(EXPECTED_SEGMENTS, "(N,) or (N, 1) int ≥ 1: segments that end"),
    "turn": Role(None, "(N,) or (N, 1) int: order of a rollout's rows; None: that of the batch", True),
    "state": Role("state_id", f"{ID}: from which state a step started"),
    "parent": Role("parent_id", f"{ID}: the rollout that a rollout was forked from; −1: none"),
    "baseline": Role(None, "ids by which rewards are remembered; None: one mean for all", True),
    "loss_mask": Role(("masks", "all_assistant_mask"), "(N, T) bool, True at tokens in the loss"),
    "attention": Role(("masks", "all_attention_mask"), "(N, T) bool, True at tokens that are no padding"),
    "length": Role(("masks", "all_attention_mask"), "(N, T) bool, True at tokens that cost something"),
    "tokens": Role(("tokens", "full"), "(N, T) int: the token ids"),
    "turn_index": Role("turn_index", "(N, T) int, −1 outside of turns; None: rows are turns", True),
    "turn_reward": Role("turn_reward", "(N, T) float by token, or (N, K) by turn"),
    "log_prob": Role(("log_probs", "full"), "(N, T) float, which the loss reads; None: not looked at", True),
    "old_log_prob": Role(("old_log_probs", "full"), "(N, T) float, of the policy before the step"),
    "sampler_log_prob": Role(("log_probs", "full"), "(N, T) float, of the policy that sampled"),
    "numerator": Role(("teacher_log_probs", "full"), "(N, T) float: log-probabilities above the line"),
    "denominator": Role(("log_probs", "full"), "(N, T) float: log-probabilities below the line"),
    "value": Role(("entropy", "full"), "(N, T) float: the number of a token that is compared"),
    "importance": Role("importance_weight", "(N, T) float: the weights, written"),
    "weight": Role("loss_weight", "(N,) float: what a row's tokens weigh in the loss"),
    "truncated": Role(None, "(N,) or (N, 1) bool, read in place of the status where it is given", True),
}

# The roles that every stage may ask its rows for, whatever options it has.
DEFAULTS: dict[str, NestedKey | None] = {
    role: COLUMNS[role].default
    for role in (
        *("group", "rollout", "reward", "advantage", "status", "version", "expected", "done", "init"),
        *("expected_segments", "segment", "turn", "loss_mask", "log_prob", "weight"),
    )
}

# The roles of numbers that a token has, which a loss may read.
OF_TOKENS = (
    "log_prob",
    "old_log_prob",
    "sampler_log_prob",
    "numerator",
    "denominator",
    "value",
    "importance",
)
REFERENCE: tuple[NestedKey, ...] = (("ref_log_probs", "full"), ("next", "ref_log_probs", "full"))

# The columns that a stage writes for later ones, and which stage.
WRITERS: dict[NestedKey, str] = {REWARD: "FanOutCollapse", RETURN: "RewardsToGo", MINIBATCH: "ShuffleSplit"}


class ColumnNames(TypedDict, total=False):
    """The keywords by which a stage finds columns under other names; what each holds says :data:`COLUMNS`."""

    group_key: NestedKey | None
    rollout_key: NestedKey | None
    reward_key: NestedKey
    advantage_key: NestedKey
    status_key: NestedKey | None
    version_key: NestedKey
    expected_key: NestedKey
    done_key: NestedKey | None
    init_key: NestedKey | None
    segment_key: NestedKey | None
    expected_segments_key: NestedKey
    turn_key: NestedKey | None
    state_key: NestedKey
    parent_key: NestedKey
    baseline_key: NestedKey | None
    loss_mask_key: NestedKey
    attention_key: NestedKey | None
    length_key: NestedKey
    tokens_key: NestedKey
    turn_index_key: NestedKey | None
    turn_reward_key: NestedKey
    log_prob_key: NestedKey | None
    old_log_prob_key: NestedKey
    sampler_log_prob_key: NestedKey
    numerator_key: NestedKey
    denominator_key: NestedKey
    value_key: NestedKey
    importance_key: NestedKey
    weight_key: NestedKey
    truncated_key: NestedKey | None


class TakesColumns:
    """What has columns by role, each of which may go by another name.

    A subclass says which: ``class Mine(BatchTransform, columns=("group", "reward"))``, takes
    ``**names: Unpack[ColumnNames]``, and calls ``self.name_columns(names)`` first. It then has `group_key`
    and `reward_key`, also in its signature. Its numbers are checked against their annotations
    (:func:`takes_options`).

    Class arguments:
        columns: roles of :data:`COLUMNS`, in place of those of the class above; a list, also of one.
        needed: those of them whose key may not be None in this class, though it may in others.
        optional: those of them whose key may be None in this class, though it may not in others.
        unset: those of them whose key is None in this class, unless it is given.

    Example:
        >>> class Mine(TakesColumns, columns=("group", "reward")):
        ...     def __init__(self, *, low: float, **names):
        ...         self.name_columns(names)
        ...         self.low = low
        >>> Mine(low=1.0, reward_key="score").reward_key, Mine(low=1.0).group_key
        ('score', 'group_id')
    """

    _columns: ClassVar[dict[str, Role]] = {}

    if TYPE_CHECKING:  # `<role>_key` of each

        def __getattr__(self, name: str) -> Any: ...

    def __init_subclass__(
        cls,
        columns: Sequence[str] | None = None,
        needed: Sequence[str] = (),
        optional: Sequence[str] = (),
        unset: Sequence[str] = (),
        **others: Any,
    ) -> None:
        super().__init_subclass__(**others)
        if "__init__" in vars(cls):
            takes_options(cls)
        if unknown := [role for role in columns or () if role not in COLUMNS]:
            there = ", ".join(COLUMNS)
            raise TypeError(f"{cls.__name__}: there is no column {unknown[0]!r}; there are {there}")
        if columns is not None:
            cls._columns = {role: COLUMNS[role] for role in columns}
            cls._columns |= {role: COLUMNS[role]._replace(optional=False) for role in needed}
            cls._columns |= {role: COLUMNS[role]._replace(optional=True) for role in optional}
            cls._columns |= {role: COLUMNS[role]._replace(default=None, optional=True) for role in unset}
        spelt_out = inspect.signature(cls.__init__)
        parameters = [each for each in spelt_out.parameters.values() if each.name != "self"]
        if parameters and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD and cls._columns:
            parameters[-1:] = [
                inspect.Parameter(
                    f"{role}_key",
                    inspect.Parameter.KEYWORD_ONLY,
                    default=column.default,
                    annotation="NestedKey | None" if column.optional else "NestedKey",
                )
                for role, column in cls._columns.items()
            ]
        cls.__signature__ = spelt_out.replace(parameters=parameters)  # type: ignore[attr-defined]

    def name_columns(self, names: Mapping[str, Any]) -> None:
        """Keep where each column is, as ``<role>_key``.

        Args:
            names: keys by option, of those that have another name than usual.

        Raises:
            TypeError: an option that this does not have.
            ValueError: None for a column that is needed.
        """
        owner, options = type(self).__name__, [f"{role}_key" for role in self._columns]
        if unknown := sorted(names.keys() - set(options)):
            raise TypeError(
                f"{owner} takes no option {unknown[0]!r}; of columns it takes {', '.join(options)}"
            )
        for option, (role, column) in zip(options, self._columns.items(), strict=True):
            key = nested_key(names.get(option, column.default))
            if key is None and not column.optional:
                raise ValueError(f"{owner} needs the column {role!r}: {option} may not be None")
            setattr(self, option, key)
