"""Stand-ins that misbehave, record or fail."""
