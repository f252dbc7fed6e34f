"""What this project uses of Flower and Ray beyond their public interfaces, and how it starts them fast."""
