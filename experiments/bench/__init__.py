"""Benchmarks: medians and ratios of one run, with their spread, the hardware and the versions."""
