"""The learner: sample, loss, optimizer step, ledger, metrics."""
