"""How a token id becomes an input vector, and a hidden state becomes scores: codes, interfaces, heads."""
