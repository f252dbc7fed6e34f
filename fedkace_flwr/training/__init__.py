"""Networks, losses and the local training loop."""
