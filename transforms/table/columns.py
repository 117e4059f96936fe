"""The columns of a batch: default key and content of each role, defined once for all stages.

A stage takes another key as the keyword ``<role>_key``. A stage reads a column by its role.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypedDict, cast

from tensordict import NestedKey

from .calls import no_option
from .options import nested_key, option_names, takes_options
from .schema import DONE, EXPECTED_SEGMENTS, INIT, MINIBATCH, RETURN, REWARD


class Role(NamedTuple):
    """A column of the input, or one that stages write."""

    default: NestedKey | None
    """Key of the column, unless the user gives another."""
    holds: str
    """Shape, dtype and content."""
    optional: bool = False
    """Whether the column's key may be None."""


ID = "(N,) or (N, 1) int ≥ 0, or text"
COLUMNS: dict[str, Role] = {
    "group": Role("group_id", f"{ID}: group of the row; rollouts of a group are compared"),
    "rollout": Role("rollout_id", f"{ID}: rollout of the row; None: each row is a rollout", True),
    "reward": Role(
        ("next", "reward"), "(N,), (N, 1), (N, 1, 1) or (N, K) float: reward of the row's rollout"
    ),
    "votes_only": Role(
        "votes_only",
        "(N,) or (N, 1) bool, True: the rollout is in the statistics and does not train; None: not read",
        True,
    ),
    "advantage": Role("advantage", "(N,) with trailing dimensions of size 1, or (N, T, 1) float"),
    "status": Role(None, 'how a rollout ended; None: ("next", "status"), else "status", if it exists', True),
    "version": Role(
        ("next", "policy_version"),
        "(N,) or (N, 1) int, or (N, T) per token: version of the policy that acted",
    ),
    "expected": Role("expected_rollouts", "(N,) or (N, 1) int ≥ 1: rollouts dispatched in the row's group"),
    "done": Role(DONE, "(N,) or (N, 1) bool, True on the last row of a rollout; None: all have ended", True),
    "init": Role(
        INIT, "(N,) or (N, 1) bool, True on the first row of a rollout; None: no first row is missing", True
    ),
    "segment": Role(None, "(N,) or (N, 1) int: order of the segments, each with its own end", True),
    "expected_segments": Role(
        EXPECTED_SEGMENTS, "(N,) or (N, 1) int ≥ 1: segments of the row's rollout, each with its own end"
    ),
    "turn": Role(None, "(N,) or (N, 1) int: order of a rollout's rows; None: order of the batch", True),
    "state": Role("state_id", f"{ID}: the environment's state when the row began"),
    "parent": Role("parent_id", f"{ID}: the rollout that this one was forked from; negative: none"),
    "baseline": Role(None, "ids with a running mean each; None: one running mean for all", True),
    "baseline_value": Role("baseline_value", "(N,) or (N, 1) float: baseline of the row's rollout"),
    "loss_mask": Role(("masks", "all_assistant_mask"), "(N, T) bool, True at tokens in the loss"),
    "attention": Role(("masks", "all_attention_mask"), "(N, T) bool, False at padding"),
    "length": Role(
        ("masks", "all_attention_mask"), "(N, T) bool, True at tokens that count towards the cost"
    ),
    "tokens": Role(("tokens", "full"), "(N, T) int: the token ids"),
    "turn_index": Role("turn_index", "(N, T) int: turn of a token, −1: none; None: a row is a turn", True),
    "turn_reward": Role("turn_reward", "(N, T) float per token, or (N, K) per turn"),
    "log_prob": Role(
        ("log_probs", "full"), "(N, T) float: log-probabilities that the loss reads; None: not read", True
    ),
    "old_log_prob": Role(
        ("old_log_probs", "full"), "(N, T) float: log-probabilities of the policy before the step"
    ),
    "sampler_log_prob": Role(
        ("log_probs", "full"), "(N, T) float: log-probabilities of the policy that sampled"
    ),
    "numerator": Role(
        ("teacher_log_probs", "full"), "(N, T) float: log-probabilities in the numerator of a ratio"
    ),
    "denominator": Role(
        ("log_probs", "full"), "(N, T) float: log-probabilities in the denominator of a ratio"
    ),
    "value": Role(("entropy", "full"), "(N, T) float: value of each token that is compared"),
    "sum_pi_squared": Role(
        ("sum_pi_squared", "full"), "(N, T) float: Σ π², over the vocabulary, where each token was sampled"
    ),
    "critic": Role(("values", "full"), "(N, T) float: value of a critic before each token"),
    "value_target": Role("value_target", "(N, T, 1) float: target of the critic (written)"),
    "importance": Role("importance_weight", "(N, T) float: importance weights (written)"),
    "weight": Role("loss_weight", "(N,) float: loss weight of each of the row's tokens (written)"),
    "truncated": Role(None, "(N,) or (N, 1) bool, read instead of the status if set", True),
}

