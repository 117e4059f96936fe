"""What happened to a batch: a report, and ways to look at it and keep it."""

from .compare import Comparison
from .dump import report_table, write_dump
from .html import render_page, write_page
from .loggers import log_report
from .page_data import page_data
from .run import RunReport
from .step import StepReport, empty_report, make_report
from .terminal import show_report

__all__ = [
    "Comparison",
    "RunReport",
    "StepReport",
    "empty_report",
    "log_report",
    "make_report",
    "page_data",
    "render_page",
    "report_table",
    "show_report",
    "write_dump",
    "write_page",
]
