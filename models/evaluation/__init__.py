"""Scores of a trained arm: validation loss, perplexity, bits per byte."""
