"""Rollouts as they come, from wherever TorchRL collects them."""
