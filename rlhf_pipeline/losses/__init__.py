"""Losses as TorchRL loss modules."""
