"""Pure mathematics on tensors: no state, no TensorDict, no configuration."""
