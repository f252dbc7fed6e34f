"""Studies, the runner and the benchmarks."""
