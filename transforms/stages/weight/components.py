"""Components of a loss: terms that have a mean, tokens and a factor of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from headrace.transforms.table import BatchError, Rows, few
from headrace.transforms.table.annotations import described, fits
from headrace.transforms.table.options import nested_key, within
from headrace.transforms.table.schema import LOSS_WEIGHTS, PADDING, component_names, has_key
from headrace.transforms.table.tensordicts import ATTENTION, check_mask, column_of, loss_mask_of
from headrace.transforms.table.tokens import read_mask, tokens_in_loss, write_tokens

ComponentMean = Literal["token", "sample", "rollout", "group", "constant", "inverse_length"]


class Component(NamedTuple):
    """The options of a component (:class:`LossWeight`): a term of a loss with weights of its own."""

    unit: ComponentMean
    """The mean over the tokens of the component."""
    length: int | None = None
    """Number of tokens, for ``constant``."""
    power: float | None = None
    """α ≥ 0, for ``inverse_length``."""
    factor: float = 1.0
    """Coefficient of the mean in the loss, ≥ 0."""
    loss_mask_key: NestedKey | None = None
    """(N, T) bool, True at the tokens of the component; None: the tokens in the loss."""

    def tokens(self, rows: Rows, in_loss: Tensor) -> Tensor:
        """(M,) int64: tokens of the component in each row; `in_loss`: (M,) int64, tokens in the loss.

        Raises:
            MissingKeyError: the mask is missing.
            BatchError: the mask is not bool, or does not have one entry for each token.
        """
        key, table = self.loss_mask_key, rows.table
        if key is None:
            return in_loss
        key = (key,) if isinstance(key, str) else key  # a tuple is never a role
        if len(table.batch) and not table.masking.elsewhere:
            if (mask := table.find(self.loss_mask_key)) is None:  # rows.count would count the response
                raise rows.missing(key, "components")
            check_mask(table.batch, self.loss_mask_key)
            loss_mask = loss_mask_of(table.batch, rows.key("loss_mask"))
            if loss_mask is not None and (found := _widths(mask)) != (needed := _widths(loss_mask)):
                raise BatchError(
                    "the mask of a component must have one entry for each token, as many as the loss mask: "
                    f"{few(needed)}; {self.loss_mask_key!r} has {few(found)}. For the tokens of whole rows, "
                    "write chosen[:, None] & mask into the batch"
                )
        tokens = rows.count(key)
        return tokens * ~rows[PADDING] if rows.has(PADDING) else tokens

    def write(
        self,
        batch: TensorDictBase,
        numbers: Mapping[str, Tensor],
        *,
        name: str,
        keys: tuple[NestedKey, NestedKey | None],
        dtype: torch.dtype,
    ) -> None:
        """Write ``("loss_weights", name)`` (n, T) into gathered rows.

        Args:
            batch: the rows, TensorDict ``[n]``.
            numbers: ``weight`` (n,) float64, the weight of each token of the component in the row.
            name: name of the component.
            keys: keys of the loss mask and the log-probabilities.
            dtype: dtype of the column.
        """
        weight, like = numbers["weight"], (self.loss_mask_key, keys[0], ATTENTION)
        if has_key(batch, PADDING):  # a padding row has the weight of the row that it copies
            weight = weight.masked_fill(batch.get(PADDING), 0.0)
        if self.loss_mask_key is None:
            inside = tokens_in_loss(batch, *keys)
        else:
            inside = read_mask(batch, self.loss_mask_key, reader="LossWeight", option="components")
        values = (weight.unsqueeze(1) * inside).to(dtype)
        write_tokens(batch, (LOSS_WEIGHTS, name), values, next(key for key in like if has_key(batch, key)))


def _widths(column: Any) -> list[int]:
    """The length of each row of a column; one number for a dense column."""
    return [column.shape[1:].numel()] if isinstance(column, Tensor) else [row.numel() for row in column]


KINDS = {
    "unit": ComponentMean,
    "length": int | None,
    "power": float | None,
    "factor": float,
    "loss_mask_key": NestedKey | None,
}


def read_components(
    given: Mapping[str, Any], of_stage: tuple[Any, int | None, float | None], loss_mask_key: NestedKey
) -> dict[str, Component]:
    """Read the option `components` of :class:`LossWeight`.

    Args:
        given: the options of each component by its name.
        of_stage: `unit`, `length` and `power` of a component that does not give its unit.
        loss_mask_key: key of the loss mask. A component must not name it, because it is the default.

    Raises:
        ValueError: an option is unknown or has a wrong value.
    """
    found = dict[str, Component]()
    for name, options in given.items():
        where = f"components[{name!r}]"
        if not (isinstance(name, str) and name and not name.startswith("loss_")):
            raise ValueError(f"a component is named after its term: 'kl' for loss_kl; got {name!r}")
        if not isinstance(options, Mapping) or (unknown := sorted(set(options) - set(KINDS))):
            wrong = unknown if isinstance(options, Mapping) else options
            raise ValueError(f"{where} must be a mapping with options of {', '.join(KINDS)}; got {wrong!r}")
        for option, value in options.items():
            if not fits(value, KINDS[option]):
                raise ValueError(f"{option} of {where} must be {described(KINDS[option])}; got {value!r}")
        if "unit" not in options:
            if of_stage[0] not in get_args(ComponentMean):
                raise ValueError(
                    f"{where} needs unit, {described(ComponentMean)}; that of the stage is {of_stage[0]!r}"
                )
            options = dict(zip(("unit", "length", "power"), of_stage, strict=True)) | dict(options)
        component = Component(**options)
        within(f"factor of {where}", component.factor, 0)
        component = component._replace(loss_mask_key=nested_key(component.loss_mask_key))
        if component.loss_mask_key == loss_mask_key:
            raise ValueError(f"leave out loss_mask_key of {where}: the loss mask is the default")
        found[name] = component
    return found


def component_loss(terms: Mapping[str, Tensor], batch: TensorDictBase) -> Tensor:
    """Sum the terms of a loss, each with the weights of its component.

    ::

        L = Σ_k Σ_i Σ_t w_kit ℓ_kit,   ℓ_k the term loss_<name of k>

    Args:
        terms: (N, T) or (N, T, 1) float each, by ``loss_<name>``.
        batch: TensorDict ``[N]`` with ``("loss_weights", name)`` (N, T) float.

    Returns:
        A scalar.

    Raises:
        BatchError: terms and components do not have the same names, a term has another shape, or the rows are
            ragged.

    Example:
        >>> from tensordict import TensorDict
        >>> terms = {"loss_objective": torch.tensor([[1.0, 2.0]]), "loss_sft": torch.tensor([[3.0, 4.0]])}
        >>> weights = {"objective": torch.tensor([[1.0, 0.0]]), "sft": torch.tensor([[0.0, 0.5]])}
        >>> float(component_loss(terms, TensorDict({"loss_weights": weights}, batch_size=[1])))
        3.0
    """
    names = {f"loss_{name}": name for name in component_names(batch)}
    if names.keys() != terms.keys():
        raise BatchError(
            "each term of the loss needs a component of LossWeight, and each component a term: the terms are "
            f"{sorted(terms)}, and the components are of {sorted(names)}. Name them alike in components"
        )
    total: Any = 0.0
    for key, name in names.items():
        term, weight = terms[key], column_of(batch, (LOSS_WEIGHTS, name))
        if not isinstance(weight, Tensor):
            raise BatchError(
                "weights of components need dense rows: it is not known on which side the loss padded ragged "
                "rows, so tokens could get the weights of others. Put DenseRows in front (rows=llm), or use "
                "optimise(..., transform=pack)"
            )
        if term.shape not in (weight.shape, (*weight.shape, 1)):
            raise BatchError(
                f"the term of a component must have one number for each token, {tuple(weight.shape)} or "
                f"{(*weight.shape, 1)}; {key!r} is {tuple(term.shape)}. Set aggregation='none' on GRPOLoss"
            )
        # Masked, not only multiplied by 0: a term may be NaN outside of its component, and 0 · NaN is NaN.
        total = total + (term.reshape(weight.shape).masked_fill(weight == 0, 0.0) * weight).sum()
    return total
