"""The user's PyTorch model: its copies, arguments and weights, and what keeps PyTorch from bypassing its layers."""
