"""Benchmarks: ratios of medians within one run, with spread, hardware and versions beside them."""
