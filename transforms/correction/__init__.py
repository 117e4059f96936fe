"""Rollout correction: importance weights and rejection, from the log-probabilities of two policies."""
