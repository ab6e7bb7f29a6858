"""Isolation: runtimes that may crash run in a process of their own, which costs nothing but itself."""
