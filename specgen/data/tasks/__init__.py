"""Evaluation tasks, one file each: prompt, extraction, score. Knows nothing of the engine."""
