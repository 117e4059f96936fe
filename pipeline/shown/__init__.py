"""Tables and texts as a terminal and a notebook show them, whatever they are about."""
