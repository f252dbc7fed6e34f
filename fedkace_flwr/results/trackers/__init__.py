"""Trackers of experiments: each shows the rounds of a run, from the same records as ``rounds.jsonl``."""
