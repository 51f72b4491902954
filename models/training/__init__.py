"""The training loop, checkpoints, the grid of matched arms and its report."""
