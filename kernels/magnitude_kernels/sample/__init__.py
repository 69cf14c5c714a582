"""Drawing one token per row from masked, tempered and truncated logits with keyed noise."""
