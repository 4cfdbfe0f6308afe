"""Drafters: what they propose and how their state follows the committed text. Knows nothing of scheduling or acceptance."""
