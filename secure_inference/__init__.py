"""Private inference with garbled circuits (DeepSecure). Nothing is here yet."""
