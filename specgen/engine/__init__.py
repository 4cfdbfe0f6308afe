"""The engine: slots, pages, the step, acceptance. Knows nothing of files, datasets or Hydra."""
