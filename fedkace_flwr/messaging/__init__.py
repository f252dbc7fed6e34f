"""Messages between the server and the clients: records, packing, validation."""
