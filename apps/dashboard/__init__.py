"""The dashboard: pages that start commands in the background and show their records, and compute nothing themselves."""
