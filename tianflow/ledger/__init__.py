"""The ledger: the one writer of ticket states, and the parts that it is made of."""
