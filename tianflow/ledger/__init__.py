"""The ledger: tickets, credits and slots, with one writer."""
