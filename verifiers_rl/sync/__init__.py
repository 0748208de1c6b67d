"""Weights from the trainer to inference servers."""
