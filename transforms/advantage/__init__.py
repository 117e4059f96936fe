"""Advantages: rewards of rollouts compared with a baseline."""
