"""Writing and reporting: reads files and types only, never the engine."""
