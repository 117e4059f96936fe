"""What the command does before and after its tasks: help, listings, checks, and the table of a sweep."""
