"""Language models over fixed vocabulary codes: vocab, bodies, arms and presets, training, evaluation, harness, generation."""
