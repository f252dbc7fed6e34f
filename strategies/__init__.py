"""Server halves of the methods, one file per rule."""
