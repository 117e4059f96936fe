"""The tasks of the command that read dumps: replay, compare and plan."""
