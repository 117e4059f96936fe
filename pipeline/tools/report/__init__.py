"""Report what happened to a batch: in the terminal, in trackers, in dumps and on a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.faces import lazy

if TYPE_CHECKING:
    from .advice import LENGTH, Advice, Advisory, Symptom, advise, symptoms, unchecked, verdict
    from .comparison import Comparison
    from .display import REWARD, TrainingDisplay, history_table
    from .dump import report_table, write_dump
    from .failed_steps import FAILED, FailedStep, read_failed
    from .folder import ReportFolder, said_of_failed
    from .groups import compared_values, differs, has_reward
    from .history import read_recipe
    from .html import as_html, plain_page, policy, render_page, write_page
    from .loggers import log_report
    from .notebook import show_pipeline
    from .numbers import AGREE, gradient_cosine, gradient_share
    from .over_steps import percent, quarter_means, totals_over
    from .page_contents import page_data
    from .row_columns import report_columns
    from .shared_tokens import SharedTokens, count_shared_tokens, count_trained_again, said_of_trees
    from .step import StepReport, make_report
    from .survivors import BIASED, tenths_table
    from .tables import FittedColumn, FittedTable
    from .terminal import print_report, said_of_unchecked, show_advisories, show_report
    from .texts import decoder_of
    from .user_turn import asked_line, last_user_turn, prompt_label
    from .valid_json import json_text

__all__ = [
    "AGREE",
    "BIASED",
    "FAILED",
    "LENGTH",
    "REWARD",
    "Advice",
    "Advisory",
    "Comparison",
    "FailedStep",
    "FittedColumn",
    "FittedTable",
    "ReportFolder",
    "SharedTokens",
    "StepReport",
    "Symptom",
    "TrainingDisplay",
    "advise",
    "as_html",
    "asked_line",
    "compared_values",
    "count_shared_tokens",
    "count_trained_again",
    "decoder_of",
    "differs",
    "gradient_cosine",
    "gradient_share",
    "has_reward",
    "history_table",
    "json_text",
    "last_user_turn",
    "log_report",
    "make_report",
    "page_data",
    "percent",
    "plain_page",
    "policy",
    "print_report",
    "prompt_label",
    "quarter_means",
    "read_failed",
    "read_recipe",
    "render_page",
    "report_columns",
    "report_table",
    "said_of_failed",
    "said_of_trees",
    "said_of_unchecked",
    "show_advisories",
    "show_pipeline",
    "show_report",
    "symptoms",
    "tenths_table",
    "totals_over",
    "unchecked",
    "verdict",
    "write_dump",
    "write_page",
]

__getattr__, __dir__ = lazy(__name__, __all__)
