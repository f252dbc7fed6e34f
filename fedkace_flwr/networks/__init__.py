"""Networks: what all of them have in common, those that come with the package, and how one is chosen by name."""
