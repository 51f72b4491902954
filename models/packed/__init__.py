"""Trained arms with a bitnet body made small for inference: their ternary weights at 2 bits each."""
