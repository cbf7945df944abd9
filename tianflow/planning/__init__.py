"""From settings to a program: placement, memory and validation, before anything starts."""
