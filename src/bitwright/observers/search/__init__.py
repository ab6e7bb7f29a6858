"""How a range is found in what an observer has kept: least error, least divergence, powers of two."""
