"""Search what an observer kept for a range: least error, least divergence, powers of two."""
