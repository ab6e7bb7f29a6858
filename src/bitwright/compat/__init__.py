"""Older toolkits under their own module layout, so that code written for them runs with the import root changed."""
