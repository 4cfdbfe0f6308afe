"""Input rows: where they come from and how they become prompts. Knows nothing of models, engines or files written."""
