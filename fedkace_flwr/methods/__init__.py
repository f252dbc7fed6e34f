"""What the two halves of a method agree on: its keys, the names of its messages, its metrics."""
