"""What travels between server and clients: records, packing, validation."""
