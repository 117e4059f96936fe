"""Collect rollouts from TorchRL, Ray and queues, and assemble them into groups."""
