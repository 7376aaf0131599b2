"""What a model file is and says of itself, read and written without running it."""
