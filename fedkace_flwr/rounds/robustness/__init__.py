"""Comparison of local models with each other and with earlier ones, against hostile clients."""
