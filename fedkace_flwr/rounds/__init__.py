"""The server's side of a round."""
