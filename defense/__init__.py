"""Run-time detection of adversarial inputs (DeepFense)."""
