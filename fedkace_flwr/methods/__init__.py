"""What the client and server halves of each method share: its keys, the names of its messages, its metrics."""
