"""Where a run's history goes besides its file: TensorBoard, W&B, MLflow, or anything that has
`base.Sink`'s two methods.
"""
