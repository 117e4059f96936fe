"""What the command does besides training: look at rollouts that were dumped."""
