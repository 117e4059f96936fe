"""What is computed of one step: numbers, groups, stages, shares."""
