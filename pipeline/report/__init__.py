"""Reports of what happened to a batch, printed, logged, dumped and drawn on a page."""

from .advice.advisories import Advisory, advise, verdict
from .advice.symptoms import Symptom, symptoms
from .comparison import Comparison
from .measuring.gradient import gradient_cosine, gradient_share
from .measuring.shared_tokens import SharedTokens, count_shared_tokens, tree_words
from .responses import decoder_of
from .step import StepReport, make_report
from .terminal import print_report, show_advisories, show_report
from .user_turn import last_user_turn
from .written.dump import report_table, write_dump
from .written.folder import ReportFolder
from .written.html import render_page, write_page
from .written.loggers import log_report
from .written.page_data import page_data

__all__ = [
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
    "print_report",
    "render_page",
    "report_table",
    "show_advisories",
    "show_report",
    "symptoms",
    "tree_words",
    "verdict",
    "write_dump",
    "write_page",
]
