"""Server half of the methods: one strategy per aggregation rule."""
