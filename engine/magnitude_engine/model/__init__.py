"""Models: files to weights, text to tokens, and the decoder in three numeric profiles."""
