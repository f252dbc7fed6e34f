"""Predictions from the models that clients keep."""
