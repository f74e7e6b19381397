"""Trackers: log runs to TensorBoard, MLflow, Weights & Biases or Trackio, during training or from a store."""