# Roles that every stage can read, whatever its options.
DEFAULTS: dict[str, NestedKey | None] = {
    role: COLUMNS[role].default
    for role in (
        *("group", "rollout", "reward", "advantage", "status", "version", "expected", "done", "init"),
        *("expected_segments", "segment", "turn", "loss_mask", "log_prob", "weight", "votes_only"),
    )
}

# Roles with one number per token, which a loss may read.
OF_TOKENS = (
    "log_prob",
    "old_log_prob",
    "sampler_log_prob",
    "numerator",
    "denominator",
    "value",
    "sum_pi_squared",
    "critic",
    "importance",
)
REFERENCE: tuple[NestedKey, ...] = (("ref_log_probs", "full"), ("next", "ref_log_probs", "full"))

# Columns that a stage writes for later stages, and the name of the stage.
WRITERS: dict[NestedKey, str] = {REWARD: "FanOutCollapse", RETURN: "RewardsToGo", MINIBATCH: "ShuffleSplit"}


class ColumnNames(TypedDict, total=False):
    """Keywords that give a stage other keys of columns. :data:`COLUMNS` has the content of each column."""

    group_key: NestedKey | None
    rollout_key: NestedKey | None
    reward_key: NestedKey
    votes_only_key: NestedKey | None
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
    baseline_value_key: NestedKey
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
    sum_pi_squared_key: NestedKey
    critic_key: NestedKey
    value_target_key: NestedKey
    importance_key: NestedKey
    weight_key: NestedKey
    truncated_key: NestedKey | None


class TakesColumns:
    """Base class of stages, criteria and terms, which read columns by role. The user can rename the columns.

    A subclass declares its columns, ``class Mine(BatchTransform, columns=("group", "reward"))``, takes
    ``**names: Unpack[ColumnNames]``, and calls ``self.name_columns(names)`` first. It then has the options
    `group_key` and `reward_key`, also in its signature. Its options are checked against their annotations
    (:func:`takes_options`).

    Class arguments:
        columns: roles of :data:`COLUMNS`, in place of the roles of the base class.
        needed: roles whose key may not be None in this class.
        optional: roles whose key may be None in this class.
        unset: roles whose key is None in this class by default.

    Example:
        >>> class Mine(TakesColumns, columns=("group", "reward")):
        ...     def __init__(self, *, low: float, **names):
        ...         self.name_columns(names)
        ...         self.low = low
        >>> Mine(low=1.0, reward_key="score").reward_key, Mine(low=1.0).group_key
        ('score', 'group_id')
    """

    _columns: ClassVar[dict[str, Role]] = {}
    set_later: ClassVar[tuple[str, ...]] = ()
    """Options that may be assigned after construction."""

    if TYPE_CHECKING:  # each column has an attribute `<role>_key`

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
            raise TypeError(f"{cls.__name__}: unknown column {unknown[0]!r}; known are {', '.join(COLUMNS)}")
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

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. An option is set only once, because construction computes other values from it.

        Raises:
            AttributeError: the option has been set.
        """
        kind, there = type(self), {*self.__dict__, *self.__dict__.get("_modules", ())}
        if name in there and name not in self.set_later and name in option_names(cast(Any, kind)):
            raise AttributeError(
                f"{name} of {kind.__name__} is fixed at construction: construct a new {kind.__name__} with "
                f"{name}={value!r:.200}"
            )
        super().__setattr__(name, value)

    def name_columns(self, names: Mapping[str, Any]) -> None:
        """Set the attribute ``<role>_key`` of each column.

        Args:
            names: keys by option, for columns that are renamed.

        Raises:
            TypeError: unknown option.
            ValueError: the key of a required column is None.
        """
        owner, options = type(self).__name__, [f"{role}_key" for role in self._columns]
        if unknown := sorted(names.keys() - set(options)):
            raise TypeError(no_option(owner, unknown[0], inspect.signature(type(self)).parameters))
        for option, (role, column) in zip(options, self._columns.items(), strict=True):
            key = nested_key(names.get(option, column.default))
            if key is None and not column.optional:
                raise ValueError(f"{owner} needs the column {role!r}: {option} may not be None")
            setattr(self, option, key)
