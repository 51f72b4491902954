"""Trained arms made small for inference: one packed file (docs/tfree.md), or a checkpoint with 2-bit weights."""
