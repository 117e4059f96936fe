"""What is known of one batch: where each row went, and what was measured."""
