"""Isolation: runtimes that may crash run in a child process, so that a crash does not end this one."""
