"""What is kept of searches in MLflow, and how it is read back."""
