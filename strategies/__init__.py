"""Server half of the methods: one file per aggregation rule."""
