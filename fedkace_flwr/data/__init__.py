"""Data sets, the stream drawn from them, and the inbox of a device."""
