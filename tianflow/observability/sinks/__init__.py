"""Sinks receive the history of a run besides its file: TensorBoard, W&B, MLflow, or any class with
the two methods of `base.Sink`.
"""
