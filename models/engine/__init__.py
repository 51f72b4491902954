"""An engine for CPUs: generation and scores from a packed file, without PyTorch."""
