"""The stages of a run as plain functions ``(config, folder)``; each reads and writes the run folder."""
