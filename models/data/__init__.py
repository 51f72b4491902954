"""Text for training, prepared once and then read by every arm.

``python -m models.data prepare`` turns text (``text``, ``packaged_text``, ``wikitext``) into token shards with a manifest
(``prepare``, ``shards``). ``shards.TokenData.open(directory)`` checks and opens them, ``batches.Batches`` cuts the training split
into rows, ``batches.validation_windows`` walks through the validation split.
"""
