"""Criteria decide which rows stay. SampleFilter masks, excludes or drops the others."""
