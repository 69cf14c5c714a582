"""What of a conversation the model need not see again: decided here, carried out in `pruner.py`."""
