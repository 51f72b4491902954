"""Decoder bodies without a vocabulary: gpt2, llama, gemma3."""
