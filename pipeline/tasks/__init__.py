"""The tasks of the command: replay, compare, plan and audit, which read dumps; certify needs none."""
