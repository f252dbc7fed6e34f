"""The files that a run writes to its folder."""
