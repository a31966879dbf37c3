"""Run-time detection of adversarial inputs (DeepFense). Nothing is here yet."""
