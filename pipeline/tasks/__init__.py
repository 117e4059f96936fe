"""The tasks of the command: replay, compare and plan, which read dumps, and certify, which needs none."""
