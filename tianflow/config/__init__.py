"""The one model of settings, and everything that reads, checks and describes it. No PyTorch."""
