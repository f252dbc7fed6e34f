"""The mathematics of the papers, as pure functions on tensors; each module's name starts with its method."""
