"""The command line: all commands, and the only user of typer and rich."""
