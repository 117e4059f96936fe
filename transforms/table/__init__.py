"""The table of a batch, and the contract of the stages that read it."""

from . import schema
from .alone import Alone
from .checks import require_identity, require_rewards
from .columns import COLUMNS, OF_TOKENS, ColumnNames, TakesColumns
from .entry import enter_rows
from .errors import (
    LISTED,
    BatchError,
    ErrorNames,
    IncompleteGroupsError,
    MissingKeyError,
    OtherRankError,
    ProcessedTwiceError,
    StreamWarning,
    count_of,
    listing,
    who_stamps,
)
from .fates import Effect
from .ids import Ids, first_row, stable_order
from .labels import as_ids, label_key, labels_in_errors, labels_of, labels_said, number_labels
from .places import places_on_arrival
from .process_group import SharedIds, resolve_group
from .rewards import Missing, as_rewards, credit_dtype, weighted_reward
from .rows import Rows, column_keys, few, stage_parts, stages_of_values
from .stage import BatchTransform, check_kind
from .table import AHEAD, OF_THE_TABLE, Table, TokenCount, unknown

__all__ = [
    "AHEAD",
    "COLUMNS",
    "LISTED",
    "OF_THE_TABLE",
    "OF_TOKENS",
    "Alone",
    "BatchError",
    "BatchTransform",
    "ColumnNames",
    "Effect",
    "ErrorNames",
    "Ids",
    "IncompleteGroupsError",
    "Missing",
    "MissingKeyError",
    "OtherRankError",
    "ProcessedTwiceError",
    "Rows",
    "SharedIds",
    "StreamWarning",
    "Table",
    "TakesColumns",
    "TokenCount",
    "as_ids",
    "as_rewards",
    "check_kind",
    "column_keys",
    "count_of",
    "credit_dtype",
    "enter_rows",
    "few",
    "first_row",
    "label_key",
    "labels_in_errors",
    "labels_of",
    "labels_said",
    "listing",
    "number_labels",
    "places_on_arrival",
    "require_identity",
    "require_rewards",
    "resolve_group",
    "schema",
    "stable_order",
    "stage_parts",
    "stages_of_values",
    "unknown",
    "weighted_reward",
    "who_stamps",
]
