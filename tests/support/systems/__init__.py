"""Whole federations, runs and services under test."""
