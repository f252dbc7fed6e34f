"""Files that survive crashes: client state, server checkpoints, encryption."""
