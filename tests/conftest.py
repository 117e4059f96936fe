"""What tests share. The process that hands tests out reads this too: torch is imported where it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tensordict import TensorDict

# A test's time depends on what else the machine does; that is no failure.
settings.register_profile("headrace", deadline=None, print_blob=True)
settings.register_profile("quick", settings.get_profile("headrace"), max_examples=30)


def pytest_configure(config: pytest.Config) -> None:
    """Where slow tests are left out, the others search less long."""
    settings.load_profile("quick" if config.option.markexpr == "not slow" else "headrace")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def clocks_stand_still() -> Iterator[None]:
    """Runs of the same batch have the same metrics, also `time/<stage>`."""
    with patch("headrace.pipeline.passage.perf_counter", lambda: 0.0):
        yield


@pytest.fixture
def make_batch() -> Callable[..., TensorDict]:
    """A factory of dense batches in the shape that GRPOLoss takes."""
    from batches import batch_of

    return batch_of
