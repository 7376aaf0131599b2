"""From a trained model to one file, compared with PyTorch before it takes its place; a module for each format."""
