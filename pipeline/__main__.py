"""``python -m headrace.pipeline``."""

from .main import main

main()
