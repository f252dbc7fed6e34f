"""Answering with the models that clients keep."""
