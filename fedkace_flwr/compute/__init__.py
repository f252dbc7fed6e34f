"""What a process computes on: its device, how exactly, and how much memory it takes."""
