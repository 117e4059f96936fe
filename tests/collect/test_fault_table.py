"""Faults of an environment are reported in bounded time behind each source, as the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from troubles import BOUND, CELLS, PLACES, look_at_all

pytestmark = [pytest.mark.torchrl, pytest.mark.slow]

PAGE = Path(__file__).parents[2] / "docs" / "streams.md"


@pytest.mark.parametrize("place", [place for place in PLACES if place != "Ray"])
def test_each_environment_fault_is_reported_in_bounded_time(place):
    check(place)


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_each_fault_of_a_ray_writer_is_reported_in_bounded_time():
    check("Ray")


def check(place: str) -> None:
    for trouble, found in look_at_all(place).items():
        cell = CELLS[trouble][PLACES.index(place)]
        assert cell.is_in(found), f"{trouble}: {found}"
        assert 0 <= found.after < BOUND, f"{trouble}: {found}"
        assert found.ends, f"{trouble}: {found}"
        if "on stderr" in cell.words and trouble == "raises an error":
            assert "ArithmeticError: the reward model is gone" in found.stderr


def test_the_page_has_the_reported_errors():
    page = PAGE.read_text()
    for trouble, cells in CELLS.items():
        lines = re.findall(rf"^\| {re.escape(trouble)} \|.*$", page, re.MULTILINE)
        assert len(lines) == 1, f"{trouble}: run tools/make_faults.py"
        for cell, shown in zip(cells, lines[0].strip("|").split(" | ")[1:], strict=True):
            assert shown.startswith(f"{cell.shown}, "), f"{trouble}: run tools/make_faults.py"
