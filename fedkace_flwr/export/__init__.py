"""Models to take away: files that need neither a run nor its data set, and what loads them."""
