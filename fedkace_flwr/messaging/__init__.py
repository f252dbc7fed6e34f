"""Messages between the server and the clients: what they hold, metrics, checks."""
