"""Results of runs: loading, comparing, archiving."""
