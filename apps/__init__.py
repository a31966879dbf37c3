"""Command line, reports and dashboard."""
