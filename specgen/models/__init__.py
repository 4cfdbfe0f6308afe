"""The target: from a checkpoint to logits. Knows nothing of drafting, acceptance or scheduling."""
