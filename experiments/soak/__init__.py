"""A simulated year of a federation of real SuperNodes, with a ledger of all samples from outside and a verdict."""
