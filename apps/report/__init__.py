"""Reports: records in, text or HTML out. Nothing is computed here, only joined and formatted."""
