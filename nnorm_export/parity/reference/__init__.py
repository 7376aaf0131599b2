"""The reference: the user's model in PyTorch, in the dtype of the file and in float64, on given and changed inputs."""
