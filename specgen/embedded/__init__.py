"""The small model family that ships with the package: target, drafters, prompts, and the program that trained them."""
