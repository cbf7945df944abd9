"""Parts of the kill-and-hang storm: the plan of faults, the faults themselves, and the judges."""
