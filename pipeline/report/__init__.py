"""What a run looked like, as one HTML file that needs nothing else."""

from .html import render_page, write_page

__all__ = ["render_page", "write_page"]
