"""How long the HTTP service keeps a good caller waiting while others do their worst, and the memory that they cost."""
