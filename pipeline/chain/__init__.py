"""How stages follow one another, are run over a batch, and keep their rules."""
