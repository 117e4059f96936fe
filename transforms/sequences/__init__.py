"""Prepare rows for a model and its loss: pad, merge, score, pack, or build a tree."""
