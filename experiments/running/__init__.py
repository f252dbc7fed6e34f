"""Studies and what runs them."""
