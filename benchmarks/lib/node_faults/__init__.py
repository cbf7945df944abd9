"""Parts of the benchmark of faults on several machines."""
