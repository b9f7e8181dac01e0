"""What exists here because TorchRL documents it."""
