"""Text from a trained arm. ``loop.generate`` yields it piece by piece, ``loop.complete`` returns it whole."""
