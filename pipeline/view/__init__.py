"""``headrace view FOLDER``: all rows of all steps of a run, or of two, in a browser on this machine."""
