"""Models of others, turned into checkpoints of ours."""
