"""The zoo: families of public models, each taken from a float model to a proven, timed file."""
