"""The tasks of the command: replay, compare, plan and audit read dumps; certify and xray need none."""
