"""Older toolkits under their own module layout, so that their code runs once you change the import root."""
