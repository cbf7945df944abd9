"""What a run leaves on disk: checkpoints, history, audit log, summary, control file, lock."""
