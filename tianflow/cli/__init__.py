"""The command line: every command, and the only user of typer and rich."""
