"""Data sets, the stream that is drawn from them, and the inbox of a device."""
