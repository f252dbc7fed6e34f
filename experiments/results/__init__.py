"""Finished runs: loading, comparing, keeping."""
