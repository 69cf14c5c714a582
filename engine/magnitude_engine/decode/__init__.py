"""From logits to what a client sees: drawing tokens, releasing text, recognising tool calls."""
