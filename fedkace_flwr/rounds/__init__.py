"""The server's side of a round: driver, messages, checks and aggregation."""
