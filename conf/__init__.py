"""Hydra configuration: recipes in ``pipeline/``, jobs in ``experiment/``. Reached as ``pkg://headrace.conf``."""
