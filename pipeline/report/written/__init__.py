"""Reports as files: the page, the dump, the folder of a run; and as trackers take them."""
