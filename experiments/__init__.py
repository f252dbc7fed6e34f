"""Run studies, report their results and measure performance."""
