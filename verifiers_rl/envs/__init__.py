"""Environments of `verifiers`, of both its generations. Nothing else imports verifiers."""
