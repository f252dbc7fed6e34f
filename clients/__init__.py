"""Client half of the methods: one NumPyClient per way to learn, keep and answer."""
