"""Configurations, metas and the abstract engine. Nothing here imports torch as it is imported."""
