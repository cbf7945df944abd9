"""Settings: the models, and the functions that read, check and describe them. No PyTorch."""
