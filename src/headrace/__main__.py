"""``python -m headrace``."""

from headrace.pipeline.main import main

main()
