"""Environments of both generations of `verifiers`. No other module imports verifiers."""
