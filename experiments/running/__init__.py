"""Run studies: engines, workers, progress and recovery."""
