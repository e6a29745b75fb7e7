"""Id maps: how the ids of a table share fewer rows, and the modules that look such ids up."""
