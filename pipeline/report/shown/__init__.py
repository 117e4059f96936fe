"""Reports, ledgers and pipelines as a terminal and a notebook show them."""
