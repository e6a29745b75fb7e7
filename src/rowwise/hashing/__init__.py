"""From ids to rows: how the ids of a table share fewer rows, and modules that look them up so."""
