"""Of what a report warns, what it advises, and what a symptom means."""
