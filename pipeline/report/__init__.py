"""Reports of what happened to a batch, printed, logged, dumped and drawn on a page."""

from headrace.pipeline.user_turn import last_user_turn

from .advice import Advice, Advisory, Symptom, advise, symptoms, unchecked, verdict
from .comparison import Comparison
from .dump import report_table, write_dump
from .folder import ReportFolder
from .html import render_page, write_page
from .loggers import log_report
from .numbers import gradient_cosine, gradient_share
from .over_steps import percent, totals_over
from .page_contents import page_data
from .shared_tokens import SharedTokens, count_shared_tokens, said_of_trees
from .step import StepReport, make_report
from .terminal import print_report, show_advisories, show_report
from .texts import decoder_of

__all__ = [
    "Advice",
    "Advisory",
    "Comparison",
    "ReportFolder",
    "SharedTokens",
    "StepReport",
    "Symptom",
    "advise",
    "count_shared_tokens",
    "decoder_of",
    "gradient_cosine",
    "gradient_share",
    "last_user_turn",
    "log_report",
    "make_report",
    "page_data",
    "percent",
    "print_report",
    "render_page",
    "report_table",
    "said_of_trees",
    "show_advisories",
    "show_report",
    "symptoms",
    "totals_over",
    "unchecked",
    "verdict",
    "write_dump",
    "write_page",
]
