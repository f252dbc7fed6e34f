"""Differential privacy: noise, client modifiers, accounting."""
